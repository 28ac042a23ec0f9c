"""Drives one Worker in this process like a scheduler: the start-up chain, then steps by slot."""

from dataclasses import dataclass, field

import msgspec
import numpy as np

from rpc_schema import config, kv_cache, lifecycle, sampling, step
from tests.support.fake_daemon import bitmap, named_slots
from worker_client.requests import SamplingParams

GREEDY = SamplingParams()
SCHEDULER = config.SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64)
NO_DRAFTS = config.SpeculativeConfig()


@dataclass
class Sampled:
    """What one step brought for one slot."""

    token: int
    logprobs: list[tuple[int, float]] = field(default_factory=list)
    rank: int = 0
    earlier: list["Sampled"] = field(default_factory=list)
    """The slot's samples before this one."""


class WorkerDriver:
    """Drives a Worker as a daemon would: one message after the other, seqs rising."""

    def __init__(
        self,
        worker,
        num_blocks=64,
        block_size=16,
        scheduler=SCHEDULER,
        speculative=NO_DRAFTS,
    ):
        self.worker = worker
        self.speculative = speculative
        self.num_blocks = num_blocks
        self.cache = config.CacheConfig(block_size=block_size)
        self.scheduler = scheduler
        self.seq = 0
        self.free_blocks = list(range(1, num_blocks))
        self.blocks = {}
        self.computed = {}

    def ids(self):
        self.seq += 1
        return {"epoch": 1, "link": 1, "seq": self.seq}

    # Start-up.

    def init_device(self, **parallel):
        rendezvous = config.Rendezvous(link=1, place=None, rank=0, local_world_size=2)
        return self.worker.init_device(
            lifecycle.InitDevice(
                **self.ids(),
                parallel=config.ParallelConfig(**parallel),
                rendezvous=rendezvous,
                cache=self.cache,
                scheduler=self.scheduler,
            )
        )

    def load_model(self, model, cache=None, scheduler=None, **options):
        return self.worker.load_model(
            lifecycle.LoadModel(
                **self.ids(),
                model=config.ModelConfig(model=model, **options),
                scheduler=scheduler or self.scheduler,
                cache=cache or self.cache,
                graph=config.GraphConfig(),
                speculative=self.speculative,
            )
        )

    def plan(self, **changes):
        layers = self.worker.get_kv_cache_spec(lifecycle.GetKVCacheSpec(**self.ids())).layers
        size = self.cache.block_size
        drafts = [layer for layer in layers if layer.is_draft]
        layers = [layer for layer in layers if not layer.is_draft]
        bytes_per_token = sum(layer.bytes_per_token for layer in layers)
        group = kv_cache.KVCacheGroup(
            layer_names=tuple(layer.layer_name for layer in layers),
            block_size=size,
            sliding_window=None,
            dtype=layers[0].dtype,
        )
        planned = {
            "num_blocks": self.num_blocks,
            "block_size": size,
            "groups": (group,),
            "size_bytes": self.num_blocks * size * bytes_per_token,
            "draft_layers": tuple(layer.layer_name for layer in drafts),
            "draft_bytes": self.num_blocks * size * sum(each.bytes_per_token for each in drafts),
        }
        return kv_cache.KVCacheConfig(**(planned | changes))

    def allocate(self, plan=None):
        plans = (plan or self.plan(),)
        message = lifecycle.InitializeFromConfig(**self.ids(), kv_cache_configs=plans)
        self.worker.initialize_from_config(message)
        self.worker.initialize_cache(
            lifecycle.InitializeCache(**self.ids(), num_gpu_blocks=self.num_blocks)
        )

    def profile(self):
        return self.worker.determine_available_memory(
            lifecycle.DetermineAvailableMemory(**self.ids())
        )

    def warm_up(self):
        return self.worker.compile_or_warm_up_model(lifecycle.CompileOrWarmUpModel(**self.ids()))

    def serve(self, model, **options):
        """Everything between a loaded device and READY."""
        self.load_model(model, **options)
        self.profile()
        self.allocate()
        self.warm_up()
        return self

    def reset(self, to):
        self.worker.reset(lifecycle.Reset(**self.ids(), to=to))
        self.free_blocks = list(range(1, self.num_blocks))
        self.blocks, self.computed = {}, {}

    # Steps.

    def execute(
        self,
        scheduled,
        new=(),
        finished=(),
        resync=None,
        defer=(),
        several=None,
        drafts=None,
        **fields,
    ):
        """Runs one step and returns {slot: Sampled}. defer: slots that are sampled later, or True
        for all; several: {slot: samples}; drafts: {slot: tokens, -1 for the device's}, which
        `scheduled` counts.

        scheduled: {slot: tokens}; new: [(slot, token ids, SamplingParams)], where a fourth entry
        says (tokens already computed, their blocks)."""
        message, arrays = self.step(scheduled, new, finished, resync, defer)
        if several:
            pairs = int32s(v for slot in sorted(several) for v in (slot, several[slot]))
            message = msgspec.structs.replace(message, num_samples=pairs)
        if drafts:
            pairs = int32s(v for s in sorted(drafts) for v in (s, len(drafts[s])))
            own = [token for slot in sorted(drafts) for token in drafts[slot]]
            brought = int32s(own) if max(own) >= 0 else b""
            fields = {"num_drafts": pairs, "draft_token_ids": brought} | fields
        message = msgspec.structs.replace(message, **fields)
        return self.read(self.worker.execute_model(message, arrays))

    def step(self, scheduled, new=(), finished=(), resync=None, defer=()):
        later = scheduled if defer is True else defer
        for slot in finished:
            self.release(slot)
        for slot, tokens, _, *hit in new:
            computed, shared = hit[0] if hit else (0, [])
            self.blocks[slot], self.computed[slot] = list(shared), computed
            assert computed < len(tokens)
        rows = None
        if resync is not None:
            for slot in {*self.blocks} - {*resync} - {entry[0] for entry in new}:
                self.release(slot)
            rows = int32s(v for slot in sorted(resync) for v in self.row(slot))
        appended = []
        for slot, count in scheduled.items():
            self.computed[slot] += count
            needed = -(-self.computed[slot] // self.cache.block_size) - len(self.blocks[slot])
            taken = [self.free_blocks.pop() for _ in range(needed)]
            appended += [(slot, block_id) for block_id in taken]
            self.blocks[slot] += taken
        shared = [(slot, b) for slot, _, _, *hit in new for b in (hit[0][1] if hit else [])]
        message = step.ExecuteModel(
            **self.ids(),
            total_num_scheduled_tokens=sum(scheduled.values()),
            scheduled=bitmap(scheduled),
            num_scheduled_tokens=int32s(v for s in sorted(scheduled) for v in (s, scheduled[s])),
            new_block_slots=uint16s(slot for slot, _ in shared + appended),
            new_block_ids=int32s(block_id for _, block_id in shared + appended),
            finished=uint16s(finished),
            scheduled_new_reqs=tuple(
                step.NewRequestData(
                    slot=slot,
                    req_id=f"request-{slot}",
                    num_tokens=len(tokens),
                    num_prompt_tokens=len(tokens),
                    num_computed_tokens=hit[0][0] if hit else 0,
                    extensions=params.extensions(),
                )
                for slot, tokens, params, *hit in new
            ),
            resync=rows,
            deferred=bitmap(later) if later else None,
        )
        return message, [int32s(t for _, tokens, *_ in new for t in tokens)] if new else []

    def row(self, slot):
        """A settled row as resync states it: all known tokens but the newest are computed."""
        return slot, self.computed[slot], self.computed[slot] + 1, len(self.blocks[slot])

    def release(self, slot):
        self.free_blocks += self.blocks.pop(slot)
        del self.computed[slot]

    def sample(self, step_seq, masks=None, slots=None):
        """Samples a deferred step. masks: {slot: bool [V]}, or [n, V] for the newest n samples;
        slots: some of those that are left."""
        masks = {slot: np.atleast_2d(mask) for slot, mask in (masks or {}).items()}
        frames = [pack_masks(np.concatenate([*masks.values()]))] if masks else []
        named = [slot for slot, mask in masks.items() for _ in mask]
        own = sampling.GrammarMasks(slots=uint16s(named), indices=uint16s(range(len(named))))
        extensions = (own,) if masks else ()
        named = None if slots is None else bitmap(slots)
        message = step.SampleTokens(
            **self.ids(), step_seq=step_seq, slots=named, extensions=extensions
        )
        return self.read(self.worker.sample_tokens(message, frames))

    def read(self, pending):
        reply, frames = pending.result()
        slots = named_slots(reply.slots)
        tokens = np.frombuffer(reply.sampled_token_ids, "<i4").tolist()
        counts = reply.num_sampled or bytes([1]) * len(slots)
        samples = [Sampled(token) for token in tokens]
        for report in reply.extensions:
            width = report.width + 1
            ids = np.frombuffer(frames[0], "<i4").reshape(-1, width).tolist()
            values = np.frombuffer(frames[1], "<f4").reshape(-1, width).tolist()
            ranks = np.frombuffer(frames[2], "<i4").tolist()
            for index, own in enumerate(samples):
                own.logprobs = list(zip(ids[index], values[index], strict=True))
                own.rank = ranks[index]
        found = {}
        for slot, count in zip(slots, counts, strict=True):
            *earlier, found[slot] = samples[:count]
            found[slot].earlier = earlier
            samples = samples[count:]
        assert not samples
        return found

    def generate(self, slot, prompt, count, params=GREEDY, chunk=64):
        """Runs one request alone from admission to its count-th token, then finishes it."""
        new, tokens = [(slot, prompt, params)], []
        left = len(prompt)
        while left:
            size = min(chunk, left)
            sampled = self.execute({slot: size}, new)
            new, left = [], left - size
            assert bool(sampled) == (left == 0)
        tokens.append(sampled[slot].token)
        while len(tokens) < count:
            tokens.append(self.execute({slot: 1})[slot].token)
        self.execute({}, finished=[slot])
        return tokens


def int32s(values):
    return np.array(list(values), "<i4").tobytes()


def uint16s(values):
    return np.array(list(values), "<u2").tobytes()


def pack_masks(rows):
    allowed = np.array(rows)
    padded = np.zeros((len(rows), -(-allowed.shape[1] // 32) * 32), np.uint8)
    padded[:, : allowed.shape[1]] = allowed
    return np.packbits(padded, axis=1, bitorder="little").tobytes()
