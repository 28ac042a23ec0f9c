"""Makes text from a peer safe to store and to show: bounded in bytes, one line, without characters
that could mislead a terminal or a reader of logs."""

_CUT = "..."


def printable(text: str) -> str:
    """Return text with every non-printable character escaped: line ends, escape sequences, marks
    that change the direction of writing, lone surrogates."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def bounded(text: str, max_bytes: int) -> str:
    """Return text cut to a number of UTF-8 bytes, with "..." at its end if it was cut."""
    encoded = text.encode(errors="replace")
    if len(encoded) <= max_bytes:
        return encoded.decode()
    return encoded[: max_bytes - len(_CUT)].decode(errors="ignore") + _CUT


def one_line(text: str, max_bytes: int) -> str:
    """Return text for storing: printable, and bounded."""
    return bounded(printable(text), max_bytes)
