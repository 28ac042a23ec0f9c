"""The means of a server: the driver on its group, the tokenizer, the chat template, and the
names of the models. Makes requests of prompts and options, and text of their tokens."""

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Final, NamedTuple, TypeVar

from worker_client.async_driver import AsyncDriver
from worker_client.driven_group import DrivenGroup
from worker_client.driver import Driver
from worker_client.driver_parts.registry import DriverOptions
from worker_client.driver_parts.remote_prefill import PrefillCounts
from worker_client.errors import (
    ClientConfigError,
    RequestError,
    WorkerDied,
    config_error,
)
from worker_client.group.loading import LoadedGroup
from worker_client.group.loras import GroupAdapter
from worker_client.inputs.chat_template import ChatTemplate, load_chat_template
from worker_client.inputs.request_fields import Json, flat
from worker_client.inputs.request_parser import RequestParser
from worker_client.inputs.text_stream import StreamedText
from worker_client.inputs.tokenizer import TextBounds, Tokenizer, load_tokenizer
from worker_client.replicas.driver import DataParallelDriver
from worker_client.replicas.loras import choose_addition
from worker_client.replicas.opening import OpenedReplica, open_replicas
from worker_client.replicas.operations import ReplicaOperations
from worker_client.replicas.prefill_group import PrefillThread
from worker_client.request_stream import RequestProgress
from worker_client.requests import GenerationRequest, forked, seeded, with_adapter
from worker_client.scheduler import RequestOutput, Scheduler
from worker_client.scheduler.drafting.payoffs import DraftingChange, log_change
from worker_client.scheduler.reference import OVERDUE
from worker_client.scheduler_output import Experts, FullLogprob, Logprobs
from worker_client.service.errors import HttpError, unknown_model
from worker_client.service.fields import BodyFields
from worker_client.service.generation_defaults import sampling_defaults
from worker_client.service.metrics.counts import ServiceCounts
from worker_client.service.operations import adapter_addition, adapter_removal
from worker_client.service.prefill import opening_prefill
from worker_client.service.settings import ServiceSettings
from worker_client.structured.opening import open_grammars
from worker_client.worker_group import RankProgress

REOPEN_S: Final = 5.0
"""Time between two attempts to open a replica once more whose driver has ended."""
MAX_MAKING: Final = 64
"""Requests whose prompts are made at a time."""

T = TypeVar("T")
Prompt = str | Sequence[int]
"""A text, or its token ids."""


class Model(NamedTuple):
    """A model that a request has named."""

    name: str
    """The name that the request has used."""
    adapter: GroupAdapter | None
    """None: the model itself."""


class ChoicePart(NamedTuple):
    """Some more of a choice. The last one of a choice has its output."""

    choice: int
    """Index among all choices: those of the first prompt, then those of the next."""
    text: str
    token_ids: list[int]
    logprobs: list[Logprobs] | None
    """One for each of the tokens, if the request asked for them."""
    prompt_logprobs: list[Logprobs | None] | None
    """Those of the prompt, with the first part of a choice, if the request asked for them."""
    output: RequestOutput | None
    full_logprobs: list[FullLogprob] | None = None
    """One for each of the tokens, if the request asked for them."""
    routed_experts: Experts | None = None
    """Those of the positions behind the ones of the part before, likewise."""


class Engine:
    """Owns the driver, and the processes of tokenizer and template. Everything but `make`, which
    runs on threads of its own, belongs to the event loop."""

    def __init__(self, plan: DrivenGroup, settings: ServiceSettings) -> None:
        """Read what can be read before anything is loaded.

        Raises:
            ClientConfigError: there is no tokenizer, or it or generation_config.json cannot be
                read.
        """
        self.plan = plan
        self.names = settings.names or (plan.model.name,)
        """The model's names in requests; answers have the first."""
        tokenizer = load_tokenizer(plan.model.directory, TextBounds(plan.max_text_bytes))
        if tokenizer is None:
            problem, fix = "it has no tokenizer.json", "add it: requests and answers are texts"
            raise config_error("model", plan.model.sent_as, problem, fix)
        self.tokenizer: Tokenizer = tokenizer
        self.template: ChatTemplate | ClientConfigError
        """The chat template, or why there is none."""
        try:
            self.template = load_chat_template(plan.model.directory)
        except ClientConfigError as error:  # told to those who chat
            self.template = error
        self.sampling_defaults = sampling_defaults(plan.model.directory, settings.generation_config)
        """Sampling options of requests that say nothing else."""
        self.phase = "STARTING"
        """Phase of the start, for operators."""
        self.num_replicas = plan.config.parallel.data_parallel_size
        num_seqs = self.num_replicas * plan.config.scheduler.max_num_seqs
        self.max_unfinished = num_seqs + settings.max_queue
        """Bound on the samples that run or wait."""
        self.driver = self._make_driver()
        self.operations = (
            self.driver.operations
            if isinstance(self.driver, DataParallelDriver)
            else ReplicaOperations((self.driver,))
        )
        """Operations of administrators on all replicas."""
        self.inner: dict[int, Driver] = {}
        """The replicas' drivers inside, once their groups are open: metrics read their numbers. All
        else belongs to their threads."""
        self.counts = ServiceCounts()
        self.prefill_counts: PrefillCounts | None = None
        """Counts of prompts that another group has computed; None without one."""
        self.startup_s = 0.0
        """Seconds that it took to become ready."""
        self.created = int(time.time())
        """Unix time of the start, in seconds."""
        self.adapters: Mapping[str, GroupAdapter] = {}
        """LoRA adapters by the names that requests give as their model."""
        self._served_as: dict[str, str] = {}
        """Such names that are not the adapter's own, by the latter."""
        self._settings = settings
        self._opened: dict[int, OpenedReplica] = {}
        self._reopen: Callable[[int], OpenedReplica] | None = None
        """OpenedReplicas.reopen, of several replicas."""
        self._groups = contextlib.ExitStack()
        """Closes the groups of several replicas; a single one is its driver's."""
        self._is_ready = False
        self._adding = asyncio.Lock()
        self._parser = RequestParser(tokenizer.encode, plan.seed, encode_word=tokenizer.encode_word)
        self._numbers = itertools.count()
        self._threads = ThreadPoolExecutor(MAX_MAKING, "prompts")

    async def __aenter__(self) -> "Engine":
        """Open the group, and add the adapters of the settings. Raises what open_replicas
        raises."""
        began = time.monotonic()
        try:
            if self.num_replicas > 1:
                opening = open_replicas(self.plan, self._note_phase)
                opened = await asyncio.to_thread(self._groups.enter_context, opening)
                self._opened, self._reopen = dict(enumerate(opened.replicas)), opened.reopen
            await self.driver.__aenter__()
            try:
                for adapter in self._settings.adapters:
                    await self.add_adapter(adapter.sent_as, served_as=adapter.name)
                await self.learn_adapters()
            except BaseException:
                await self.driver.__aexit__()
                raise
        except BaseException:
            await asyncio.to_thread(self._groups.close)
            raise
        self.startup_s = time.monotonic() - began
        self._is_ready = True
        return self

    async def __aexit__(self, *_: object) -> None:
        """Abort all requests, and close the group."""
        await self.driver.__aexit__()
        await asyncio.to_thread(self._groups.close)

    def close(self) -> None:
        """End the making of requests, and its processes."""
        self.tokenizer.close()
        if isinstance(self.template, ChatTemplate):
            self.template.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    @property
    def is_ready(self) -> bool:
        """True once the group is open."""
        return self._is_ready

    @property
    def loaded(self) -> LoadedGroup:
        """The loaded model, of the first replica; only once it is ready."""
        assert self._opened, "app.py lets no request in before"
        return self._opened[0].loaded

    @property
    def max_model_len(self) -> int:
        """Longest context that all replicas take; only once it is ready."""
        return min(each.loaded.max_model_len for each in self._opened.values())

    def _make_driver(self) -> AsyncDriver | DataParallelDriver:
        most, count = self.max_unfinished, self.num_replicas
        if count == 1:
            return AsyncDriver(self._open_driver, max_requests=most)
        opening = [partial(self._open_replica, place) for place in range(count)]
        return DataParallelDriver(opening, max_requests=most, reopen_s=REOPEN_S)

    @contextlib.contextmanager
    def _open_driver(self) -> Iterator[Driver]:
        """Open the only replica, on its driver's thread."""
        with contextlib.ExitStack() as stack:
            other = self._settings.prefill
            prefill = None if other is None else stack.enter_context(opening_prefill(other))
            opened = stack.enter_context(open_replicas(self.plan, self._note_phase))
            self._opened = dict(enumerate(opened.replicas))
            yield stack.enter_context(self._driving(0, prefill))

    def _open_replica(self, place: int) -> AbstractContextManager[Driver]:
        """Open the driver of one of several replicas, on its thread."""
        if place in self.inner:  # its driver has ended
            assert self._reopen is not None, "there are several"
            self._opened[place] = self._reopen(place)
        return self._driving(place, None)

    @contextlib.contextmanager
    def _driving(self, place: int, prefill: PrefillThread | None) -> Iterator[Driver]:
        plan, opened = self.plan, self._opened[place]
        metadata = opened.loaded.metadata
        self.tokenizer.fit_context(self.max_model_len)
        grammars = open_grammars(plan.model.directory, metadata.vocab_size, metadata.eos_token_ids)
        with contextlib.closing(grammars):
            changed = self.note_drafting
            scheduler = Scheduler(opened.limits, self.tokenizer, on_drafting_change=changed)
            if prefill is not None:
                self.phase = "opening the prefill group"
                prefill.wait_opened()
                self.prefill_counts = prefill.counts
            self.phase = "READY"
            options = DriverOptions(
                grammars, eplb_step_interval=plan.eplb_step_interval, prefill=prefill
            )
            recover = partial(self._recover, opened)
            driver = Driver(opened.group, scheduler, recover=recover, options=options)
            self.inner[place] = driver
            yield driver

    def _recover(self, opened: OpenedReplica, died: WorkerDied) -> None:
        self.counts.num_recoveries += 1
        opened.recover(died)

    def note_drafting(self, change: DraftingChange) -> None:
        """Log and count that drafts have ceased to pay, or pay again. On the driver's thread."""
        log_change(change)
        if change.req_id is None:
            self.counts.drafting_changes["resumed" if change.pays else "stopped"] += 1

    def _note_phase(self, progress: RankProgress) -> None:
        if progress.phase != "IDLE":
            self.phase = f"{progress.phase} (rank {progress.rank})"

    async def ask(self, question: Callable[[Driver], T]) -> list[T]:
        """Call a function with the driver of each replica that serves (and `driver.group`,
        `driver.scheduler`), on its thread and between two steps: see ReplicaOperations.ask. What
        takes long holds up every request."""
        return await self.operations.ask(question)

    async def add_adapter(
        self, name: str, *, served_as: str = "", load_inplace: bool = False
    ) -> GroupAdapter:
        """Read an adapter below the daemons' --lora-root while requests are served, and add it to
        all replicas. served_as: its name in requests, if that is another one. Raises what
        ReplicaLoras.add and ReplicaOperations.do raise."""
        async with self._adding:  # each by the ids that the others leave free
            known = await self.ask(lambda driver: dict(driver.group.loras.known))
            addition = choose_addition(name, known, load_inplace=load_inplace)
            added = await self.operations.do(adapter_addition(name, addition))
        self._served_as[name] = served_as or name
        await self.learn_adapters()
        (adapter, *_) = (task.adapter for task in added.results.values())
        assert adapter is not None, "it was added"
        return adapter

    async def remove_adapter(self, adapter: GroupAdapter) -> None:
        """Remove an adapter from all replicas. Raises what ReplicaOperations.do raises."""
        await self.operations.do(adapter_removal(adapter))
        await self.learn_adapters()

    async def learn_adapters(self) -> None:
        """Serve the adapters that all replicas have which serve now, and no others."""
        first, *others = await self.ask(lambda driver: dict(driver.group.loras.known))
        versions = [{own.version for own in known.values()} for known in others]
        found = [own for own in first.values() if all(own.version in each for each in versions)]
        self.adapters = {self._served_as.get(own.name, own.name): own for own in found}

    def take_model(self, fields: BodyFields) -> Model:
        """Return the model that a body names; the served one, if it names none. Raises HttpError
        (404): it is not served."""
        name: str = fields.take("model", str, self.names[0])
        if name in self.names:
            return Model(name, None)
        if name in self.adapters:
            return Model(name, self.adapters[name])
        raise unknown_model(name, (*self.names, *self.adapters))

    async def on_thread(self, work: Callable[[], T]) -> T:
        """Run what takes time, as tokenizing and rendering do, on a thread."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def make(
        self,
        options: Mapping[str, Json],
        prompt: Prompt,
        model: Model,
        *,
        add_special_tokens: bool = True,
    ) -> GenerationRequest:
        """Return a request for the driver; call it on a thread (on_thread). options: fields that
        RequestParser reads. Raises RequestError: see `renamed`."""
        if isinstance(prompt, str):
            prompt = self.tokenizer.encode(prompt, add_special_tokens=add_special_tokens)
        number = next(self._numbers)
        fields = {**options, "id": f"r{number}"}
        request = seeded(self._parser.from_fields(fields, number, token_ids=prompt))
        if model.adapter is not None:
            request = replace(request, lora=model.adapter.name)
            request = with_adapter(request, model.adapter.extension)
        return request

    async def parts(
        self, requests: Sequence[GenerationRequest]
    ) -> AsyncGenerator[ChoicePart, None]:
        """Serve the requests of a body, all with the same n. Closing the generator aborts them.

        Raises:
            HttpError: one of them has failed.
            RequestError: the driver refuses one of them, before any part.
            WorkerDaemonError: the driver has ended.
        """
        if self._settings.request_s is not None:
            deadline = time.monotonic() + self._settings.request_s
            requests = [replace(request, deadline=deadline) for request in requests]
        if len(requests) == 1:
            streams = self._parts_of(requests[0], 0, "prompt")
        else:
            streams = _merged(
                [
                    self._parts_of(request, index * request.sampling.n, f"prompt[{index}]")
                    for index, request in enumerate(requests)
                ]
            )
        async with contextlib.aclosing(streams):
            async for part in streams:
                yield part

    async def _parts_of(
        self, request: GenerationRequest, first: int, field: str
    ) -> AsyncGenerator[ChoicePart, None]:
        """Serve one request. first: the index of its first choice; field: of its prompt, in
        errors."""
        samples = _Samples(request, self.tokenizer, first)
        stream = self.driver.generate(request)
        names = {"prompt": field, "lora": "model"}
        with self.counts.counting(request) as counted, renamed(names):
            async with contextlib.aclosing(stream):
                async for progress in stream:
                    counted.take(progress)
                    output = progress.output
                    if output is not None and output.error:
                        raise output.refusal or _failed(output)
                    for part in samples.parts(progress):
                        yield part


class _Samples:
    """Makes parts of the progress of one request's samples."""

    def __init__(self, request: GenerationRequest, tokenizer: Tokenizer, first: int) -> None:
        sampling = request.sampling
        self._first = first
        self._places = {sample.id: place for place, sample in enumerate(forked(request))}
        includes_stop = sampling.include_stop_str_in_output
        self._texts = [
            StreamedText(tokenizer, sampling.stop, includes_stop=includes_stop)
            for _ in self._places
        ]
        self._prompt: list[Logprobs | None] | None = None
        """Log probabilities of the prompt. The first sample reports them, and each begins with
        them."""
        self._awaits_prompt = sampling.prompt_logprobs is not None
        self._has_begun = [False] * len(self._places)
        self._held: list[RequestProgress] = []
        """Progress of others before that of the first sample."""

    def parts(self, progress: RequestProgress) -> list[ChoicePart]:
        """Return the parts that follow from some progress."""
        if self._awaits_prompt:
            self._held.append(progress)
            reports = progress.reports
            if reports is None or reports.prompt_logprobs is None:
                return []
            self._awaits_prompt, self._prompt = False, reports.prompt_logprobs
            held, self._held = self._held, []
            return list(map(self._part, held))
        return [self._part(progress)]

    def _part(self, progress: RequestProgress) -> ChoicePart:
        place, reports, prompt = self._places[progress.req_id], progress.reports, None
        if not self._has_begun[place]:
            self._has_begun[place], prompt = True, self._prompt
        return ChoicePart(
            self._first + place,
            self._texts[place].take(progress.token_ids, progress.output),
            progress.token_ids,
            None if reports is None else reports.logprobs,
            prompt,
            progress.output,
            None if reports is None else reports.full_logprobs,
            None if reports is None else reports.routed_experts,
        )


def _failed(output: RequestOutput) -> HttpError:
    if output.error == OVERDUE:
        return HttpError(504, f"the request has not ended: {output.error}", code="deadline")
    return HttpError(500, output.error, code="request_failed")


async def _merged(
    streams: Sequence[AsyncGenerator[ChoicePart, None]],
) -> AsyncGenerator[ChoicePart, None]:
    """Yield the parts of several generators as they come. A slow reader holds all of them up, and
    the driver joins their tokens meanwhile."""
    queue: asyncio.Queue[ChoicePart | Exception | None] = asyncio.Queue(maxsize=1)

    async def feed(stream: AsyncGenerator[ChoicePart, None]) -> None:
        try:
            async with contextlib.aclosing(stream):
                async for part in stream:
                    await queue.put(part)
        except Exception as error:  # raised again below
            await queue.put(error)
        else:
            await queue.put(None)

    tasks = [asyncio.create_task(feed(stream)) for stream in streams]
    try:
        num_left = len(tasks)
        while num_left:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                num_left -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@contextlib.contextmanager
def renamed(names: Mapping[str, str]) -> Iterator[None]:
    """Name the fields in RequestErrors as a body does. names: the body's name for each of the
    driver's, or for a path there; "prompt" stands for its token ids, too."""
    try:
        yield
    except RequestError as error:
        found = flat(error)
        field = "prompt" if found.field == "prompt_token_ids" else found.field
        if field in names:
            raise found.named(names[field]) from None
        head, dot, rest = field.partition(".")
        raise found.named(names.get(head, head) + dot + rest) from None
