"""Lines of text for a terminal, and plots of block characters in them. Pure."""

from collections.abc import Iterable, Sequence
from math import ceil
from typing import Final, NamedTuple

from rich.text import Text

BLOCKS: Final = "▁▂▃▄▅▆▇█"
_AXES: Final = "┤│└─▲"
_ASCII: Final = str.maketrans(BLOCKS + _AXES, "._:-=+*#" + "||+-^")


class Line(NamedTuple):
    """A line of text. style: of rich."""

    text: str
    style: str = ""


def as_text(lines: Iterable[Line]) -> Text:
    """Return lines for rich, which crops those that are too long."""
    text = Text(no_wrap=True, overflow="crop")
    for index, line in enumerate(lines):
        text.append(("\n" if index else "") + line.text, line.style)
    return text


def encodable(line: Line, encoding: str) -> Line:
    """Return the line with its plots in ASCII if the encoding lacks their characters."""
    try:
        line.text.encode(encoding)
    except UnicodeEncodeError:
        return line._replace(text=line.text.translate(_ASCII))
    return line


def sparkline(values: Sequence[float | None], top: float) -> str:
    """Return a character for each value from 0 to top: the lowest stands for 0 alone, and a blank
    for None."""
    steps = len(BLOCKS) - 1
    return "".join(
        " " if value is None else BLOCKS[min(steps, ceil(value / top * steps)) if top > 0 else 0]
        for value in values
    )


def bars(values: Sequence[float], top: float, height: int) -> list[str]:
    """Return a bar for each value from 0 to top, in lines from the highest down: an eighth of a
    line high at least, unless the value is 0."""
    levels = [ceil(value / top * height * len(BLOCKS)) if top > 0 else 0 for value in values]
    return ["".join(_cell(level, height - row) for level in levels) for row in range(1, height + 1)]


def _cell(level: int, num_below: int) -> str:
    """Return a bar's character in the line above num_below others."""
    own = min(len(BLOCKS), level - num_below * len(BLOCKS))
    return BLOCKS[own - 1] if own > 0 else " "
