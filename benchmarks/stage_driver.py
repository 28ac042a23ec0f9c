"""A worker in this process, driven by the messages that a daemon would pass on, for measurements
inside the worker. No socket, no scheduler; every request is greedy and has all its blocks from the
start."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, TypedDict

import numpy as np
import torch

from rpc_schema import config, lifecycle
from rpc_schema.codec import encode_step
from rpc_schema.kv_cache import (
    LayerGroup,
    blocks_for,
    build_kv_cache_config,
    bytes_per_block,
    fitting_blocks,
    plan_groups,
)
from rpc_schema.step import ExecuteModel, NewRequestData
from worker_daemon.kernel_compiler import KernelCompiler
from worker_daemon.runner.output import PendingOutput
from worker_daemon.worker.worker import Worker

BLOCK_SIZE = 16
MAX_NUM_SEQS = 256
MAX_NUM_BATCHED_TOKENS = 8192
SCHEDULER = config.SchedulerConfig(
    max_num_seqs=MAX_NUM_SEQS, max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS
)

Frames = list[bytes]
"""An encoded message and its arrays."""


class Chunk(NamedTuple):
    """A part of a prompt."""

    num_tokens: int
    num_computed: int = 0
    """Tokens before it, whose KV is there."""


class Ids(TypedDict):
    """Keyword arguments of every message to the worker."""

    epoch: int
    link: int
    seq: int


@dataclass
class StageDriver:
    """A whole model on one device, ready to serve after start()."""

    model: Path
    device: str
    max_model_len: int
    dtype: config.Dtype = "bfloat16"
    quantization: config.Quantization = "auto"
    num_blocks: int = 8192
    """Blocks of the KV cache; 0: as many as fit."""
    enable_sleep_mode: bool = False
    profile_dir: Path | None = None
    cache: config.CacheConfig = field(
        default_factory=lambda: config.CacheConfig(block_size=BLOCK_SIZE)
    )
    compiler: KernelCompiler | None = None
    speculative: config.SpeculativeConfig = field(default_factory=config.SpeculativeConfig)
    worker: Worker = field(init=False)
    seq: int = 0

    def start(self) -> None:
        """Go from nothing to READY, with dummy weights."""
        self.load()
        available = self.profile().available_bytes
        self.num_blocks = self.num_blocks or fitting_blocks(available, self.block_bytes())
        self.serve(self.num_blocks)

    def load(self) -> None:
        """Go from nothing to MODEL_LOADED."""
        self.init_device()
        self.load_model()

    def init_device(self) -> None:
        """Go from nothing to DEVICE_READY."""
        self.worker = Worker(
            self.device,
            [self.model.parent],
            _ignore_phase,
            profile_dir=self.profile_dir,
            compiler=self.compiler,
        )
        self.worker.init_device(
            lifecycle.InitDevice(
                **self.ids(),
                parallel=config.ParallelConfig(),
                rendezvous=config.Rendezvous(link=1, place=None, rank=0, local_world_size=1),
                cache=self.cache,
                scheduler=SCHEDULER,
            )
        )

    def load_model(self) -> None:
        """Go from DEVICE_READY to MODEL_LOADED."""
        self.worker.load_model(
            lifecycle.LoadModel(
                **self.ids(),
                model=config.ModelConfig(
                    model=str(self.model),
                    dtype=self.dtype,
                    load_format="dummy",
                    quantization=self.quantization,
                    max_model_len=self.max_model_len,
                    enable_sleep_mode=self.enable_sleep_mode,
                ),
                scheduler=SCHEDULER,
                cache=self.cache,
                graph=config.GraphConfig(),
                speculative=self.speculative,
            )
        )

    def profile(self) -> lifecycle.DetermineAvailableMemoryReply:
        """Return the bytes that a KV cache may take."""
        message = lifecycle.DetermineAvailableMemory(**self.ids())
        return self.worker.determine_available_memory(message)

    def block_bytes(self) -> int:
        """Return the bytes of a KV block."""
        return bytes_per_block(self._groups(), 0)

    def serve(self, num_blocks: int) -> None:
        """Go from MODEL_LOADED to READY, with this number of KV blocks."""
        plan = build_kv_cache_config(self._groups(), 0, num_blocks)
        worker = self.worker
        worker.initialize_from_config(
            lifecycle.InitializeFromConfig(**self.ids(), kv_cache_configs=(plan,))
        )
        worker.initialize_cache(lifecycle.InitializeCache(**self.ids(), num_gpu_blocks=num_blocks))
        worker.compile_or_warm_up_model(lifecycle.CompileOrWarmUpModel(**self.ids()))

    def leave(self) -> None:
        """Go back to CREATED and free the device's memory."""
        self.worker.reset(lifecycle.Reset(**self.ids(), to="CREATED"))
        self.worker.close()

    def _groups(self) -> tuple[LayerGroup, ...]:
        layers = self.worker.get_kv_cache_spec(lifecycle.GetKVCacheSpec(**self.ids())).layers
        most_tokens = SCHEDULER.max_num_batched_tokens
        return plan_groups([layers], BLOCK_SIZE, self.max_model_len, most_tokens)

    def ids(self) -> "Ids":
        """The identity of the next message."""
        self.seq += 1
        return {"epoch": 1, "link": 1, "seq": self.seq}

    def admit(self, num_requests: int, prompt_len: int, num_more: int) -> None:
        """Drop all requests, then run prefills of num_requests prompts, with room for num_more
        tokens each."""
        self.worker.on_attach()
        at_once = max(1, MAX_NUM_BATCHED_TOKENS // prompt_len)
        for first in range(0, num_requests, at_once):
            slots = np.arange(first, min(first + at_once, num_requests))
            message, tokens = self.prefill(slots, prompt_len, num_more)
            wait(self.worker.execute_model(message, [tokens]))

    def prefill(
        self, slots: "np.ndarray[tuple[int], np.dtype[np.int64]]", prompt_len: int, num_more: int
    ) -> tuple[ExecuteModel, bytes]:
        """Return a step that admits and computes one random prompt per slot, each with its own
        blocks."""
        blocks = blocks_for(prompt_len + num_more, BLOCK_SIZE)
        ids = 1 + slots[:, None] * blocks + np.arange(blocks)
        self._check_blocks(1 + (int(slots.max()) + 1) * blocks)
        lengths = np.stack([slots, np.full_like(slots, prompt_len)], axis=1)
        message = ExecuteModel(
            **self.ids(),
            total_num_scheduled_tokens=slots.size * prompt_len,
            scheduled=bitmap(slots),
            num_scheduled_tokens=lengths.astype("<i4").tobytes(),
            new_block_slots=np.repeat(slots, blocks).astype("<u2").tobytes(),
            new_block_ids=ids.ravel().astype("<i4").tobytes(),
            scheduled_new_reqs=tuple(_new_request(int(slot), prompt_len, 0) for slot in slots),
        )
        return message, random_tokens(slots.size * prompt_len)

    def chunk(
        self, chunk: "Chunk", first_block: int, num_decodes: int = 0, *, again: bool = False
    ) -> tuple[ExecuteModel, bytes]:
        """Return a step that admits a prompt in slot num_decodes, beside a decode of each slot
        below, and computes its last tokens; its blocks begin at first_block, and the KV of what
        comes before is taken to be in them.

        again: the slot has such a prompt, which ends.
        """
        slot, total = num_decodes, chunk.num_computed + chunk.num_tokens
        blocks = np.arange(first_block, first_block + blocks_for(total, BLOCK_SIZE))
        self._check_blocks(int(blocks[-1]) + 1)
        message = ExecuteModel(
            **self.ids(),
            total_num_scheduled_tokens=num_decodes + chunk.num_tokens,
            scheduled=bitmap(np.arange(num_decodes + 1)),
            num_scheduled_tokens=np.array([slot, chunk.num_tokens], "<i4").tobytes(),
            new_block_slots=np.full(blocks.size, slot, "<u2").tobytes(),
            new_block_ids=blocks.astype("<i4").tobytes(),
            finished=np.array([slot] if again else [], "<u2").tobytes(),
            scheduled_new_reqs=(_new_request(slot, total, chunk.num_computed),),
        )
        return message, random_tokens(total)

    def _check_blocks(self, num_needed: int) -> None:
        if num_needed > self.num_blocks:
            raise ValueError(f"{num_needed} blocks are needed, {self.num_blocks} are there")

    def decode_frames(self, num_requests: int) -> Frames:
        """Encode a decode of the first num_requests slots, as a driver does."""
        return [bytes(frame) for frame in encode_step(self.decode(num_requests))]

    def decode(self, num_requests: int) -> ExecuteModel:
        """Return a decode of the first num_requests slots."""
        return ExecuteModel(
            **self.ids(),
            total_num_scheduled_tokens=num_requests,
            scheduled=bitmap(np.arange(num_requests)),
        )

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.device != "cpu":
            torch.cuda.synchronize()


def random_tokens(count: int) -> bytes:
    """Return random tokens, as a step's frame has them."""
    return np.random.default_rng().integers(3, 1000, count).astype("<i4").tobytes()


def _new_request(slot: int, num_tokens: int, num_computed: int) -> NewRequestData:
    return NewRequestData(
        slot=slot,
        req_id=f"request-{slot}",
        num_tokens=num_tokens,
        num_prompt_tokens=num_tokens,
        num_computed_tokens=num_computed,
    )


def bitmap(slots: "np.ndarray[tuple[int], np.dtype[np.int64]]") -> bytes:
    """Return the slots as a bitmap."""
    bits = np.zeros(int(slots.max()) + 1, np.bool_)
    bits[slots] = True
    return np.packbits(bits, bitorder="little").tobytes()


def wait(reply: PendingOutput | None) -> None:
    """Wait for a step's result."""
    assert reply is not None, "the only stage answers every step"
    reply.result()


def pipelined(steps: int, launch: Callable[[], PendingOutput | None], depth: int = 2) -> None:
    """Run steps with depth of them in flight, as the client's driver does."""
    in_flight: list[PendingOutput | None] = []
    for _ in range(steps):
        in_flight.append(launch())
        if len(in_flight) == depth:
            wait(in_flight.pop(0))
    for reply in in_flight:
        wait(reply)


def _ignore_phase(phase: str, legal_silence_s: float, /, *, done: float = 0.0) -> bool:
    """Be a SetPhase for a worker without a daemon."""
    return False
