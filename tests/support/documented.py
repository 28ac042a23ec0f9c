"""What the pages of docs/ tell the reader to type."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def commands(page: str) -> list[str]:
    """Return the indented lines of a page, without their comments. Lines that end in a backslash
    are joined with the next."""
    text = re.sub(r"```.*?```", "", (ROOT / "docs" / page).read_text(), flags=re.DOTALL)
    text = re.sub(r"\\\n +", "", text)
    lines = re.findall(r"^    (\S.*)$", text, re.MULTILINE)
    return [re.sub(r"\s+# .*", "", line) for line in lines]


def examples(page: str) -> list[str]:
    """Return a page's blocks of Python."""
    return re.findall(r"```python\n(.*?)```", (ROOT / "docs" / page).read_text(), re.DOTALL)
