"""vLLM's engine core and our scheduler, executor and translation on a modelled KV cache,
with random requests, aborts, preemptions and lost steps. `MODELLED_RUNS=200` runs each case so
often; a failure prints its seed, with which `MODELLED_SEED` begins."""

import dataclasses
import os
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from tokenizers import Tokenizer

from rpc_schema.kv_cache import BlockGroup
from tests.support.structured import EOS_TOKEN_ID as EOS
from tests.support.structured import VOCAB_SIZE, make_tokenizer
from tests.vllm.modelled_group import (
    POISON,
    Faults,
    ModelledDaemons,
    ModelledGroup,
    next_token,
)

RUNS = int(os.environ.get("MODELLED_RUNS", "1"))
FIRST_SEED = int(os.environ.get("MODELLED_SEED", "1"))
MAX_MODEL_LEN = 96
NUM_REQUESTS = 40
MAX_STEPS = 20_000
WITHOUT_WINDOW = [BlockGroup(4)]


@dataclass
class Asked:
    """A request, and what became of it."""

    prompt: list[int]
    max_tokens: int
    seed: int
    stop: list[int]
    priority: int = 0
    pattern: tuple[str, ...] = ()
    """The characters that its text may have at each place; empty: it has no grammar."""
    tokens: list[int] = field(default_factory=list)
    reason: str = ""
    is_aborted: bool = False

    def allowed(self, tokens: Sequence[int], texts: Sequence[str]) -> list[int] | None:
        """Return what its grammar allows after `tokens`; None: it has none. texts: of all
        tokens."""
        if not self.pattern:
            return None
        rest = self.pattern[sum(len(texts[token]) for token in tokens[len(self.prompt) :]) :]
        return [t for t, own in enumerate(texts) if begins(own, rest)] if rest else [EOS]

    def expected(self, texts: Sequence[str]) -> tuple[list[int], str]:
        """Return its tokens, and why it ends. texts: of all tokens."""
        tokens = list(self.prompt)
        if POISON in tokens:
            return [], "error"
        for _ in range(min(self.max_tokens, MAX_MODEL_LEN - len(self.prompt))):
            tokens.append(next_token(tokens, self.seed, self.allowed(tokens, texts)))
            if tokens[-1] in self.stop or (self.pattern and tokens[-1] == EOS):
                return tokens[len(self.prompt) :], "stop"
        return tokens[len(self.prompt) :], "length"


def begins(text: str, pattern: tuple[str, ...]) -> bool:
    """Return whether texts of a pattern may begin with this one."""
    fits = all(char in own for char, own in zip(text, pattern, strict=False))
    return 0 < len(text) <= len(pattern) and fits


def drawn(source: random.Random, poisoned: float = 0.0, patterned: float = 0.0) -> list[Asked]:
    """Draw requests. Most share their beginnings, at any length."""
    trunks = [[source.randrange(POISON + 1, VOCAB_SIZE) for _ in range(64)] for _ in range(3)]
    requests = []
    for _ in range(NUM_REQUESTS):
        shared = source.choice(trunks)[: source.choice([0, source.randrange(65), 16, 32])]
        own = [source.randrange(POISON + 1, VOCAB_SIZE) for _ in range(source.randrange(1, 20))]
        if source.random() < poisoned:
            own[source.randrange(len(own))] = POISON
        stop = [source.randrange(VOCAB_SIZE) for _ in range(source.choice([0, 20]))]
        seed, count = source.randrange(1, 1 << 40), source.choice([1, 2, 8, 40])
        requests.append(Asked([*shared, *own], count, seed, stop, source.randrange(3)))
        if source.random() < patterned:
            requests[-1].stop = []
            requests[-1].pattern = ("ab", "ab", "ab", "-", *["0123456789"] * source.randrange(1, 9))
        if source.random() < 0.3:  # the same prompt at about the same time
            requests.append(Asked([*shared, *own], count, source.randrange(1, 1 << 40), stop))
    return requests


class Server:
    """An engine core on modelled daemons."""

    def __init__(
        self,
        daemons: ModelledDaemons,
        path,
        pp: int = 1,
        drafts: int = 0,
        drafter: str = "ngram",
        **options,
    ) -> None:
        from vllm import EngineArgs
        from vllm.v1.engine.core import EngineCore

        from worker_client.vllm.hooks import executor

        def group(*_: object, **__: object) -> ModelledGroup:
            return ModelledGroup(daemons, pp, MAX_MODEL_LEN)

        chosen = {
            "block_size": daemons.groups[0].block_size,
            "dtype": "float32",
            "max_model_len": MAX_MODEL_LEN,
            "max_num_batched_tokens": 32,
            "max_num_seqs": 6,
            "num_gpu_blocks_override": daemons.num_blocks,
            "pipeline_parallel_size": pp,
            "skip_tokenizer_init": True,
            **options,
        }
        if daemons.host:
            chosen["kv_offloading_size"] = 1.0
        if drafts:
            own = {"model": str(path)} if drafter == "draft_model" else {}
            own |= {"method": drafter, "num_speculative_tokens": drafts}
            chosen["speculative_config"] = own
        config = EngineArgs(str(path), **chosen).create_engine_config()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(executor, "WorkerGroup", group)
            self.core = EngineCore(config, executor.WorkerDaemonExecutor, log_stats=False)
        self._group = self.core.model_executor._workers.group
        reset = self.core.scheduler.reset_prefix_cache

        def noticed(*args: bool, **kwargs: bool) -> bool:
            """The scheduler learns of a loss."""
            self._group.is_loss_unreported = False
            return reset(*args, **kwargs)

        self.core.scheduler.reset_prefix_cache = noticed

    def add(self, req_id: str, asked: Asked) -> None:
        """Add a request as vLLM's front end does."""
        from vllm import SamplingParams
        from vllm.sampling_params import StructuredOutputsParams
        from vllm.v1.engine import EngineCoreRequest

        params = SamplingParams(
            max_tokens=min(asked.max_tokens, MAX_MODEL_LEN - len(asked.prompt)),
            temperature=1.0,
            seed=asked.seed,
            stop_token_ids=asked.stop,
            ignore_eos=not asked.pattern,
            detokenize=False,
        )
        if asked.pattern:
            regex = "".join(f"[{each}]" for each in asked.pattern)
            params.structured_outputs = StructuredOutputsParams(regex=regex)
            params.structured_outputs._backend = "xgrammar"
            params.update_from_generation_config({}, EOS)
        request = EngineCoreRequest(
            request_id=req_id,
            prompt_token_ids=list(asked.prompt),
            mm_features=None,
            sampling_params=params,
            pooling_params=None,
            arrival_time=time.time(),
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
            priority=asked.priority,
        )
        added, wave = self.core.preprocess_add_request(request)
        while asked.pattern and not added.structured_output_request.is_grammar_ready:
            time.sleep(0.001)  # so that a seed always gives the same steps
        self.core.add_request(added, wave)

    def is_busy(self) -> bool:
        return bool(self.core.batch_queue) or self.core.scheduler.has_requests()

    def step(self, asked: dict[str, Asked]) -> None:
        """Let the engine core make a step; take its outputs."""
        outputs, _ = self.core.step_fn()
        for each in (outputs or {}).values():
            for output in each.outputs:
                own = asked[output.request_id]
                if own.is_aborted:
                    continue
                assert not own.reason, f"{output.request_id} ends twice"
                own.tokens += output.new_token_ids
                own.reason = "" if output.finish_reason is None else str(output.finish_reason)

    def check_nothing_is_left(self, asked: dict[str, Asked]) -> None:
        """Check that no block and no request is held any more."""
        pool = self.core.scheduler.kv_cache_manager.block_pool
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1
        assert not self.core.scheduler.requests
        known = self.core.model_executor._requests
        assert not any(known.find(req_id) for req_id in asked)

    def close(self) -> None:
        """End, as a server does whose daemons live on."""
        self.core.shutdown()


def serve(
    server: Server,
    asked: dict[str, Asked],
    source: random.Random,
    aborts: float,
    ends_after: int | None = None,
) -> bool:
    """Let requests arrive, and some be aborted, while the engine runs. Return True if
    all have ended, False if ends_after steps passed first."""
    waiting = list(asked)
    num_steps = 0
    while waiting or server.is_busy():
        if num_steps == ends_after:
            return False
        num_steps += 1
        assert num_steps < MAX_STEPS
        while waiting and source.random() < 0.5:
            req_id = waiting.pop(0)
            server.add(req_id, asked[req_id])
        if source.random() < aborts:
            running = [r for r, each in asked.items() if r not in waiting and not each.reason]
            for req_id in source.sample(running, min(len(running), 1)):
                asked[req_id].is_aborted = True
                if source.random() < 0.5:
                    server.core.abort_requests([req_id])
                else:
                    server.core.aborts_queue.put([req_id])
        server.step(asked)
    return True


def check(asked: dict[str, Asked], texts: Sequence[str] = ()) -> None:
    for req_id, each in asked.items():
        tokens, reason = each.expected(texts)
        if each.is_aborted:
            assert each.tokens == tokens[: len(each.tokens)], req_id
        else:
            assert (each.tokens, each.reason) == (tokens, reason), req_id


CASES = {
    "undisturbed": {},
    "no prefix cache": {"enable_prefix_caching": False},
    "few blocks": {"num_blocks": 30},
    "lost steps": {"faults": Faults(fails=0.04)},
    "pipeline": {"pp": 2, "faults": Faults(fails=0.04), "num_blocks": 60},
    "deep pipeline": {"pp": 4, "faults": Faults(fails=0.02)},
    "dead daemons": {"faults": Faults(fails=0.01, dies=0.02, expires=0.02), "num_blocks": 40},
    "priorities": {"scheduling_policy": "priority", "num_blocks": 30, "faults": Faults(0.02)},
    "NaN": {"poisoned": 0.25, "faults": Faults(fails=0.04)},
    "no numbers, few blocks": {"poisoned": 0.25, "num_blocks": 30, "pp": 2},
    "windows": {"groups": [BlockGroup(4), BlockGroup(4, 8)], "num_blocks": 60},
    "windows, lost steps": {
        "groups": [BlockGroup(8), BlockGroup(4, 12), BlockGroup(4, 12)],
        "num_blocks": 90,
        "faults": Faults(fails=0.03),
    },
    "grammars": {"patterned": 0.6, "faults": Faults(fails=0.02), "num_blocks": 60},
    "grammars, pipeline": {
        "patterned": 0.4,
        "poisoned": 0.1,
        "pp": 2,
        "num_blocks": 40,
        "faults": Faults(fails=0.02, dies=0.01, expires=0.01),
    },
    "drafts": {"drafts": 3, "num_blocks": 60},
    "drafts, few blocks": {"drafts": 5, "num_blocks": 30, "faults": Faults(fails=0.02)},
    "drafts, pipeline": {
        "drafts": 2,
        "pp": 2,
        "poisoned": 0.1,
        "num_blocks": 60,
        "faults": Faults(fails=0.02, dies=0.01, expires=0.01),
    },
    "drafts, windows": {
        "drafts": 3,
        "groups": [BlockGroup(8), BlockGroup(4, 12), BlockGroup(4, 12)],
        "num_blocks": 110,
        "faults": Faults(fails=0.02),
    },
    "drafts, grammars": {"drafts": 3, "patterned": 0.4, "pp": 2, "faults": Faults(fails=0.02)},
    "host tier": {"num_blocks": 30, "num_host_blocks": 100},
    "host tier, few slots": {"num_blocks": 30, "num_host_blocks": 12, "pp": 2},
    "host tier, priorities": {
        "num_blocks": 30,
        "num_host_blocks": 60,
        "scheduling_policy": "priority",
        "faults": Faults(fails=0.03, dies=0.01, expires=0.01),
    },
    "host tier, flips": {
        "num_blocks": 30,
        "num_host_blocks": 100,
        "pp": 2,
        "poisoned": 0.1,
        "faults": Faults(fails=0.02, flips=0.2),
    },
    "host tier, windows": {
        "groups": [BlockGroup(8), BlockGroup(4, 12), BlockGroup(4, 12)],
        "num_blocks": 90,
        "num_host_blocks": 300,
        "faults": Faults(fails=0.02, flips=0.02),
    },
    "host tier, drafts": {
        "drafts": 4,
        "num_blocks": 40,
        "num_host_blocks": 100,
        "faults": Faults(fails=0.02, dies=0.01, flips=0.1),
    },
    "host tier, draft model": {
        "drafts": 3,
        "drafter": "draft_model",
        "patterned": 0.3,
        "poisoned": 0.1,
        "pp": 2,
        "num_blocks": 60,
        "num_host_blocks": 60,
        "scheduling_policy": "priority",
        "faults": Faults(fails=0.02, flips=0.1),
    },
    "host tier, draft model, windows": {
        "drafts": 3,
        "drafter": "draft_model",
        "groups": [BlockGroup(8), BlockGroup(4, 12), BlockGroup(4, 12)],
        "num_blocks": 110,
        "num_host_blocks": 300,
        "faults": Faults(fails=0.02, flips=0.05),
    },
    "large steps": {"max_num_batched_tokens": 512, "max_num_seqs": 16, "num_blocks": 400},
}


def runs(name: str):
    """Yield a source and the daemons of each run of a case, with its other options."""
    for seed in range(FIRST_SEED, FIRST_SEED + RUNS):
        print(f"seed {seed}")
        options = dict(CASES[name])
        source = random.Random(f"{name} {seed}")
        daemons = ModelledDaemons(
            options.pop("groups", WITHOUT_WINDOW),
            options.pop("num_blocks", 100),
            source,
            options.pop("faults", Faults()),
            options.pop("num_host_blocks", 0),
        )
        yield source, daemons, options


@pytest.fixture(autouse=True)
def any_number_of_losses(monkeypatch):
    monkeypatch.setattr("worker_client.vllm.workers.MAX_IN_A_ROW", 1000)


@pytest.fixture(scope="module")
def model(checkpoint):
    """A model's directory, with a tokenizer."""
    from transformers import PreTrainedTokenizerFast

    path = checkpoint(vocab_size=VOCAB_SIZE, seed=42).path
    make_tokenizer(path)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(path / "tokenizer.json"), eos_token="<eos>"
    )
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def texts(model):
    """The text of each token; those without any are special."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    return [tokenizer.decode([token]) for token in range(VOCAB_SIZE)]


@pytest.mark.parametrize("name", CASES)
def test_each_read_finds_its_own_tokens(model, texts, name):
    losses = shared = loaded = invalid = 0
    for source, daemons, options in runs(name):
        requests = drawn(source, options.pop("poisoned", 0.0), options.get("patterned", 0.0))
        asked = {f"r{number}": each for number, each in enumerate(requests)}
        has_no_grammars = not options.pop("patterned", 0.0)
        of_seed = {each.seed: each for each in requests}
        daemons.allowed_next = lambda seed, tokens, own=of_seed: own[seed].allowed(tokens, texts)
        server = Server(daemons, model, skip_tokenizer_init=has_no_grammars, **options)
        serve(server, asked, source, aborts=0.05)
        check(asked, texts)
        server.check_nothing_is_left(asked)
        server.close()
        losses, shared = losses + daemons.losses, shared + daemons.num_shared
        loaded, invalid = loaded + daemons.num_loaded, invalid + daemons.num_invalid
        assert (daemons.num_accepted > 0) == (daemons.num_refused > 0) == ("drafts" in CASES[name])
    assert losses > 0 or "faults" not in CASES[name]
    assert (shared > 0) == CASES[name].get("enable_prefix_caching", True)
    assert (loaded > 0) == ("num_host_blocks" in CASES[name])
    assert (invalid > 0) == (CASES[name].get("faults", Faults()).flips > 0)


@pytest.mark.parametrize(
    "name",
    [
        "few blocks",
        "dead daemons",
        "NaN",
        "windows",
        "drafts, pipeline",
        "host tier, priorities",
        "host tier, drafts",
    ],
)
def test_next_server_begins_with_what_the_last_has_noted(model, monkeypatch, name):
    """Servers end at any time, and their requests with them."""
    monkeypatch.setattr("worker_client.vllm.prefix_notes.ROUND_S", 0.0)
    restored = 0
    for source, daemons, options in runs(name):
        requests = drawn(source, options.pop("poisoned", 0.0))
        while requests:
            now, requests = requests[:15], requests[15:]
            asked = {f"r{number}": each for number, each in enumerate(now)}
            restored += len(daemons.notes)
            server = Server(daemons, model, **options)
            ends_after = source.choice([None, source.randrange(40)])
            has_ended = serve(server, asked, source, 0.02, ends_after)
            if has_ended:
                check(asked)
            server.close()
    assert restored > 0


class Router:
    """What a KV-aware router knows of a server: its KV events in order."""

    def __init__(self, core) -> None:
        self.announced: set = set()
        self.cached: Counter = Counter()
        """Number of blocks with each announced hash that are still cached: vLLM may cache equal
        contents twice."""
        core.scheduler.kv_event_publisher.publish = self._read

    def _read(self, batch) -> None:
        for event in batch.events:
            kind = type(event).__name__
            if kind == "AllBlocksCleared":
                self.cached.clear()
                continue
            own = Counter((event.group_idx, each) for each in event.block_hashes)
            if kind == "BlockRemoved":
                assert own <= self.cached, "it removes blocks that it has never announced"
                self.cached -= own
                continue
            num_blocks = len(event.token_ids) // event.block_size
            if event.kv_cache_spec_sliding_window is None:
                parent = event.parent_block_hash
                assert parent is None or (event.group_idx, parent) in self.announced, parent
                assert len(event.block_hashes) == num_blocks
            assert len(event.block_hashes) <= num_blocks  # vLLM leaves out what a window has passed
            self.announced.update(own)
            self.cached += own


def cached_hashes(core):
    """Return what a router should know."""
    from vllm.v1.core.kv_cache_utils import (
        get_block_hash,
        get_group_id,
        maybe_convert_block_hash,
    )

    pool = core.scheduler.kv_cache_manager.block_pool
    hashes = [each.block_hash for each in pool.blocks]
    for further in pool.cached_block_hashes_by_block.values():  # of beginnings of a block
        hashes += further
    return Counter(
        (get_group_id(each), maybe_convert_block_hash(get_block_hash(each)))
        for each in hashes
        if each is not None
    )


@pytest.mark.parametrize(
    "name",
    [
        "few blocks",
        "dead daemons",
        "NaN",
        "drafts, pipeline",
        "host tier, flips",
        "host tier, draft model, windows",
    ],
)
def test_router_gets_a_consistent_stream_after_a_restart(model, monkeypatch, name):
    """The daemons have notes of an earlier server, which announced nothing."""
    from vllm.config import KVEventsConfig

    monkeypatch.setattr("worker_client.vllm.prefix_notes.ROUND_S", 0.0)
    events = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    for source, daemons, options in runs(name):
        requests = drawn(source, options.pop("poisoned", 0.0))
        for config in (None, events, events):
            asked = {f"r{number}": dataclasses.replace(e) for number, e in enumerate(requests)}
            for each in asked.values():
                each.tokens = []
            server = Server(daemons, model, kv_events_config=config, **options)
            router = None if config is None else Router(server.core)
            serve(server, asked, source, 0.02)
            if router is not None:
                assert router.cached == cached_hashes(server.core)
                assert router.announced
            else:
                assert daemons.notes
            server.close()
            check(asked)
