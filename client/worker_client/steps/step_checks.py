"""Checks of a scheduler's output: each field by itself and against the limits of the loaded group.
Pure; raises InvalidSchedulerOutput with request, field, value and fix."""

import operator
from array import array
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from rpc_schema.codec import MAX_STEP_BYTES, Frame, decode_step, encode_step
from rpc_schema.errors import TooLargeError, WireError
from rpc_schema.extensions import RequestExtension, extension_of
from rpc_schema.kv_cache import BlockGroup, block_groups
from rpc_schema.pooling import (
    PoolingParams,
    PoolingSupport,
    admission_fault,
    pooled_bytes,
    sampling_kind,
)
from rpc_schema.step import ExecuteModel
from worker_client.errors import InvalidSchedulerOutput
from worker_client.parts.interface import ExtensionFault, ModelBounds
from worker_client.parts.registry import KINDS, find_fault, pools
from worker_client.scheduler_output import NewRequest, SchedulerOutput, StepValues

MAX_COUNT = 2**31 - 1
MAX_ID_LENGTH = 256
MAX_NOTE_BYTES = 1024
MAX_SLOTS = 65_535
"""Bound on max_num_seqs, set by the slots' columns of the message."""
MAX_STEP_BLOCKS = 1 << 20
"""Bound on the new blocks of one step, set by their column of the message."""

MESSAGE_RESERVE_BYTES = 4 << 20
"""Share of a step's bound for columns other than prompts."""
MAX_ADMITTED_TOKENS = (MAX_STEP_BYTES - MESSAGE_RESERVE_BYTES) // 4
"""Bound on the tokens of all new requests of one step."""

STANDING_RESERVE_BYTES = 2 << 20
"""Share of a step's bound for the columns of requests that run already."""
MAX_ADMITTED_BYTES = MAX_STEP_BYTES - STANDING_RESERVE_BYTES
"""Bound on the bytes of all new requests of one step: see admission_bytes."""

_BLOCK_BYTES = MAX_ADMITTED_BYTES // MAX_STEP_BLOCKS
_ADMISSION_BYTES = 128
"""Bytes of a new request's fields of fixed size, and of all headers."""

WRONG_TYPE = (TypeError, ValueError, OverflowError, AttributeError, RecursionError)
"""Exceptions of Python, numpy and msgspec for a value of the wrong type."""

BLOCK_KINDS = frozenset((list, tuple, range, array, np.ndarray))
"""Types of collections of block ids. Bytes and sets would iterate, but are mistakes."""

_MASK_DTYPES = (np.int32, np.uint32)

_KINDS: Final = frozenset(KINDS)
_EXTENSIONS: Final = msgspec.msgpack.Decoder(tuple[RequestExtension, ...])

Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]


@dataclass(frozen=True)
class GroupLimits:
    """Limits of a loaded group on a step. The defaults are those of a message."""

    max_num_batched_tokens: int = MAX_COUNT
    max_model_len: int = MAX_COUNT
    vocab_size: int = MAX_COUNT + 1
    num_blocks: int = 0
    """Number of blocks, null block included; 0 if unknown: blocks are not checked then."""
    block_size: int = 1
    groups: tuple[BlockGroup, ...] = ()
    """KV groups; empty: one group of block_size, without a window."""
    max_loras: int | None = None
    """Maximum number of adapters in a step; None if unknown."""
    generates: bool = True
    """The model has an LM head."""
    pooling: PoolingSupport | None = None
    """None: unknown, and not checked."""
    logits_processors: tuple[str, ...] | None = None
    """Names that requests may ask for; None leaves them unchecked."""
    hidden_size: int = 0
    """0 if unknown: the width of embeddings is not checked then."""

    @cached_property
    def bounds(self) -> ModelBounds:
        """The model's bounds on extensions."""
        return ModelBounds(
            self.vocab_size,
            pooling=self.pooling,
            max_loras=self.max_loras,
            logits_processors=self.logits_processors,
            hidden_size=self.hidden_size,
        )

    @cached_property
    def block_groups(self) -> tuple[BlockGroup, ...]:
        """Block size and window of each group, at least one."""
        return block_groups(self.groups, self.block_size)


WIRE_LIMITS = GroupLimits()


def admission_bytes(
    num_tokens: int, num_blocks: int, id_length: int, extension_bytes: int, note_bytes: int
) -> int:
    """Return the bytes of a step's message that a new request counts for: four per token and four
    per character of its id. A block counts for more than its six bytes, so that the bound on all
    bytes also keeps the number of blocks below MAX_STEP_BLOCKS. extension_bytes: result of that
    function for its extensions."""
    columns = 4 * num_tokens + _BLOCK_BYTES * num_blocks + extension_bytes
    return columns + 4 * id_length + note_bytes + _ADMISSION_BYTES


def extension_bytes(extensions: Sequence[RequestExtension]) -> int:
    """Return the bytes of a request's extensions in a message."""
    return len(msgspec.msgpack.encode(extensions))


def check_shape(output: SchedulerOutput, num_slots: int = MAX_SLOTS) -> None:
    """Check the types and the sizes of a step's fields, not their contents: no work grows with
    them."""
    for field in ("num_scheduled_tokens", "new_block_ids"):
        value = getattr(output, field)
        if not isinstance(value, Mapping):
            raise _wrong(field, value, "give a mapping by request id")
        _check_size(field, value, num_slots)
    for field, most in (
        ("scheduled_new_reqs", num_slots),
        ("finished_req_ids", MAX_STEP_BLOCKS),
        ("preempted_req_ids", MAX_STEP_BLOCKS),
    ):
        value = getattr(output, field)
        if not isinstance(value, Iterable) or isinstance(value, str | bytes):
            raise _wrong(field, value, "give a sequence")
        if isinstance(value, Sized):
            _check_size(field, value, most)
    if type(output.decode_req_ids) is not tuple:  # a list could change after it was planned
        raise _wrong("decode_req_ids", output.decode_req_ids, "give a tuple of request ids")
    _check_size("decode_req_ids", output.decode_req_ids, num_slots)
    check_step_values(output.extensions)


def check_step_values(values: object) -> None:
    """Check the types and the sizes of a step's extensions, not their contents."""
    if not isinstance(values, tuple) or not all(isinstance(each, StepValues) for each in values):
        raise _wrong("extensions", values, "give a tuple of StepValues")
    if len({type(each) for each in values}) < len(values):
        raise _wrong("extensions", values, "give at most one of each kind")
    for each in values:
        each.check()


def check_masks_shape(masks: object, deferred: object) -> None:
    """Check the types and the sizes of StepMasks, not its contents."""
    if not isinstance(deferred, Collection) or isinstance(deferred, str | bytes):
        raise _wrong("deferred", deferred, "give a collection of request ids")
    _check_size("deferred", deferred, MAX_SLOTS)
    if not isinstance(masks, Mapping):
        raise _wrong("masks", masks, "give a mapping by request id")
    _check_size("masks", masks, MAX_SLOTS)


def _check_size(field: str, value: Sized, most: int) -> None:
    if len(value) > most:
        fix = (
            f"give at most {most}, and the rest in later steps: no step has more than max_num_seqs"
        )
        raise _wrong(field, f"{len(value)} entries", fix)


def check_more_blocks(more: object, num_groups: int, num_slots: int) -> None:
    """Check type and size of a step's blocks of further groups, not their contents."""
    field, most = "more_new_block_ids", num_groups - 1
    if isinstance(more, list | tuple) and len(more) > most:
        raise _wrong(field, f"{len(more)} mappings", f"the layers have {most} further groups")
    if not isinstance(more, list | tuple) or not all(isinstance(own, Mapping) for own in more):
        raise _wrong(field, more, "give a sequence of mappings by request id")
    for own in more:
        _check_size(field, own, num_slots)


def named_ids(output: SchedulerOutput) -> frozenset[str]:
    """Return the ids of requests that a step schedules or admits. The step may be malformed."""
    parts: list[object] = [output.decode_req_ids, output.num_scheduled_tokens, output.new_block_ids]
    if isinstance(output.more_new_block_ids, list | tuple):
        parts += output.more_new_block_ids
    names = list(chain.from_iterable(part for part in parts if isinstance(part, Iterable)))
    if isinstance(output.scheduled_new_reqs, Iterable):
        names += [getattr(request, "req_id", None) for request in output.scheduled_new_reqs]
    if {str}.issuperset(map(type, names)):
        return frozenset(names)
    return frozenset(name for name in names if isinstance(name, str))


def wrong_ids(message: str, field: str, req_ids: Iterable[object]) -> InvalidSchedulerOutput:
    """Return the refusal of a step because of these requests; names the first."""
    fix = "name each request in one part of a step, and only while it has a slot"
    req_id = next(iter(req_ids), "")
    return InvalidSchedulerOutput(message, field=field, value=req_id, fix=fix, req_id=req_id)


def repeated(req_ids: Iterable[str]) -> list[str]:
    """Return the ids that occur more than once."""
    return [req_id for req_id, count in Counter(req_ids).items() if count > 1]


def unknown_request(req_id: object) -> InvalidSchedulerOutput:
    """Return the refusal of a step that schedules a request without a slot."""
    return InvalidSchedulerOutput(
        "it has no slot",
        field="num_scheduled_tokens, decode_req_ids",
        value=req_id,
        fix="put it into scheduled_new_reqs first",
        req_id=req_id,
    )


def _wrong(field: str, value: object, fix: str) -> InvalidSchedulerOutput:
    return InvalidSchedulerOutput("the step is malformed", field=field, value=value, fix=fix)


def read_counts(counts: Mapping[str, int]) -> Int64s:
    """Return the scheduled tokens of each request."""
    try:
        if bool not in map(type, counts.values()):
            return np.frombuffer(array("q", counts.values()), np.int64)
    except WRONG_TYPE:
        pass
    for req_id, count in counts.items():
        if type(count) is bool or not _is_integer(count, -MAX_COUNT, MAX_COUNT):
            raise wrong_count(req_id, count, "give a whole number")
    raise _wrong("num_scheduled_tokens", counts, "give whole numbers")


def wrong_count(req_id: str, count: object, fix: str) -> InvalidSchedulerOutput:
    """Return the refusal of a request's number of tokens."""
    return InvalidSchedulerOutput(
        "it cannot have this many tokens in this step",
        field="num_scheduled_tokens",
        value=count,
        fix=fix,
        req_id=req_id,
    )


def read_blocks(blocks: Mapping[str, Sequence[int]]) -> tuple[list[int], "array[int]", list[int]]:
    """Return the blocks of all requests, also as int32, and the number of each request's blocks;
    the last is empty if each has one."""
    try:
        if not BLOCK_KINDS.issuperset(map(type, blocks.values())):
            raise _wrong_blocks(blocks)
        try:
            ids, lengths = [block_id for (block_id,) in blocks.values()], []
        except ValueError:  # not one block each
            lengths = [len(own) for own in blocks.values()]
            _check_num_blocks(sum(lengths))
            ids = list(chain.from_iterable(blocks.values()))
        raw = array("i", ids)
    except WRONG_TYPE:
        raise _wrong_blocks(blocks) from None
    return ids, raw, lengths


def _check_num_blocks(count: int) -> None:
    if count > MAX_STEP_BLOCKS:
        raise InvalidSchedulerOutput(
            "the step does not fit into a message",
            field="new_block_ids",
            value=f"{count} blocks",
            fix=f"give at most {MAX_STEP_BLOCKS} blocks in a step",
        )


def _wrong_blocks(blocks: Mapping[str, Any]) -> InvalidSchedulerOutput:
    for req_id, own in blocks.items() if isinstance(blocks, Mapping) else ():
        if type(own) not in BLOCK_KINDS or (type(own) is np.ndarray and own.ndim != 1):
            fix = "give a list, a tuple, a range or a one-dimensional array of integers"
            return wrong_block(req_id, own, fix)
        for block_id in own:
            if not _is_integer(block_id, -MAX_COUNT - 1, MAX_COUNT):
                return wrong_block(req_id, block_id, "give whole numbers of 32 bits")
    return _wrong("new_block_ids", blocks, "give sequences of block ids")


def wrong_block(
    req_id: str, block_id: object, fix: str, field: str = "block_ids"
) -> InvalidSchedulerOutput:
    """Return the refusal of one of a request's blocks."""
    return InvalidSchedulerOutput(
        "it cannot have this block", field=field, value=block_id, fix=fix, req_id=req_id
    )


def not_running(req_id: str, block_ids: object) -> InvalidSchedulerOutput:
    """Return the refusal of blocks for a request that is new or does not continue."""
    fix = "append blocks to running requests; a new one has its own list"
    return wrong_block(req_id, block_ids, fix, "new_block_ids")


def _is_integer(value: Any, low: int, high: int) -> bool:
    try:
        return low <= operator.index(value) <= high
    except TypeError:
        return False


def check_mask(req_id: str, mask: object) -> None:
    """Check a request's grammar mask: a row of 32-bit words."""
    if not (isinstance(mask, np.ndarray) and mask.ndim == 1 and mask.dtype in _MASK_DTYPES):
        value = f"{mask.dtype} {list(mask.shape)}" if isinstance(mask, np.ndarray) else mask
        raise InvalidSchedulerOutput(
            "its mask is malformed",
            field="masks",
            value=value,
            fix="give int32 [ceil(vocab_size / 32)]",
            req_id=req_id,
        )


def check_admissions(requests: Sequence[NewRequest], limits: GroupLimits) -> None:
    """Check each new request, without its tokens and blocks, and the size of all together."""
    num_bytes = 0
    for request in requests:
        if not isinstance(request, NewRequest):
            raise _wrong("scheduled_new_reqs", request, "give NewRequest values")
        check_id(request.req_id)
        num_tokens, num_blocks = _check_lengths(request, limits)
        _check_note(request)
        own_bytes = _check_extensions(request)
        num_bytes += admission_bytes(
            num_tokens, num_blocks, len(request.req_id), own_bytes, len(request.note)
        )
    num_tokens = sum(len(request.token_ids) for request in requests)
    if num_tokens > MAX_ADMITTED_TOKENS or num_bytes > MAX_ADMITTED_BYTES:
        raise InvalidSchedulerOutput(
            "the step does not fit into a message: its new requests are too large",
            field="scheduled_new_reqs",
            value=f"{num_tokens} tokens, {num_bytes} bytes",
            fix=f"admit some later: {MAX_ADMITTED_TOKENS} tokens and {MAX_ADMITTED_BYTES} bytes "
            "(worker_client.steps.step_checks.admission_bytes) are the most",
        )


def check_id(req_id: object) -> None:
    """Check a new request's id."""
    if not (isinstance(req_id, str) and 1 <= len(req_id) <= MAX_ID_LENGTH):
        raise _refused(req_id, "req_id", req_id, f"give a string of 1 to {MAX_ID_LENGTH}")
    try:
        req_id.encode()
    except UnicodeEncodeError:
        fix = "remove lone surrogates, which UTF-8 cannot encode"
        raise _refused(req_id, "req_id", req_id, fix) from None


def _refused(req_id: object, field: str, value: object, fix: str) -> InvalidSchedulerOutput:
    return InvalidSchedulerOutput(
        "it cannot be admitted", field=field, value=value, fix=fix, req_id=req_id
    )


def _check_lengths(request: NewRequest, limits: GroupLimits) -> tuple[int, int]:
    """Check the counts of a new request; return the numbers of its tokens and blocks."""
    req_id = request.req_id
    try:
        num_tokens, num_groups = len(request.token_ids), 1 + len(request.more_block_ids)
        num_blocks = len(request.block_ids)
        for own in request.more_block_ids:
            num_blocks += len(own)
    except TypeError:
        value = (type(request.token_ids).__name__, type(request.block_ids).__name__)
        fix = "give an int32 array and a sequence"
        raise _refused(req_id, "token_ids, block_ids", value, fix) from None
    if not 1 <= num_tokens <= limits.max_model_len:
        fix = f"give 1 to {limits.max_model_len} tokens"
        raise _refused(req_id, "token_ids", f"{num_tokens} tokens", fix)
    if num_groups not in (1, len(limits.block_groups)):
        given = f"of {num_groups - 1} groups"
        fix = f"the layers have {len(limits.block_groups) - 1} groups beside the first"
        raise _refused(req_id, "more_block_ids", given, fix)
    prompt, computed = request.num_prompt_tokens, request.num_computed_tokens
    if type(prompt) is not int or not 1 <= prompt <= num_tokens:
        raise _refused(req_id, "num_prompt_tokens", prompt, f"give 1 to {num_tokens}")
    if type(computed) is not int or not 0 <= computed < num_tokens:
        fix = f"give 0 to {num_tokens - 1}: at least one token must be left to compute"
        raise _refused(req_id, "num_computed_tokens", computed, fix)
    return num_tokens, num_blocks


def _check_note(request: NewRequest) -> None:
    note = request.note
    if not isinstance(note, bytes):
        raise _refused(request.req_id, "note", note, "give bytes")
    if len(note) > MAX_NOTE_BYTES:
        fix = f"give at most {MAX_NOTE_BYTES} bytes"
        raise _refused(request.req_id, "note", f"{len(note)} bytes", fix)


def _check_extensions(request: NewRequest) -> int:
    """Check the types of a new request's extensions; return their bytes."""
    extensions = request.extensions
    if type(extensions) is tuple and not extensions:
        return 0
    fault = _kind_fault(extensions)
    if fault is None:
        try:
            return extension_bytes(extensions)
        except WRONG_TYPE:
            fault = extension_fault(extensions, WIRE_LIMITS.bounds, request.num_prompt_tokens)
    assert fault is not None, "what cannot be encoded has a fault"
    raise _refused(request.req_id, *fault)


def check_values(request: NewRequest, limits: GroupLimits) -> None:
    """Check each value of a new request's extensions against the schema and the model; names the
    first that cannot be sent, or that the daemons would refuse."""
    fault = extension_fault(request.extensions, limits.bounds, request.num_prompt_tokens)
    if fault is not None:
        raise _refused(request.req_id, *fault)


def extension_fault(
    extensions: object, bounds: ModelBounds, num_prompt_tokens: int
) -> ExtensionFault | None:
    """Return the first fault for which a request with these extensions would be refused."""
    fault = _kind_fault(extensions)
    if fault is not None or not isinstance(extensions, tuple):
        return fault
    try:
        _EXTENSIONS.decode(msgspec.msgpack.encode(extensions))
    except (msgspec.DecodeError, *WRONG_TYPE) as error:
        fault = next((f for f in map(_field_fault, extensions) if f is not None), None)
        return fault or ExtensionFault("extensions", extensions, f"give what can be sent: {error}")
    for extension in extensions:
        fault = find_fault(extension, bounds, num_prompt_tokens)
        if fault is not None:
            return fault._replace(field=f"{type(extension).__name__}.{fault.field}")
    return None


def _kind_fault(extensions: object) -> ExtensionFault | None:
    if not isinstance(extensions, tuple):
        return ExtensionFault("extensions", extensions, "give a tuple of extensions")
    kinds = [type(extension) for extension in extensions]
    if _KINDS.issuperset(kinds) and len({*kinds}) == len(kinds):
        return None
    for kind in kinds:
        if kind not in _KINDS:
            names = ", ".join(each.__name__ for each in KINDS)
            return ExtensionFault("extensions", kind.__name__, f"give extensions of {names}")
        if kinds.count(kind) > 1:
            return ExtensionFault("extensions", kind.__name__, "name each feature once")
    return None


def pooling_admission_fault(
    extensions: Sequence[RequestExtension],
    num_tokens: int,
    num_computed_tokens: int,
    limits: GroupLimits,
) -> ExtensionFault | None:
    """Return the first reason for which daemons would refuse a new request as one that pools, or as
    one that does not. Its extensions have no fault by themselves."""
    params = extension_of(extensions, PoolingParams)
    if params is None:
        if limits.generates or limits.pooling is None:
            return None
        fix = f"ask for one of the model's pooling tasks: {limits.pooling.names}"
        return ExtensionFault("extensions", "no pooling", f"the model has no output layer: {fix}")
    kind = sampling_kind(extensions)
    if kind is not None:
        return ExtensionFault("extensions", kind, "leave it out: PoolingParams sample nothing")
    if limits.pooling is None:
        return None
    most = limits.max_num_batched_tokens
    fault = admission_fault(params, num_tokens, num_computed_tokens, limits.pooling, most)
    return None if fault is None else ExtensionFault(*fault)


def output_bytes(request: NewRequest, limits: GroupLimits) -> int:
    """Return the bytes of a new request's output, at least 1 if it pools; 0 if it samples. Its
    extensions may have faults."""
    params = extension_of(request.extensions, PoolingParams)
    if params is None:
        return 0
    if limits.pooling is None or limits.pooling.find(params.task) is None:
        return 1
    dimensions: object = params.dimensions
    if not isinstance(dimensions, int):
        return 1
    num_bytes = pooled_bytes(params, len(request.token_ids), limits.pooling)
    return max(1, min(MAX_COUNT, num_bytes))


def _field_fault(extension: RequestExtension) -> ExtensionFault | None:
    """Return the first field that is out of its bounds in the schema."""
    for entry in msgspec.structs.fields(extension):
        own = getattr(extension, entry.name)
        try:
            msgspec.convert(own, entry.type)
        except (msgspec.ValidationError, *WRONG_TYPE) as error:
            return ExtensionFault(f"{type(extension).__name__}.{entry.name}", own, str(error))
    return None


def encode_checked(
    message: ExecuteModel,
    tokens: Sequence[Frame],
    new: Sequence[NewRequest],
    limits: GroupLimits,
) -> list[Frame]:
    """Encode a step. One that admits requests is decoded again as the daemons will, to apply the
    bounds of the schema itself: the other columns are built here, of values that were checked.

    Raises:
        InvalidSchedulerOutput: no message can carry it; names the request with that value.
    """
    try:
        frames = encode_step(message, tokens)
        if new:
            decode_step(frames)
    except TooLargeError as error:
        raise _too_large(error) from None
    except (WireError, *WRONG_TYPE) as error:
        for request in new:
            check_values(request, limits)
        raise _too_large(error) from None
    for request in new:
        for extension in request.extensions:
            if find_fault(extension, limits.bounds, request.num_prompt_tokens) is not None:
                check_values(request, limits)
        if pools(request.extensions) or not limits.generates:
            _check_pooling(request, limits)
    return frames


def _check_pooling(request: NewRequest, limits: GroupLimits) -> None:
    num_tokens, num_computed = len(request.token_ids), request.num_computed_tokens
    fault = pooling_admission_fault(request.extensions, num_tokens, num_computed, limits)
    if fault is not None:
        raise _refused(request.req_id, *fault)


def _too_large(error: Exception) -> InvalidSchedulerOutput:
    return InvalidSchedulerOutput(
        f"the step does not fit into a message: {error}",
        field="scheduled_new_reqs, new_block_ids",
        value="this step's",
        fix="admit some requests later",
    )


def read_tokens(requests: Sequence[NewRequest], limits: GroupLimits) -> Int32s:
    """Return the tokens of all new requests, one request after the other."""
    rows = [_int32(request) for request in requests]
    tokens = np.concatenate(rows) if len(rows) > 1 else np.ascontiguousarray(rows[0])
    if int(tokens.view(np.uint32).max()) >= limits.vocab_size:  # negative ids are the largest here
        for request in requests:
            own = np.asarray(request.token_ids)
            wrong = own[(own < 0) | (own >= limits.vocab_size)]
            if wrong.size:
                raise _wrong_token(request, int(wrong[0]), limits.vocab_size - 1)
    return tokens


def _int32(request: NewRequest) -> Int32s:
    tokens = request.token_ids
    if isinstance(tokens, np.ndarray) and tokens.dtype == np.int32 and tokens.ndim == 1:
        return tokens
    given: NDArray[Any]
    try:
        given = np.asarray(tokens)
    except WRONG_TYPE:
        given = np.zeros(0)
    if given.dtype.kind not in "iu" or given.ndim != 1:
        value = f"{given.dtype} {list(given.shape)}"
        raise _refused(request.req_id, "token_ids", value, "give a one-dimensional int32 array")
    low, high = int(given.min()), int(given.max())
    if low < 0 or high > MAX_COUNT:
        raise _wrong_token(request, low if low < 0 else high, MAX_COUNT)
    return given.astype(np.int32)


def _wrong_token(request: NewRequest, token_id: int, most: int) -> InvalidSchedulerOutput:
    return _refused(request.req_id, "token_ids", token_id, f"use token ids from 0 to {most}")
