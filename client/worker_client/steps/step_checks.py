"""Checks of a scheduler's output: each field by itself and against the limits of the loaded group.
Pure; returns the first fault (step_fault.py)."""

import operator
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, islice
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from rpc_schema.codec import MAX_STEP_BYTES, Frame, decode_step, encode_step
from rpc_schema.config import MAX_DRAFTS, MAX_SAMPLES_PER_SEQ
from rpc_schema.errors import TooLargeError, WireError
from rpc_schema.extensions import RequestExtension, extension_of
from rpc_schema.kv_cache import BlockGroup, block_groups, border_tokens
from rpc_schema.pooling import (
    PoolingParams,
    PoolingSupport,
    admission_fault,
    pooled_bytes,
    sampling_kind,
)
from rpc_schema.routed_experts import RoutedExpertsShape
from rpc_schema.step import ExecuteModel
from worker_client.parts.interface import ExtensionFault, ModelBounds
from worker_client.parts.registry import KINDS, find_fault, pools
from worker_client.scheduler_output import NewRequest, SchedulerOutput, StepValues
from worker_client.steps.step_fault import StepFault, malformed

MAX_COUNT = 2**31 - 1
MAX_ID_LENGTH = 256
MAX_NOTE_BYTES = 1 << 16
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
    keeps_state: bool = False
    """Layers keep a state per request: requests begin at position 0, or at a border."""
    checkpoint_blocks: int = 0
    """Blocks of the first group from a border to the next; 0: there are no checkpoints of
    states."""
    max_samples_per_seq: int = MAX_SAMPLES_PER_SEQ
    num_speculative_tokens: int = MAX_DRAFTS
    """Most drafts of a request in a step; 0: steps have none."""
    keeps_experts: bool = True
    """Requests may ask for the experts of their tokens; True too if it is not known."""
    routed_experts: RoutedExpertsShape | None = None
    """Sizes of these experts; None: unknown, and not checked."""

    @cached_property
    def bounds(self) -> ModelBounds:
        """The model's bounds on extensions."""
        return ModelBounds(
            self.vocab_size,
            pooling=self.pooling,
            max_loras=self.max_loras,
            logits_processors=self.logits_processors,
            hidden_size=self.hidden_size,
            max_samples_per_seq=self.max_samples_per_seq,
            keeps_experts=self.keeps_experts,
            routed_experts=self.routed_experts,
        )

    @cached_property
    def block_groups(self) -> tuple[BlockGroup, ...]:
        """Block size and window of each group, at least one."""
        return block_groups(self.groups, self.block_size)

    @cached_property
    def border_tokens(self) -> int:
        """Number of tokens from a border to the next; 0 if there are no checkpoints."""
        return border_tokens(self.block_groups, self.checkpoint_blocks)


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


def shape_fault(output: SchedulerOutput, num_slots: int = MAX_SLOTS) -> StepFault | None:
    """Check the types and the sizes of a step's fields, not their contents: no work grows with
    them. more_new_block_ids is another check's: more_blocks_fault."""
    sequence, mapping = "give a sequence", "give a mapping by request id"
    of_ids = "give a tuple of request ids"  # a list could change after it was planned
    for field, value, kind, most, fix in (
        ("num_scheduled_tokens", output.num_scheduled_tokens, Mapping, num_slots, mapping),
        ("new_block_ids", output.new_block_ids, Mapping, num_slots, mapping),
        ("scheduled_new_reqs", output.scheduled_new_reqs, Iterable, num_slots, sequence),
        ("finished_req_ids", output.finished_req_ids, Iterable, MAX_STEP_BLOCKS, sequence),
        ("preempted_req_ids", output.preempted_req_ids, Iterable, MAX_STEP_BLOCKS, sequence),
        ("decode_req_ids", output.decode_req_ids, tuple, num_slots, of_ids),
        ("num_samples", output.num_samples, Mapping, num_slots, mapping),
        ("num_drafts", output.num_drafts, Mapping, num_slots, mapping),
        ("draft_token_ids", output.draft_token_ids, Mapping, num_slots, mapping),
    ):
        fault = size_fault(field, value, kind, fix, most)
        if fault is not None:
            return fault
    given: object = output.skip_drafts
    if not isinstance(given, bool):
        return malformed("skip_drafts", given, "give True or False")
    return values_fault(output.extensions)


def size_fault(
    field: str, value: object, kind: type, fix: str, most: int = MAX_SLOTS
) -> StepFault | None:
    """Check the type and the size of a field, of which a text is none."""
    if not isinstance(value, kind) or isinstance(value, str | bytes):
        return malformed(field, value, fix)
    return _too_many(field, value, most) if isinstance(value, Sized) and len(value) > most else None


def total_fault(num_tokens: int, limits: GroupLimits) -> StepFault | None:
    """Check the number of a step's tokens, decodes included."""
    most = limits.max_num_batched_tokens
    if num_tokens <= most:
        return None
    return StepFault(
        f"the step has more tokens than max_num_batched_tokens = {most}",
        field="num_scheduled_tokens",
        value=num_tokens,
        fix=f"schedule at most {most} tokens, decodes included",
    )


def values_fault(values: object) -> StepFault | None:
    """Check the types and the sizes of a step's extensions, not their contents."""
    if not isinstance(values, tuple) or not all(isinstance(each, StepValues) for each in values):
        return malformed("extensions", values, "give a tuple of StepValues")
    if len({type(each) for each in values}) < len(values):
        return malformed("extensions", values, "give at most one of each kind")
    faults = (each.find_fault() for each in values)
    return next((fault for fault in faults if fault is not None), None)


class ReadStep(NamedTuple):
    """A step whose fields have the right types and sizes."""

    new: Sequence[NewRequest] = ()
    """Its new requests, each checked by itself; their blocks are not."""
    tokens: Sequence[Frame] = ()
    """One frame with the tokens of all new requests; none without these."""


def read_step(output: SchedulerOutput, num_slots: int, limits: GroupLimits) -> ReadStep | StepFault:
    """Check the fields of a step by themselves, and read its new requests."""
    fault, more = shape_fault(output, num_slots), output.more_new_block_ids
    if fault is None and (type(more) is not tuple or more):
        fault = more_blocks_fault(more, len(limits.block_groups), num_slots)
    if fault is not None:
        return fault
    new = tuple(islice(output.scheduled_new_reqs, num_slots + 1))
    if not new:
        return ReadStep()
    fault = admissions_fault(new, limits)
    tokens = read_tokens(new, limits) if fault is None else fault
    if isinstance(tokens, StepFault):
        return tokens
    return ReadStep(new, (tokens.astype("<i4", copy=False).tobytes(),))


def more_blocks_fault(more: object, num_groups: int, num_slots: int) -> StepFault | None:
    """Check type and size of a step's blocks of further groups, not their contents."""
    field, most = "more_new_block_ids", num_groups - 1
    if isinstance(more, list | tuple) and len(more) > most:
        fix = f"the layers have {most} further groups"
        return malformed(field, f"{len(more)} mappings", fix)
    if not isinstance(more, list | tuple) or not all(isinstance(own, Mapping) for own in more):
        return malformed(field, more, "give a sequence of mappings by request id")
    large = next((own for own in more if len(own) > num_slots), None)
    return None if large is None else _too_many(field, large, num_slots)


def _too_many(field: str, value: Sized, most: int) -> StepFault:
    fix = f"give at most {most}, and the rest in later steps: no step has more than max_num_seqs"
    return malformed(field, f"{len(value)} entries", fix)


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


def repeated(req_ids: Iterable[str]) -> list[str]:
    """Return the ids that occur more than once."""
    return [req_id for req_id, count in Counter(req_ids).items() if count > 1]


def unknown_request(req_id: object) -> StepFault:
    """Return the fault of a step that schedules a request without a slot."""
    field, fix = "num_scheduled_tokens, decode_req_ids", "put it into scheduled_new_reqs first"
    return StepFault("it has no slot", field, req_id, fix, req_id)


def is_integer(value: Any, low: int, high: int) -> bool:
    """Return True for an integer of Python or numpy within these bounds."""
    try:
        return low <= operator.index(value) <= high
    except TypeError:
        return False


def admissions_fault(requests: Sequence[NewRequest], limits: GroupLimits) -> StepFault | None:
    """Check each new request, without its tokens and blocks, and the size of all together."""
    num_tokens = num_bytes = 0
    for request in requests:
        own_bytes = _own_bytes(request, limits)
        if isinstance(own_bytes, StepFault):
            return own_bytes
        num_tokens += len(request.token_ids)
        num_bytes += own_bytes
    if num_tokens <= MAX_ADMITTED_TOKENS and num_bytes <= MAX_ADMITTED_BYTES:
        return None
    return StepFault(
        "the step does not fit into a message: its new requests are too large",
        field="scheduled_new_reqs",
        value=f"{num_tokens} tokens, {num_bytes} bytes",
        fix=f"admit some later: {MAX_ADMITTED_TOKENS} tokens and {MAX_ADMITTED_BYTES} bytes "
        "(worker_client.steps.step_checks.admission_bytes) are the most",
    )


def _own_bytes(request: Any, limits: GroupLimits) -> int | StepFault:
    """Check a new request; return the bytes that it counts for."""
    if not isinstance(request, NewRequest):
        return malformed("scheduled_new_reqs", request, "give NewRequest values")
    fault = id_fault(request.req_id) or _lengths_fault(request, limits) or _note_fault(request)
    if fault is not None:
        return fault
    encoded = 0
    if type(request.extensions) is not tuple or request.extensions:
        encoded_or_fault = _extension_bytes(request)
        if isinstance(encoded_or_fault, StepFault):
            return encoded_or_fault
        encoded = encoded_or_fault
    num_blocks = len(request.block_ids)
    for own in request.more_block_ids:
        num_blocks += len(own)
    num_tokens, id_length = len(request.token_ids), len(request.req_id)
    return admission_bytes(num_tokens, num_blocks, id_length, encoded, len(request.note))


def id_fault(req_id: object) -> StepFault | None:
    """Check a new request's id."""
    if not (isinstance(req_id, str) and 1 <= len(req_id) <= MAX_ID_LENGTH):
        return _refused(req_id, "req_id", req_id, f"give a string of 1 to {MAX_ID_LENGTH}")
    try:
        req_id.encode()
    except UnicodeEncodeError:
        fix = "remove lone surrogates, which UTF-8 cannot encode"
        return _refused(req_id, "req_id", req_id, fix)
    return None


def _refused(req_id: object, field: str, value: object, fix: str) -> StepFault:
    return StepFault("it cannot be admitted", field, value, fix, req_id)


def _lengths_fault(request: NewRequest, limits: GroupLimits) -> StepFault | None:
    """Check the counts of a new request."""
    try:
        num_tokens, num_groups = len(request.token_ids), 1 + len(request.more_block_ids)
        len(request.block_ids)
        for own in request.more_block_ids:
            len(own)
    except TypeError:
        kinds = (type(request.token_ids).__name__, type(request.block_ids).__name__)
        fix = "give an int32 array and a sequence"
        return _refused(request.req_id, "token_ids, block_ids", kinds, fix)
    prompt, computed = request.num_prompt_tokens, request.num_computed_tokens
    field: str | None = None
    value: object = None
    fix = ""
    if not 1 <= num_tokens <= limits.max_model_len:
        field, value = "token_ids", f"{num_tokens} tokens"
        fix = f"give 1 to {limits.max_model_len} tokens"
    elif num_groups not in (1, len(limits.block_groups)):
        field, value = "more_block_ids", f"of {num_groups - 1} groups"
        fix = f"the layers have {len(limits.block_groups) - 1} groups beside the first"
    elif type(prompt) is not int or not 1 <= prompt <= num_tokens:
        field, value, fix = "num_prompt_tokens", prompt, f"give 1 to {num_tokens}"
    elif type(computed) is not int or not 0 <= computed < num_tokens:
        field, value = "num_computed_tokens", computed
        fix = f"give 0 to {num_tokens - 1}: at least one token must be left to compute"
    elif computed and limits.keeps_state and not _is_border(computed, limits):
        field, value, fix = "num_computed_tokens", computed, "give 0"
        if limits.border_tokens:
            fix += f", or a multiple of {limits.border_tokens}, where there are checkpoints"
        fix += ": layers of this model keep a state per request"
    return None if field is None else _refused(request.req_id, field, value, fix)


def _is_border(computed: int, limits: GroupLimits) -> bool:
    return bool(limits.border_tokens) and computed % limits.border_tokens == 0


def _note_fault(request: NewRequest) -> StepFault | None:
    note: object = request.note
    if not isinstance(note, bytes):
        return _refused(request.req_id, "note", note, "give bytes")
    if len(note) > MAX_NOTE_BYTES:
        fix = f"give at most {MAX_NOTE_BYTES} bytes"
        return _refused(request.req_id, "note", f"{len(note)} bytes", fix)
    return None


def _extension_bytes(request: NewRequest) -> int | StepFault:
    """Check the types of a new request's extensions; return their bytes."""
    extensions = request.extensions
    fault = _kind_fault(extensions)
    if fault is None:
        try:
            return extension_bytes(extensions)
        except WRONG_TYPE:
            fault = extension_fault(extensions, WIRE_LIMITS.bounds, request.num_prompt_tokens)
    assert fault is not None, "what cannot be encoded has a fault"
    return _refused(request.req_id, *fault)


def _values_fault(request: NewRequest, limits: GroupLimits) -> StepFault | None:
    """Check each value of a new request's extensions against the schema and the model; names the
    first that cannot be sent, or that the daemons would refuse."""
    fault = extension_fault(request.extensions, limits.bounds, request.num_prompt_tokens)
    return None if fault is None else _refused(request.req_id, *fault)


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
) -> list[Frame] | StepFault:
    """Encode a step. One that admits requests is decoded again as the daemons will, to apply the
    bounds of the schema itself: the other columns are built here, of values that were checked. If
    no message can carry it, the fault names the request with that value."""
    try:
        frames = encode_step(message, tokens)
        if new:
            decode_step(frames)
    except TooLargeError as error:
        return _too_large(error)
    except (WireError, *WRONG_TYPE) as error:
        own = (_values_fault(request, limits) for request in new)
        return next(filter(None, own), None) or _too_large(error)
    for request in new:
        if request.extensions or not limits.generates:
            fault = _model_fault(request, limits)
            if fault is not None:
                return fault
    return frames


def _model_fault(request: NewRequest, limits: GroupLimits) -> StepFault | None:
    """Check a new request's extensions, whose fields are within their bounds, against the model."""
    for extension in request.extensions:
        if find_fault(extension, limits.bounds, request.num_prompt_tokens) is not None:
            return _values_fault(request, limits)
    if not pools(request.extensions) and limits.generates:
        return None
    num_tokens, num_computed = len(request.token_ids), request.num_computed_tokens
    fault = pooling_admission_fault(request.extensions, num_tokens, num_computed, limits)
    return None if fault is None else _refused(request.req_id, *fault)


def _too_large(error: Exception) -> StepFault:
    return StepFault(
        f"the step does not fit into a message: {error}",
        field="scheduled_new_reqs, new_block_ids",
        value="this step's",
        fix="admit some requests later",
    )


def read_tokens(requests: Sequence[NewRequest], limits: GroupLimits) -> Int32s | StepFault:
    """Return the tokens of all new requests, one request after the other."""
    rows: list[Int32s] = []
    for request in requests:
        own: object = request.token_ids
        if not (isinstance(own, np.ndarray) and own.dtype == np.int32 and own.ndim == 1):
            own = _int32(request)
            if isinstance(own, StepFault):
                return own
        rows.append(own)
    tokens = np.concatenate(rows) if len(rows) > 1 else np.ascontiguousarray(rows[0])
    if int(tokens.view(np.uint32).max()) >= limits.vocab_size:  # negative ids are the largest here
        for request, own in zip(requests, rows, strict=True):
            wrong = own[(own < 0) | (own >= limits.vocab_size)]
            if wrong.size:
                return _wrong_token(request, int(wrong[0]), limits.vocab_size - 1)
    return tokens


def _int32(request: NewRequest) -> Int32s | StepFault:
    """Return tokens of another type as int32."""
    given: NDArray[Any]
    try:
        given = np.asarray(request.token_ids)
    except WRONG_TYPE:
        given = np.zeros(0)
    if given.dtype.kind not in "iu" or given.ndim != 1:
        value = f"{given.dtype} {list(given.shape)}"
        return _refused(request.req_id, "token_ids", value, "give a one-dimensional int32 array")
    low, high = int(given.min()), int(given.max())
    if low < 0 or high > MAX_COUNT:
        return _wrong_token(request, low if low < 0 else high, MAX_COUNT)
    return given.astype(np.int32)


def _wrong_token(request: NewRequest, token_id: int, most: int) -> StepFault:
    return _refused(request.req_id, "token_ids", token_id, f"use token ids from 0 to {most}")
