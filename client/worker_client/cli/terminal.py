"""Lines of text on standard output, with color where it is a terminal and NO_COLOR is not set."""

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from worker_client.cli.output_file import print_text
from worker_client.cli.terminal_lines import Line, as_text, encodable


def print_lines(lines: Sequence[Line]) -> None:
    """Print lines; long ones are not cut. Raises OutputError."""
    console = Console(highlight=False)
    with console.capture() as captured:
        console.print(shown_on(console, lines), soft_wrap=True)
    print_text(captured.get())


def shown_on(console: Console, lines: Sequence[Line]) -> Text:
    """Return lines as a console can show them; marks of an event are red."""
    text = as_text(encodable(line, console.encoding) for line in lines)
    text.highlight_regex("▲", "bold red")
    return text
