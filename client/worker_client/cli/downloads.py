"""Shows downloads of models: a bar on a terminal, else a line when each begins."""

import contextlib
import sys
from collections.abc import Iterator

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from model_hub import fetching
from model_hub.fetching import OnProgress
from model_hub.names import RepoName
from worker_client.inputs.model_source import ShowDownload


@contextlib.contextmanager
def shown_downloads() -> Iterator[ShowDownload]:
    """Yield what shows downloads on standard error, in the block."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _show_line
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as bars:

        def show_bar(name: RepoName) -> OnProgress:
            bar = bars.add_task(name.repo_id, visible=False, total=None)

            def move(progress: fetching.DownloadProgress) -> None:
                is_some = progress.total_bytes > 0
                bars.update(
                    bar,
                    completed=progress.done_bytes,
                    total=progress.total_bytes,
                    visible=is_some,
                )

            return move

        yield show_bar


def _show_line(name: RepoName) -> OnProgress:
    announced: set[int] = set()

    def show(progress: fetching.DownloadProgress) -> None:
        total = progress.total_bytes
        if total > progress.done_bytes and total not in announced:
            announced.add(total)
            files = "1 file" if progress.num_files == 1 else f"{progress.num_files} files"
            sys.stderr.write(f"downloading {name}: {files}, {total / 1e6:.1f} MB\n")

    return show
