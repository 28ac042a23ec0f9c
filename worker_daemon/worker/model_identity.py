"""The files that a model's weights are read from, for each load format, and their identity."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rpc_schema.config import ModelConfig
from rpc_schema.errors import CheckpointError
from worker_daemon.contracts.source_identity import SourceIdentity
from worker_daemon.models.file_identity import file_identity, file_stamps
from worker_daemon.models.saved_set import INDEX_FILE
from worker_daemon.models.weights import INDEX_NAME, weight_files
from worker_daemon.regular_file import read_whole
from worker_daemon.worker.resolve import ResolvedModel, config_paths


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """The files that a load reads."""

    directory: Path
    texts: Mapping[Path, bytes]
    """Small files, with their contents."""
    sampled: tuple[Path, ...]
    """Files with weights."""
    others: tuple[Path, ...] = ()
    """Files with weights that the texts determine."""

    @classmethod
    def of(cls, resolved: ResolvedModel, config: ModelConfig) -> "ModelFiles":
        """Find the files of a resolved model. Raises CheckpointError if a checkpoint has no
        weights, or a broken index of them."""
        directory = resolved.directory
        paths = config_paths(directory, resolved.decoder)
        texts = {paths[name]: content for name, content in resolved.config_files.items()}
        if config.load_format == "dummy":
            return cls(directory, texts, ())
        if resolved.saved is not None:
            index = directory.parent / INDEX_FILE  # its save id is new for every save
            others = tuple(path for path in directory.iterdir() if path not in texts)
            return cls(directory, texts | _small(index), (), others)
        sampled = weight_files(directory)
        return cls(directory, texts | _small(directory / INDEX_NAME), sampled)

    def stamps(self) -> bytes:
        """See file_stamps."""
        return file_stamps((*self.texts, *self.sampled, *self.others))

    def identity(self) -> SourceIdentity:
        """Return the files' identity: call this before they are read, and check_unchanged after."""
        return file_identity(self.directory, self.texts, self.sampled, self.stamps())

    def check_unchanged(self, identity: SourceIdentity) -> None:
        """Raise CheckpointError if a file was changed since `identity` was taken."""
        if self.stamps() != identity.stamps:
            raise CheckpointError(
                "files of the model changed while they were read",
                field="model",
                value=str(self.directory),
                fix="load it again, once nothing writes them",
            )


def _small(path: Path) -> dict[Path, bytes]:
    """Return the content of a file that the load has read before, if there is one."""
    try:
        return {path: read_whole(path)}
    except OSError:
        return {}
