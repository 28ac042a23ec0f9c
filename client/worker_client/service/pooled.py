"""Prompts that are pooled instead of continued, for embeddings and scores."""

import contextlib
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray
from starlette.requests import Request

from rpc_schema.pooling import PoolingParams, PoolingTask, admission_fault
from worker_client.errors import request_error
from worker_client.inputs.request_checks import check_fits
from worker_client.inputs.request_fields import Json
from worker_client.requests import GenerationRequest
from worker_client.service.context import ServiceContext
from worker_client.service.engine import Engine, Model, renamed
from worker_client.service.fields import BodyFields
from worker_client.service.streaming import JsonObject, unless_client_leaves

MAX_INPUTS: Final = 2048
"""Inputs of a body, as OpenAI bounds them."""
AT_ONCE: Final = 64
"""Inputs of a body that are served at a time, so that it leaves room for others."""


class PooledInput(NamedTuple):
    """A prompt."""

    prompt: str | Sequence[int] | tuple[str, str]
    """A text, token ids, or two texts as one prompt."""
    path: str
    """In the body."""


class Pooled(NamedTuple):
    """Outputs of all inputs of a body."""

    values: list[NDArray[np.float32]]
    """float32 [width] of each input."""
    num_tokens: int

    def usage(self) -> JsonObject:
        """Return OpenAI's usage object."""
        return {
            "prompt_tokens": self.num_tokens,
            "completion_tokens": 0,
            "total_tokens": self.num_tokens,
        }


def supported_width(engine: Engine, task: PoolingTask, wanted: str) -> int:
    """Return the width of the model's outputs. wanted: what an endpoint needs, in words. Raises
    RequestError: it has no such task."""
    support = engine.loaded.metadata.pooling
    found = support.find(task)
    if found is None:
        problem = f"the model gives no {wanted}: its tasks are {support.names}"
        raise request_error("model", engine.names[0], problem, f"serve a model for {task}")
    return found.width


def take_activation(fields: BodyFields) -> dict[str, Json]:
    """Return a body's use_activation as a field of PoolingParams. Raises RequestError."""
    given = fields.take("use_activation", bool, None)
    return {} if given is None else {"use_activation": given}


class Pooling:
    """Serves the inputs of one body, all with the same task."""

    def __init__(
        self,
        context: ServiceContext,
        model: Model,
        params: Mapping[str, Json],
        options: Mapping[str, Json],
    ) -> None:
        """params: fields of PoolingParams. options: further fields that RequestParser reads."""
        self._context = context
        self._engine = context.engine
        self._model = model
        self._params = dict(params)
        self._options = dict(options)
        self._names = {f"pooling.{name}": name for name in params}
        """Names of the params in the body, by those in errors."""
        self._at_once = max(1, min(AT_ONCE, context.admission.most))

    async def outputs(self, http: Request, inputs: Sequence[PooledInput]) -> Pooled:
        """Return the outputs, in the order of the inputs.

        Raises:
            RequestError: an input is too long, or its params do not fit the model.
            HttpError: there is no room, or a request has failed.
            ClientDisconnect: the client has left.
        """
        http.state.ticket.take(min(self._at_once, len(inputs)))
        async with unless_client_leaves(http.receive):
            return await self._all(inputs)

    async def _all(self, inputs: Sequence[PooledInput]) -> Pooled:
        values: list[NDArray[np.float32]] = []
        num_tokens = 0
        for first in range(0, len(inputs), self._at_once):
            some = inputs[first : first + self._at_once]
            requests = await self._engine.on_thread(partial(self._requests, some))
            num_tokens += sum(len(request.prompt) for request in requests)
            values += await self._served(requests, some)
        return Pooled(values, num_tokens)

    def _requests(self, inputs: Sequence[PooledInput]) -> list[GenerationRequest]:
        """Return the requests of inputs; on a thread."""
        return [self._request(each) for each in inputs]

    def _request(self, given: PooledInput) -> GenerationRequest:
        engine, loaded = self._engine, self._engine.loaded
        params, prompt = self._params, given.prompt
        with renamed({"prompt": given.path, **self._names}):
            if isinstance(prompt, tuple):
                prompt, second_start = engine.tokenizer.encode_pair(*prompt)
                if loaded.metadata.pooling.token_types and second_start is not None:
                    params = {**params, "second_start": second_start}
            request = engine.make({**self._options, "pooling": params}, prompt, self._model)
            request = check_fits(
                request,
                max_model_len=loaded.max_model_len,
                vocab_size=loaded.metadata.vocab_size,
            )
        pooling = request.pooling
        assert isinstance(pooling, PoolingParams), "made of params"
        most = engine.plan.config.scheduler.max_num_batched_tokens
        length, support = len(request.prompt), loaded.metadata.pooling
        fault = admission_fault(pooling, length, 0, support, most)
        if fault is not None:
            field, value, fix = fault
            place = given.path if field == "num_tokens" else field
            raise request_error(place, value, f"{field}: the model does not support it", fix)
        return request

    async def _served(
        self, requests: Sequence[GenerationRequest], inputs: Sequence[PooledInput]
    ) -> list[NDArray[np.float32]]:
        found: dict[int, NDArray[np.float32]] = {}
        names = {f"prompt[{place}]": each.path for place, each in enumerate(inputs)}
        with renamed({"prompt": inputs[0].path, **names, **self._names}):
            async with contextlib.aclosing(self._engine.parts(requests)) as parts:
                async for part in parts:
                    if part.output is not None and part.output.pooled is not None:
                        found[part.choice] = part.output.pooled
        return [found[place] for place in range(len(requests))]
