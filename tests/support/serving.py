"""Real daemons for tests, and the two functions that most tests need, through the fixtures in
tests/e2e/conftest.py:

    daemons                                   # session-wide DaemonPool, CPU, at most 4
    with serve(path, pp=2, tp=1, block_size=4, num_gpu_blocks=64) as (group, loaded):
        run = generate(group, loaded, [greedy_request("a", [1, 2, 3], 16)])
        run.tokens["a"]                       # list[int]
        run.outputs["a"]                      # worker_client.scheduler.RequestOutput
        run.driver.records                    # one for each step

serve() attaches to the pool's first pp * tp daemons and loads again, regardless of what is loaded;
dead daemons are replaced first. For daemons that a test will damage, use separate LocalDaemons and
connect().
"""

import contextlib
import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import pytest

from rpc_schema.config import (
    CacheConfig,
    GraphConfig,
    LoraConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    WorkerConfig,
)
from tests.support.checkpoints import Checkpoint
from tests.support.every_draft import every_draft
from tests.support.flat_requests import flat_request
from tests.support.forked_daemons import ForkedDaemons
from tests.support.installed_processors import install_processors
from worker_client.driver import Driver
from worker_client.errors import LaunchError
from worker_client.group.loading import LoadedGroup
from worker_client.group.outcomes import StepFuture
from worker_client.launcher import LocalDaemons
from worker_client.requests import GenerationRequest
from worker_client.scheduler import (
    RequestOutput,
    SchedulerInterface,
    SchedulerLimits,
)
from worker_client.scheduler import scheduler_limits as usual_limits
from worker_client.scheduler_output import SchedulerOutput
from worker_client.wire.lease import LeaseTerms
from worker_client.worker_group import WorkerGroup

MAX_DAEMONS = 4
STEP_DEADLINE_MS = 20_000
LOG_TAIL_CHARS = 1500
SHARED_GPU = 0.1
"""The gpu_memory_utilization of tests whose daemons may share a GPU with those of other tests."""
NO_DRAFTS = SpeculativeConfig()
LOOKUPS = {
    "ngram": SpeculativeConfig(method="ngram", num_speculative_tokens=3, prompt_lookup_min=1),
    "suffix": SpeculativeConfig(method="suffix", num_speculative_tokens=4, prompt_lookup_min=1),
}
"""Configurations that draft something for most rows, by method."""
LONG_LEASE = LeaseTerms(ttl_s=20.0)
"""A lease that survives a busy host."""


def drafts_by(method: str, model: Path) -> SpeculativeConfig:
    """Return a configuration with drafts by a method, or "none". model: the draft model's
    directory, if it is one; the target itself is right about everything."""
    if method == "none":
        return NO_DRAFTS
    if method in LOOKUPS:
        return LOOKUPS[method]
    made = SpeculativeConfig(method=method, num_speculative_tokens=3)
    return msgspec.structs.replace(made, model=str(model)) if method == "draft_model" else made


def worker_config(
    model: Path,
    pp: int = 1,
    tp: int = 1,
    *,
    layer_partition: tuple[int, ...] | None = None,
    dtype: str = "float32",
    quantization: str = "auto",
    load_format: str = "auto",
    max_model_len: int | None = None,
    model_seed: int = 0,
    max_num_seqs: int = 32,
    max_num_batched_tokens: int = 256,
    step_deadline_ms: int = STEP_DEADLINE_MS,
    block_size: int = 4,
    gpu_memory_utilization: float = 0.9,
    kv_cache_memory_bytes: int | None = None,
    kv_cache_dtype: str = "auto",
    kv_host_memory_bytes: int = 0,
    kv_files: bool = False,
    kv_tier_memory: str = "host",
    enable_sleep_mode: bool = False,
    enable_expert_parallel: bool = False,
    enable_return_routed_experts: bool = False,
    lora: LoraConfig = LoraConfig(),  # noqa: B008  # a value
    logits_processors: tuple[str, ...] = (),
    speculative: SpeculativeConfig = NO_DRAFTS,
) -> WorkerConfig:
    """Return the configuration of a small group."""
    return WorkerConfig(
        parallel=ParallelConfig(
            pipeline_parallel_size=pp, tensor_parallel_size=tp, layer_partition=layer_partition
        ),
        model=ModelConfig(
            model=str(model),
            dtype=dtype,
            quantization=quantization,
            load_format=load_format,
            max_model_len=max_model_len,
            seed=model_seed,
            enable_sleep_mode=enable_sleep_mode,
            enable_expert_parallel=enable_expert_parallel,
            enable_return_routed_experts=enable_return_routed_experts,
        ),
        scheduler=SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            step_deadline_ms=step_deadline_ms,
            logits_processors=logits_processors,
        ),
        cache=CacheConfig(
            block_size=block_size,
            gpu_memory_utilization=gpu_memory_utilization,
            kv_cache_memory_bytes=kv_cache_memory_bytes,
            kv_cache_dtype=kv_cache_dtype,
            kv_host_memory_bytes=kv_host_memory_bytes,
            kv_files=kv_files,
            kv_tier_memory=kv_tier_memory,
        ),
        graph=GraphConfig(),
        lora=lora,
        speculative=speculative,
    )


def kill_and_wait(pid: int) -> None:
    """Kill -9 a child, and wait until it can be seen to have ended: on a busy host its sockets may
    be gone long before."""
    os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):  # another thread has waited for it
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)


class DaemonPool:
    """Daemons that outlive a test: started when first needed, stopped by stop(). Models and
    adapters are below `model_root`, and the logits processors of installed_processors beside
    them."""

    def __init__(self, model_root: Path) -> None:
        self.model_root = model_root
        self._site = model_root / "site"
        install_processors(self._site)
        self._started: list[LocalDaemons] = []

    def endpoints(self, count: int) -> list[str]:
        """Return the endpoints of `count` living daemons, always the same first ones."""
        assert count <= MAX_DAEMONS, f"the pool has at most {MAX_DAEMONS} daemons"
        self._drop_dead()
        have = sum(len(daemons.endpoints) for daemons in self._started)
        if have < count:
            devices, root = ["cpu"] * (count - have), self.model_root
            with self._installed():
                self._started.append(ForkedDaemons(devices, root, lora_root=root))
        return [e for daemons in self._started for e in daemons.endpoints][:count]

    def kill(self, index: int) -> None:
        """Kill -9 a daemon, in the order of endpoints(); return once it has ended."""
        kill_and_wait([pid for daemons in self._started for pid in daemons.pids][index])

    def restart_dead(self) -> None:
        """Start successors of the dead, at their endpoints; return before they answer."""
        with self._installed():
            for daemons in self._started:
                daemons.restart_dead()

    @contextlib.contextmanager
    def _installed(self) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PYTHONPATH", str(self._site), prepend=os.pathsep)
            yield

    def log_tails(self, count: int) -> str:
        """Return the ends of the logs of the first `count` daemons."""
        tails = [
            f"--- {endpoint}\n{daemons.log_tail(index)[-LOG_TAIL_CHARS:]}"
            for daemons in self._started
            for index, endpoint in enumerate(daemons.endpoints)
        ]
        return "\n".join(tails[:count])

    def stop(self) -> None:
        """End all of them."""
        for daemons in self._started:
            daemons.stop()
        self._started.clear()

    def _drop_dead(self) -> None:
        for daemons in list(self._started):
            try:
                daemons.check_alive()
            except LaunchError:
                daemons.stop()
                self._started.remove(daemons)


class Served(NamedTuple):
    """A group with a model, ready for steps."""

    group: WorkerGroup
    loaded: LoadedGroup


@contextlib.contextmanager
def connect(
    endpoints: Sequence[str],
    config: WorkerConfig,
    *,
    num_gpu_blocks: int | None = 256,
    reload: bool = True,
    force: bool = True,
) -> Iterator[Served]:
    """Attach to these daemons and prepare them; detach at the end. force: even if another driver,
    such as a fixture of a wider scope, has them."""
    with WorkerGroup(endpoints, config.parallel, lease=LONG_LEASE) as group:
        group.attach(force=force)
        loaded = group.prepare(config, num_gpu_blocks=num_gpu_blocks, reload=reload)
        yield Served(group, loaded)


@dataclass
class Serve:
    """The `serve` fixture: see this module's description."""

    pool: DaemonPool
    speculative: SpeculativeConfig = NO_DRAFTS
    """That of groups for which nothing else is said."""

    @contextlib.contextmanager
    def __call__(
        self,
        model: Path,
        pp: int = 1,
        tp: int = 1,
        *,
        num_gpu_blocks: int | None = 256,
        reload: bool = True,
        **config: object,
    ) -> Iterator[Served]:
        """config: fields of worker_config. A failure includes the ends of the daemons' logs."""
        wanted = worker_config(model, pp, tp, **{"speculative": self.speculative, **config})
        endpoints = self.pool.endpoints(pp * tp)
        try:
            with connect(endpoints, wanted, num_gpu_blocks=num_gpu_blocks, reload=reload) as served:
                yield served
        except Exception as error:
            error.add_note(self.pool.log_tails(pp * tp))
            raise


@dataclass
class Run:
    """Result of generate()."""

    outputs: dict[str, RequestOutput]
    driver: Driver
    most_in_flight: int
    """Maximum of steps in flight."""

    @property
    def tokens(self) -> dict[str, list[int]]:
        """Return the generated tokens by request."""
        return {req_id: output.token_ids for req_id, output in self.outputs.items()}


class CountingGroup:
    """A group that records the number of steps in flight."""

    def __init__(self, group: WorkerGroup) -> None:
        self._group = group
        self.max_in_flight = group.max_in_flight
        self.most_in_flight = 0

    def __getattr__(self, name: str) -> object:
        return getattr(self._group, name)

    def execute_model(self, output: SchedulerOutput) -> StepFuture:
        """Send a step."""
        future = self._group.execute_model(output)
        self.most_in_flight = max(self.most_in_flight, self._group.num_in_flight)
        return future


def scheduler_limits(group: WorkerGroup, loaded: LoadedGroup, **changes: object) -> SchedulerLimits:
    """Return a scheduler's limits for a loaded group; `changes` override fields."""
    loaded_config = group.get_status()[0].config
    assert loaded_config is not None, "prepare() comes first"
    usual = usual_limits(loaded, loaded_config)
    fields = {
        "max_num_seqs": loaded_config.scheduler.max_num_seqs,
        "max_num_batched_tokens": loaded_config.scheduler.max_num_batched_tokens,
        "max_model_len": loaded.max_model_len,
        "num_blocks": loaded.num_blocks,
        "block_size": loaded.block_size,
        "groups": loaded.groups,
        "pipeline_parallel_size": group.parallel.pipeline_parallel_size,
        "eos_token_ids": loaded.metadata.eos_token_ids,
        "keeps_state": loaded.keeps_state,
        "checkpoint_blocks": loaded.checkpoint_blocks,
        "generates": loaded.metadata.generates,
        "pooling": loaded.metadata.pooling,
        "max_loras": loaded_config.lora.max_loras,
        "num_speculative_tokens": loaded_config.speculative.num_speculative_tokens,
        "makes_drafts": loaded_config.speculative.on_device,
        "routed_experts": loaded.metadata.routed_experts,
        "num_host_blocks": loaded.num_host_blocks,
        "has_device_tier": usual.has_device_tier,
        "has_kv_files": loaded_config.cache.kv_files,
        "num_lookahead_tokens": usual.num_lookahead_tokens,
        "max_stored_ahead": usual.max_stored_ahead,
    }
    return SchedulerLimits(**{**fields, **changes})


def generate(
    group: WorkerGroup,
    loaded: LoadedGroup,
    requests: Sequence[GenerationRequest],
    scheduler: SchedulerInterface | None = None,
    **limits: object,
) -> Run:
    """Generate all requests at once. Without a scheduler: the reference one, within
    scheduler_limits(group, loaded, **limits)."""
    counting = CountingGroup(group)
    if scheduler is None:
        scheduler = every_draft(scheduler_limits(group, loaded, **limits))
    driver = Driver(counting, scheduler)
    for request in requests:
        driver.add_request(request)
    outputs = {output.req_id: output for output in driver.run()}
    return Run(outputs, driver, counting.most_in_flight)


def continue_one(
    endpoints: Sequence[str], limits: SchedulerLimits, config: WorkerConfig, num_steps: int
) -> RequestOutput:
    """Return the output of the one request that a driver has left: the next one adopts it, runs so
    many steps and leaves it too, and the one after that ends it."""
    ended: list[RequestOutput] = []
    for count in (num_steps, 0):
        with WorkerGroup(endpoints, config.parallel, lease=LONG_LEASE) as group:
            group.attach(keep_requests=True)
            group.prepare(config)
            scheduler = every_draft(limits)
            assert not scheduler.adopt_requests(group.adopt_requests())
            driver = Driver(group, scheduler)
            ended += [output for _ in range(count) for output in driver.step()]
            ended += driver.run() if not count else ()
    (output,) = ended
    return output


def greedy_request(
    req_id: str, prompt: Sequence[int], max_tokens: int, **fields: object
) -> GenerationRequest:
    """Return a request at temperature 0; `fields` of GenerationRequest."""
    return flat_request(
        id=req_id,
        prompt=np.asarray(prompt, np.int32),
        max_tokens=max_tokens,
        **fields,
    )


def assert_greedy(run: Run, checkpoint: Checkpoint, requests: Sequence[GenerationRequest]) -> None:
    """Assert that every request ended with the tokens of transformers' generate."""
    assert_greedy_tokens(run.tokens, checkpoint, requests)


def assert_greedy_tokens(
    tokens: Mapping[str, list[int]], checkpoint: Checkpoint, requests: Sequence[GenerationRequest]
) -> None:
    """Assert that these are the requests' tokens of transformers' generate, by their ids."""
    expected = {
        request.id: checkpoint.expected(
            request.prompt.tolist(), request.max_tokens, tokens.get(request.id, [])
        )
        for request in requests
    }
    assert tokens == expected
