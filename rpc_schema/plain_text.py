"""Text that a peer wrote, made safe to keep and to show: bounded in bytes, one line, nothing that a
terminal or a reader of logs takes for something else."""

_CUT = "..."


def printable(text: str) -> str:
    """Return text with every character escaped that is not printable: line ends, escape sequences,
    marks that turn the direction of writing, lone surrogates."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def bounded(text: str, max_bytes: int) -> str:
    """Return text cut to so many bytes of UTF-8, of which the last show that it was cut."""
    encoded = text.encode(errors="replace")
    if len(encoded) <= max_bytes:
        return encoded.decode()
    return encoded[: max_bytes - len(_CUT)].decode(errors="ignore") + _CUT


def one_line(text: str, max_bytes: int) -> str:
    """Return text as it may be kept: printable, and bounded."""
    return bounded(printable(text), max_bytes)
