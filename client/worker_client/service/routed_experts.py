"""The experts of tokens in answers: the field of vLLM's server, asked for as in SGLang's."""

import base64
import io
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from worker_client.scheduler_output import Experts
from worker_client.service.fields import BodyFields

ASK: Final = "return_routed_experts"
NAMES: Final[Mapping[str, str]] = {"routed_experts": ASK}
"""The body's name for the driver's field."""


def take_routed_experts(fields: BodyFields) -> dict[str, Any]:
    """Return the option of a body that asks for the experts of its tokens. Raises RequestError."""
    return {"routed_experts": True} if fields.take(ASK, bool, False) else {}


def experts_field(parts: Sequence[Experts | None]) -> dict[str, Any]:
    """Return the field of a choice for consecutive positions, [positions, layers with experts,
    top_k]: a .npy file, with dtype and shape, in base64. Without any the field is left out."""
    known = [part for part in parts if part is not None]
    if not known:
        return {}
    file = io.BytesIO()
    np.save(file, np.concatenate(known), allow_pickle=False)
    return {"routed_experts": base64.b64encode(file.getvalue()).decode("ascii")}
