"""What the pages of docs/ tell the reader to type."""

import re
from pathlib import Path
from typing import NamedTuple

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


PROGRAMS = (
    *("worker-daemon", "worker-client", "worker-probe", "python", "python3", "pip", "make", "curl"),
    *("docker", "systemctl", "pytest", "kill", "runuser", "pre-commit"),
)
"""Programs whose commands a block of a page may have."""
MARK = re.compile(r"<!-- (run by|not run:) (.+?) -->")


class Block(NamedTuple):
    """A block of commands."""

    page: str
    """Its path below the root."""
    line: int
    """Number of its first line."""
    commands: tuple[str, ...]
    """Its lines, without comments; those that end in a backslash are joined with the next."""
    run_by: str | None
    """The test that runs it, from the mark before it."""
    reason: str | None
    """Why none does, from the mark before it."""


def blocks(page: str) -> list[Block]:
    """Return the blocks of a page that have commands: indented ones, and fenced ones of bash. A
    mark, `<!-- run by PATH -->` or `<!-- not run: REASON -->`, is the last line before a block that
    is not empty."""
    found, mark, number = [], None, 0
    lines = [*(ROOT / page).read_text().splitlines(), ""]
    while number < len(lines):
        line, first = lines[number], number + 1
        is_fence, number = line.startswith("```"), number + 1
        if is_fence or line.startswith("    "):
            body = [] if is_fence else [line]
            while number < len(lines) and _goes_on(lines, number, is_fence):
                body.append(lines[number])
                number += 1
            number += is_fence
            commands = _joined(body)
            is_shell = line in ("```bash", "```sh", "```console") or not is_fence
            if is_shell and any(map(_is_command, commands)):
                kind, text = ("", "") if mark is None else mark.groups()
                run_by, reason = (text if kind == k else None for k in ("run by", "not run:"))
                found.append(Block(page, first, commands, run_by, reason))
            mark = None
        elif line.strip():
            mark = MARK.fullmatch(line)
    return found


def _goes_on(lines: list[str], number: int, is_fence: bool) -> bool:
    """Return True if a block has this line too; blank lines are inside if it goes on after them."""
    if is_fence:
        return not lines[number].startswith("```")
    rest = next((line for line in lines[number:] if line.strip()), "")
    return rest.startswith("    ")


def _joined(body: list[str]) -> tuple[str, ...]:
    text = re.sub(r"\\\n\s+", "", "\n".join(body))
    lines = (re.sub(r"(^|\s+)# .*", "", line).strip() for line in text.splitlines())
    return tuple(line for line in lines if line)


def _is_command(line: str) -> bool:
    words = [word for word in line.split() if not re.match(r"[A-Z_]+=", word)]
    return bool(words) and words[0].rpartition("/")[2] in PROGRAMS
