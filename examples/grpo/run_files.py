"""The files of a run: all that its processes tell each other, and all that outlives them. Each is
complete or absent, and written again with the same contents if its writer dies behind it."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec

GROUPS: Final = 4
"""Groups that are added at each border."""
GROUP_SIZE: Final = 8
"""Samples of each prompt."""
SEGMENT_TOKENS: Final = 8
"""Tokens that a sample gains between two borders."""
SPAN: Final = 3
"""Segments that a sample lives for, unless it ends itself."""
MAX_TOKENS: Final = SPAN * SEGMENT_TOKENS


class Settings(msgspec.Struct, frozen=True):
    """The parameters of a run."""

    endpoints: list[str]
    """Those of the daemons, one for each pipeline stage."""
    num_updates: int
    kept_policies: int = SPAN + 1
    """Newest policies whose files are kept. One that is sampled from is never older."""


class Sample(msgspec.Struct):
    """A completion, as far as it has come."""

    cohort: int
    """The segment in which it has begun, which is also the number of the batch that it is in."""
    group: int
    """Among those of the cohort."""
    index: int
    """In its group."""
    prompt: list[int]
    seed: int
    token_ids: list[int] = []
    logprobs: list[float] = []
    """Of each token, under the policy that has sampled it, as the daemons returned it."""
    policies: list[int] = []
    """The number of that policy."""
    reward: float = 0.0

    @property
    def req_id(self) -> str:
        """Its request's id."""
        return f"{self.cohort}/{self.group}/{self.index}"


class Border(msgspec.Struct):
    """The samples between two segments."""

    segment: int
    """The segment that begins."""
    samples: list[Sample]


class RunFiles:
    """The directory of a run. Any process may read it; each file has one writer."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._settings = directory / "settings.json"
        self._border = directory / "border.json"
        self.policies = directory / "policies"
        self._batches = directory / "batches"

    def create(self, settings: Settings) -> None:
        """Make an empty directory one of a run."""
        for directory in (self.policies, self._batches):
            directory.mkdir(parents=True)
        _write(self._settings, settings)

    @property
    def settings(self) -> Settings:
        """Its parameters."""
        return msgspec.json.decode(self._settings.read_bytes(), type=Settings)

    def read_border(self) -> Border:
        """Return the last border; that before the first segment if there was none."""
        if not self._border.exists():
            return Border(0, [])
        return msgspec.json.decode(self._border.read_bytes(), type=Border)

    def write_border(self, border: Border) -> None:
        """Replace the last border: the segment before it is done."""
        _write(self._border, border)

    def batch(self, number: int) -> Path:
        """Return the file of a cohort that is complete, which is there once it is."""
        return self._batches / f"{number:06}.json"

    def read_batch(self, number: int) -> list[Sample]:
        """Return a complete cohort, group by group."""
        return msgspec.json.decode(self.batch(number).read_bytes(), type=list[Sample])

    def write_batch(self, number: int, samples: list[Sample]) -> None:
        """Hand a complete cohort to the trainer."""
        _write(self.batch(number), samples)

    def policy(self, number: int) -> Path:
        """Return the directory of a policy, a checkpoint, which is there once it is complete.
        Policy 0 is the first; policy n + 1 has learned from batch n."""
        return self.policies / f"{number:06}"

    def newest_policy(self) -> int:
        """Return the number of the newest complete policy; -1 if there is none."""
        return max((int(path.name) for path in self.policies.glob("[0-9]" * 6)), default=-1)

    def write_policy(self, number: int, save: Callable[[Path], None], kept: int) -> None:
        """Add a policy, which save(directory) writes, and remove all but the first and the `kept`
        newest ones."""
        path = self.policy(number)
        draft = path.with_suffix(".tmp")
        shutil.rmtree(draft, ignore_errors=True)
        save(draft)
        draft.rename(path)
        for old in self.policies.glob("[0-9]" * 6):
            if 0 < int(old.name) <= number - kept:
                shutil.rmtree(old)


def _write(path: Path, value: object) -> None:
    """Write a file that is complete from the moment that it is there. (It would also need fsync to
    outlive the host.)"""
    draft = path.with_suffix(".tmp")
    draft.write_bytes(msgspec.json.encode(value))
    draft.replace(path)
