"""Arrays with an entry for each of a growing number of requests."""

from typing import Any

import numpy as np
from numpy.typing import NDArray


def grown(array: NDArray[Any], size: int) -> NDArray[Any]:
    """Return an array with this one's entries, and zeros behind them."""
    larger = np.zeros((size, *array.shape[1:]), array.dtype)
    larger[: len(array)] = array
    return larger
