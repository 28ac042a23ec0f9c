"""vLLM's calls of its workers by name (collective_rpc), as operations of the group."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import PurePath
from types import MappingProxyType
from typing import Any, Final, TypeVar

import msgspec

from rpc_schema import weight_transfer as wt
from rpc_schema.pooling import NO_POOLING
from worker_client.errors import ContentMismatchError, config_error
from worker_client.group.loading import LoadedGroup
from worker_client.vllm.settings import relative_name
from worker_client.vllm.weight_changes import WeightChanges
from worker_client.vllm.workers import Workers
from worker_client.wire.worker_client import TensorList
from worker_client.worker_group import WorkerGroup

_T = TypeVar("_T")
_Operation = Callable[..., list[Any]]


class Operations:
    """Runs operations by name. Each returns a list, as vLLM expects one result of each worker."""

    def __init__(
        self,
        workers: Workers,
        model: LoadedGroup,
        flush: Callable[[], None],
        changes: WeightChanges,
        forget_tier: Callable[[], None],
        *,
        pools: bool,
    ) -> None:
        """flush ends requests on the workers that vLLM has ended; what drops rows would otherwise
        count them as lost. forget_tier forgets what is in host memory. pools: the server's requests
        pool, instead of generating."""
        self._pools = pools
        self._changes = changes
        self._workers = workers
        self._model = model
        self._flush = flush
        self._are_weights_lost = False
        """They were discarded, and not loaded again."""
        self._forget_tier = forget_tier
        self._adapter_names: set[str] = set()
        """vLLM's, of adapters that were read: its hashes of blocks have no more of them."""
        self._added: set[int] = set()
        """Ids of the adapters that this server has added; an earlier one may have read others."""
        self._by_name: Mapping[str, _Operation] = MappingProxyType(
            {
                "add_lora": self._add_lora,
                "compute_weight_checksums": self._compute_weight_checksums,
                "discard": self._discard,
                "finish_weight_update": self._finish_weight_update,
                "get_supported_tasks": self._get_supported_tasks,
                "init_weight_transfer_engine": self._init_weight_transfer_engine,
                "list_loras": self._list_loras,
                "pin_lora": self._pin_lora,
                "profile": self._profile,
                "reload_weights": self._reload_weights,
                "remove_lora": self._remove_lora,
                "replace_dead": self._replace_dead,
                "reset_encoder_cache": _nothing,
                "reset_mm_cache": _nothing,
                "save_sharded_state": self._save_sharded_state,
                "shutdown_weight_transfer_engine": _nothing,
                "sleep": self._sleep,
                "start_draft_weight_update": self._start_draft_weight_update,
                "start_weight_update": self._start_weight_update,
                "supports_draft_weight_updates": _refused,
                "synchronize_device": _nothing,
                "update_max_model_len": self._update_max_model_len,
                "update_weights": self._update_weights,
                "wake_up": self._wake_up,
            }
        )

    def run(self, method: str, /, *args: Any, **kwargs: Any) -> list[Any]:
        """Run an operation.

        Raises:
            NotImplementedError: the daemons do not have it.
            WorkerDaemonError: it is refused, or has failed.
        """
        operation = self._by_name.get(method)
        if operation is None:
            known = ", ".join(sorted(self._by_name))
            raise NotImplementedError(
                f"worker daemons have no operation {method!r}; they have {known}"
            )
        return operation(*args, **kwargs)

    def why_closed(self) -> str:
        """Return why no request can be served; empty: they can."""
        if not self._are_weights_lost:
            return ""
        return "the weights were discarded; fix: reload_weights, or a complete weight update"

    @property
    def _group(self) -> WorkerGroup:
        return self._workers.group

    def _replace_dead(self) -> list[None]:
        self._workers.replace_dead()
        return [None]

    # ------------------------------------------------------------------ adapters

    def ensure_lora(self, request: Any) -> None:
        """Make all daemons have the adapter of a LoRARequest.

        Raises:
            ClientConfigError: it lies outside the daemons' directory of adapters.
            WorkerError: a daemon refuses it.
        """
        self._load_lora(request, load_inplace=False)

    def _load_lora(self, request: Any, *, load_inplace: bool) -> None:
        field = "additional_config.worker_daemon.lora_root"
        name = relative_name(request.lora_path, self._workers.settings.lora_root, field)
        lora_id = request.lora_int_id
        for other, known in list(self._group.loras.known.items()):
            if (other == lora_id) != (known.name == name):  # an earlier server's
                self._group.loras.remove(other)
        if load_inplace or lora_id not in self._added or lora_id not in self._group.loras.known:
            if request.lora_name in self._adapter_names:
                self._forget_tier()  # its weights may be others now
            self._adapter_names.add(request.lora_name)
            self._read_lora(name, lora_id, load_inplace=load_inplace)
            self._added.add(lora_id)

    def _read_lora(self, name: str, lora_id: int, *, load_inplace: bool) -> None:
        try:
            self._group.loras.add(name, lora_id, load_inplace=load_inplace)
        except ContentMismatchError:  # perhaps an earlier server has read other files
            self._group.loras.add(name, lora_id, load_inplace=True)

    def _add_lora(self, request: Any) -> list[bool]:
        self._load_lora(request, load_inplace=request.load_inplace)
        return [True]

    def _remove_lora(self, lora_id: int) -> list[bool]:
        return [self._group.loras.remove(lora_id)]

    def _pin_lora(self, lora_id: int) -> list[bool]:
        self._group.loras.pin(lora_id)
        return [True]

    def _list_loras(self) -> list[set[int]]:
        return [set(self._group.loras.known)]

    # ------------------------------------------------------------------ memory and weights

    def _sleep(self, level: Any = 1) -> list[None]:
        self._flush()
        self._are_weights_lost |= level == 2
        self._group.memory.sleep(level)
        return [None]

    def _wake_up(self, tags: Sequence[Any] | None = None) -> list[None]:
        self._group.memory.wake_up(tags)
        return [None]

    def _discard(self, tags: Sequence[Any]) -> list[None]:
        self._flush()
        self._are_weights_lost |= "weights" in tags
        self._group.memory.discard(tags)
        return [None]

    def _reload_weights(self, weights_path: str = "", **unknown: Any) -> list[None]:
        if unknown:
            raise NotImplementedError(f"reload_weights takes weights_path alone, not {[*unknown]}")
        self._flush()
        self._group.weights.reload(weights_path)
        self._are_weights_lost = self._changes.is_open = False
        return [None]

    def _init_weight_transfer_engine(self, init_info: Mapping[str, Any]) -> list[None]:
        """Choose the source of updates. init_info: {"engine": "broadcast", "disk" or "ipc"} and the
        fields of that engine (rpc_schema/weight_transfer.py), bytes in base64."""
        engine = _chosen("init_info", init_info, _ENGINES)
        self._group.weights.init_transfer_engine(engine)
        return [None]

    def _start_weight_update(self) -> list[None]:
        """Open a complete update in the checkpoint's format. Running requests are held until it is
        complete, and go on with the KV that they have, or are recomputed by its end."""
        self._flush()
        self._group.weights.start_update(running=self._workers.settings.running_requests)
        self._changes.is_open = True
        return [None]

    def _start_draft_weight_update(self) -> list[None]:
        """Open such an update of the draft model. Requests go on meanwhile."""
        self._group.weights.start_update(target="draft_model")
        return [None]

    def _update_weights(self, update_info: Mapping[str, Any]) -> list[None]:
        """Update some tensors. update_info: {"names": [...], "dtypes": [...], "shapes": [...],
        "source": {"engine": ..., and that source's fields}}."""
        source = _chosen("update_info.source", update_info.get("source", {}), _SOURCES)
        lists = {key: value for key, value in update_info.items() if key != "source"}
        tensors = _converted("update_info", lists, _Tensors)
        self._group.weights.update(
            TensorList(tensors.names, tensors.dtypes, tensors.shapes, tensors.origins), source
        )
        return [None]

    def _finish_weight_update(self) -> list[None]:
        self._group.weights.finish_update()
        if self._changes.is_open:  # otherwise it was the draft model's
            self._are_weights_lost = self._changes.is_open = False
        return [None]

    def _compute_weight_checksums(self) -> list[dict[str, str]]:
        return [
            {name: value.hex() for name, value in each.checksums.items()}
            for each in self._group.weights.compute_checksums()
        ]

    def _save_sharded_state(
        self, path: str, pattern: str | None = None, max_size: int | None = None
    ) -> list[None]:
        field = "additional_config.worker_daemon.save_root"
        name = relative_name(path, self._workers.settings.save_root, field)
        options: dict[str, Any] = {"pattern": pattern, "max_size_bytes": max_size}
        given = {key: value for key, value in options.items() if value is not None}
        self._flush()
        self._group.weights.save_sharded_state(name, **given)
        return [None]

    # ------------------------------------------------------------------ the rest

    def _get_supported_tasks(self) -> list[tuple[str, ...]]:
        pooling = self._model.metadata.pooling or NO_POOLING
        return [tuple(each.task for each in pooling.tasks) if self._pools else ("generate",)]

    def _update_max_model_len(self, max_model_len: int) -> list[None]:
        """Accept a shorter context: steps beyond it never come."""
        assert max_model_len <= self._model.max_model_len, "vLLM was given the daemons' limit"
        return [None]

    def _profile(self, is_start: bool = True, profile_prefix: str | None = None) -> list[None]:
        prefix = PurePath(profile_prefix or "").name
        if is_start:
            self._group.profiling.start(prefix)
        else:
            self._group.profiling.stop()
        return [None]


class _Tensors(msgspec.Struct, forbid_unknown_fields=True):
    names: tuple[str, ...] = ()
    dtypes: tuple[wt.TensorDtype, ...] = ()
    shapes: tuple[tuple[int, ...], ...] = ()
    origins: tuple[tuple[int, ...], ...] = ()


_ENGINES: Final = MappingProxyType(
    {"broadcast": wt.BroadcastEngine, "disk": wt.DiskEngine, "ipc": wt.IpcEngine}
)
_SOURCES: Final = MappingProxyType(
    {"broadcast": wt.BroadcastSource, "disk": wt.DiskSource, "ipc": wt.IpcSource}
)


def _chosen(field: str, value: Mapping[str, Any], kinds: Mapping[str, Any]) -> Any:
    """Return the engine or source that a caller describes."""
    kind = kinds.get(value.get("engine", ""))
    if kind is None:
        fix = f"use one of {', '.join(kinds)}"
        raise config_error(f"{field}.engine", value.get("engine"), "it is unknown", fix)
    return _converted(field, {k: v for k, v in value.items() if k != "engine"}, kind)


def _converted(field: str, value: Mapping[str, Any], kind: type[_T]) -> _T:
    """Return a struct of these fields, which the wire may have as an array instead."""
    try:
        return msgspec.convert(msgspec.to_builtins(_made(value, kind)), kind)
    except (TypeError, msgspec.ValidationError) as error:
        names = ", ".join(value)  # a value may be a secret
        raise config_error(field, names, str(error), "see docs/vllm.md") from None


def _made(value: Mapping[str, Any], kind: Any) -> Any:
    """Return a struct with these fields, unchecked, structs among them too. Raises TypeError: they
    are not its fields."""
    nested = {entry.name: entry.type for entry in msgspec.structs.fields(kind)}
    return kind(
        **{
            name: _made(own, nested[name])
            if isinstance(own, Mapping) and _is_struct(nested.get(name))
            else own
            for name, own in value.items()
        }
    )


def _is_struct(kind: object) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


def _nothing(*_: Any) -> list[None]:
    """The daemons keep nothing of this kind, and each operation waits for the steps before it."""
    return [None]


def _refused(*_: Any) -> list[bool]:
    return [False]
