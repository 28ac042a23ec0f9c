"""Prompts with embeddings (vLLM's prompt_embeds): their rows are uploads, which must be on the
daemons before the requests are; and what vLLM's block hashes lack to tell such prompts apart."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rpc_schema.prompt_embeds import MAX_EMBEDDED_RANGES, PromptEmbeds
from worker_client.driver_parts.request_uploads import Needed, RequestUploads
from worker_client.errors import (
    ClientConfigError,
    request_error,
)
from worker_client.inputs.host_tensor import HostTensor
from worker_client.inputs.prompt_embeds import PLACEHOLDER, Ranges, embeds_extension
from worker_client.parts.interface import ModelBounds
from worker_client.vllm.workers import Workers

Places = NDArray[np.int64]
"""Embedded positions of a prompt, ascending."""

TakeRows = Callable[[Any, Places], HostTensor]
"""Copies rows of a torch tensor, in the model's dtype. Any thread may call it. Raises
ClientConfigError."""


class EmbeddedPrompt(NamedTuple):
    """The embeddings of a prompt, checked but neither hashed nor uploaded."""

    embeds: Any
    """Torch tensor [prompt tokens, hidden size]; rows at positions with tokens are not used."""
    places: Places
    ranges: Ranges


def embedded_prompt(request: Any, bounds: ModelBounds) -> EmbeddedPrompt:
    """Return the embeddings of a vLLM Request that has some, without a look at the values.

    Raises:
        RequestError: shape, dtype, positions or the token ids between them are not served, or the
            request wants what such a prompt does not have.
    """
    embeds, shape = request.prompt_embeds, [*request.prompt_embeds.shape]
    if len(shape) != 2 or not all(shape):
        problem = "the embeddings are no rows"
        raise request_error("prompt_embeds", shape, problem, "give [positions, hidden size]")
    if bounds.hidden_size not in (0, shape[1]):
        fix = f"give rows of {bounds.hidden_size}, the hidden size"
        raise request_error("prompt_embeds", shape, "the model has another hidden size", fix)
    if not embeds.is_floating_point():
        problem = "the embeddings are no floating-point numbers"
        raise request_error("prompt_embeds", str(embeds.dtype), problem, "convert them")
    if request.mm_features:
        kind, fix = request.mm_features[0].modality, "leave them out"
        raise request_error("multi_modal_data", kind, "requests with media are refused", fix)
    wanted = getattr(request.sampling_params, "prompt_logprobs", None)
    if wanted is not None:
        problem = "embedded positions have no token whose probability could be reported"
        raise request_error("prompt_logprobs", wanted, problem, "leave it out")
    is_embedded = _embedded_positions(request.prompt_is_token_ids, shape[0])
    _check_tokens(request.prompt_token_ids, is_embedded, bounds.vocab_size)
    places = np.flatnonzero(is_embedded)
    return EmbeddedPrompt(embeds, places, _ranges(places))


def _embedded_positions(is_token: Sequence[bool] | None, num_tokens: int) -> NDArray[np.bool_]:
    if is_token is None:
        return np.ones(num_tokens, np.bool_)
    is_embedded = ~np.asarray(is_token, np.bool_)
    if not is_embedded.any():
        problem = "no position has an embedding"
        raise request_error("prompt_is_token_ids", True, problem, "give prompt_token_ids alone")
    return is_embedded


def _check_tokens(
    token_ids: Sequence[int] | None, is_embedded: NDArray[np.bool_], vocab_size: int
) -> None:
    """Check the tokens between embeddings, which vLLM does not."""
    if is_embedded.all():
        return
    if token_ids is None:
        problem = "there are positions with tokens, but no tokens"
        raise request_error("prompt_token_ids", None, problem, "give an id for each position")
    used = np.asarray(token_ids, np.int64)[~is_embedded]
    wrong = used[(used < 0) | (used >= vocab_size)]
    if wrong.size:
        fix = f"use ids from 0 to {vocab_size - 1}"
        raise request_error("prompt_token_ids", int(wrong[0]), "the token is unknown", fix)


def _ranges(places: Places) -> Ranges:
    runs = np.split(places, np.flatnonzero(np.diff(places) > 1) + 1)
    if len(runs) > MAX_EMBEDDED_RANGES:
        problem, fix = "embeddings are in too many places", f"use at most {MAX_EMBEDDED_RANGES}"
        raise request_error("prompt_is_token_ids", f"{len(runs)} ranges", problem, fix)
    return [(int(run[0]), run.size) for run in runs]


def with_placeholders(new: Any) -> NDArray[np.int32]:
    """Return the token ids of a vLLM NewRequestData with embeddings, output included: placeholders
    at embedded positions, where vLLM has none, or ids outside of the vocabulary."""
    num_tokens = len(new.prompt_embeds)
    given = new.prefill_token_ids or new.prompt_token_ids or [PLACEHOLDER] * num_tokens
    tokens = np.array(given, np.int32)
    tokens[:num_tokens][_embedded_positions(new.prompt_is_token_ids, num_tokens)] = PLACEHOLDER
    return tokens


def salt_request(request: Any, model_dtype: str) -> None:
    """Let no other prompt have the block hashes of a vLLM Request with embeddings. vLLM hashes the
    token ids, with 0 at embedded positions, and the bytes of all rows: not which of both counts at
    a position, nor the rows' dtype. Where ids and bytes do not tell it, the request gets a salt.

    A client's own salt is text, so it never equals that one, which covers it. model_dtype: torch's
    name, as "torch.bfloat16".
    """
    ids, is_token = request.prompt_token_ids, request.prompt_is_token_ids
    if is_token is None:
        is_told = ids is None or not any(ids)
    else:
        given = ids or [0] * len(is_token)
        is_told = all(each for each, counts in zip(given, is_token, strict=True) if counts)
    dtype = str(request.prompt_embeds.dtype)
    if is_told and dtype == model_dtype:
        return
    positions = None if is_token is None else bytes(map(bool, is_token))
    covered = repr((request.cache_salt, dtype, positions)).encode()
    request.cache_salt = blake2b(covered, digest_size=32).digest()
    request.block_hashes.clear()
    request.update_block_hashes()


@dataclass(slots=True)
class _Held:
    """A request's embeddings on their way to the daemons."""

    ranges: Ranges
    hashing: Future[HostTensor] | None
    """None: done, or failed."""
    tensor: HostTensor | None = None
    is_there: bool = False
    refusal: str = ""


class EmbeddedPrompts:
    """Uploads of the requests of vLLM's scheduler, sent between steps on its thread while requests
    wait. Rows are copied and hashed on a separate thread, which takes a second for a gigabyte."""

    def __init__(self, workers: Workers, model_dtype: str, take_rows: TakeRows) -> None:
        """model_dtype: as salt_request takes it."""
        self.model_dtype = model_dtype
        self._workers = workers
        self._take_rows = take_rows
        self._hasher = ThreadPoolExecutor(1, "prompt-embeds")
        self._held: dict[str, _Held] = {}
        self._uploads = RequestUploads(workers.group)
        self._generation = workers.generation
        """Workers.generation of the daemons that have what was uploaded."""

    def begin(self, req_id: str, prompt: EmbeddedPrompt) -> None:
        """Begin with a request's rows."""
        hashing = self._hasher.submit(self._take_rows, prompt.embeds, prompt.places)
        self._held[req_id] = _Held(prompt.ranges, hashing)

    def is_ready(self, req_id: str) -> bool:
        """Return whether the daemons have the rows of a request; True for one without any."""
        held = self._held.get(req_id)
        return held is None or held.is_there

    def find_refusal(self, req_id: str) -> str:
        """Return why the rows of a request cannot be uploaded; empty: they can."""
        held = self._held.get(req_id)
        return "" if held is None else held.refusal

    def extension(self, req_id: str) -> PromptEmbeds:
        """Return the extension of a request that is ready."""
        held = self._held[req_id]
        assert held.tensor is not None, "the scheduler holds it until then"
        return embeds_extension(held.tensor, held.ranges)

    def proceed(self) -> None:
        """Send some chunks. Raises as Workers.use_between_steps does."""
        if not self._held:
            return
        for req_id, held in self._held.items():
            if held.hashing is not None and held.hashing.done():
                self._take_hashed(req_id, held, held.hashing)
        if self._uploads.can_proceed or self._generation != self._workers.generation:
            self._workers.use_between_steps(self._send)

    def _take_hashed(self, req_id: str, held: _Held, hashing: Future[HostTensor]) -> None:
        held.hashing = None
        try:
            held.tensor = hashing.result()
        except ClientConfigError as error:
            held.refusal = f"prompt_embeds: {error}"
        else:
            self._upload(req_id, held.tensor)

    def _upload(self, req_id: str, tensor: HostTensor) -> None:
        self._uploads.add(req_id, {Needed(tensor.content_hash): tensor})

    def _send(self) -> None:
        if self._generation != self._workers.generation:
            self._begin_again()
        progress = self._uploads.proceed()
        for req_id in progress.ready:
            self._held[req_id].is_there = True
        for req_id, reason in progress.refused:
            self._held[req_id].refusal = f"prompt_embeds: {reason}"

    def _begin_again(self) -> None:
        """Queue all uploads: the daemons have lost theirs, and all rows of requests."""
        self._generation = self._workers.generation
        self._uploads = RequestUploads(self._workers.group)
        for req_id, held in self._held.items():
            held.is_there = False
            if held.tensor is not None and not held.refusal:
                self._upload(req_id, held.tensor)

    def end(self, req_id: str) -> None:
        """Forget a request that has ended. Steps in flight may still read its rows."""
        held = self._held.pop(req_id, None)
        if held is not None and held.hashing is not None:
            held.hashing.cancel()
        self._uploads.end(req_id, self._workers.num_sent)

    def drop_unused(self) -> None:
        """Have the daemons drop what no request needs and no step in flight reads."""
        if self._uploads.to_drop:
            self._uploads.drop_unused(self._workers.num_done)

    def close(self) -> None:
        """End the thread once it has hashed what it hashes. The lease ends the uploads."""
        self._hasher.shutdown(wait=False, cancel_futures=True)
