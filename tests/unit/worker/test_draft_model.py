"""A draft model on the target's ranks: it agrees with a target of the same weights, whatever
becomes of the request, and changes no output where it disagrees."""

import collections
import json
import shutil
from functools import partial

import msgspec
import numpy as np
import pytest
import safetensors.torch
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from worker_driver import GREEDY, SCHEDULER, WorkerDriver, bitmap, int32s

from rpc_schema import lifecycle
from rpc_schema import weight_transfer as wt
from rpc_schema.adoption import AdoptRequests
from rpc_schema.config import ModelConfig, ParallelConfig, SpeculativeConfig, WorkerConfig
from rpc_schema.errors import CheckpointError, ConfigError
from worker_client.requests import SamplingParams
from worker_daemon.drafting.model import ModelDrafter
from worker_daemon.plan.planning import plan_memory
from worker_daemon.worker.worker import Worker

MOST = 3
VOCAB = 151
NOISY = SamplingParams(temperature=1.1, top_k=40, top_p=0.95, seed=2**60 + 3)


def drafted(model="llama"):
    return SpeculativeConfig(method="draft_model", num_speculative_tokens=MOST, model=model)


def make_worker(root):
    return Worker("cpu", [root], lambda phase, seconds, done=0.0: None)


@pytest.fixture(scope="module")
def small(model_root, llama):
    """A model of the same vocabulary, with other weights and sizes."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2}
    config = LlamaConfig(
        **sizes, vocab_size=VOCAB, num_hidden_layers=1, num_key_value_heads=1, head_dim=8
    )
    torch.manual_seed(5)
    model = LlamaForCausalLM(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0.0, 0.2)
    model.save_pretrained(model_root / "small")


class Drafted:
    """A worker that drafts with a model, and one row of it."""

    def __init__(self, root, model, **options):
        self.worker = make_worker(root)
        self.driver = WorkerDriver(self.worker, block_size=64, speculative=drafted(model))
        self.driver.init_device()
        self.driver.serve("llama", **options)
        self.late = b""
        """Corrections that the next step brings."""

    def run(self, slot, prompt, params, count, chunk=64):
        """Return what a request gains in steps with drafts, and its number of steps."""
        new, left, found = [(slot, prompt, params)], len(prompt), {}
        while left:
            size = min(chunk, left)
            found = self.driver.execute({slot: size}, new)
            new, left = [], left - size
        tokens, steps = [found[slot].token], 0
        while len(tokens) < count:
            tokens += self.step(slot)
            steps += 1
        return tokens[:count], steps

    def step(self, slot):
        found = self.driver.execute(
            {slot: 1 + MOST}, drafts={slot: [-1] * MOST}, corrections=self.late
        )[slot]
        own = [each.token for each in (*found.earlier, found)]
        missing = 1 + MOST - len(own)
        self.driver.computed[slot] -= missing
        self.late = np.array([slot, missing] if missing else [], "<i4").tobytes()
        return own

    def finish(self, slot):
        self.driver.execute({}, finished=[slot])
        self.late = b""


@pytest.fixture(scope="module")
def twin(model_root, llama):
    made = Drafted(model_root, "llama")
    yield made
    made.worker.close()


@pytest.mark.parametrize("params", [GREEDY, NOISY], ids=["greedy", "random"])
@pytest.mark.parametrize("chunk", [64, 5])
def test_a_model_agrees_with_itself(twin, prompts, params, chunk):
    """So every draft is accepted: the draft model has seen what the target has, and samples with
    the same noise."""
    prompt = prompts([13], seed=71)[0]
    alone = twin.driver.generate(2, prompt, 41, params)
    tokens, steps = twin.run(2, prompt, params, 41, chunk)
    twin.finish(2)
    assert tokens == alone
    assert steps == 10


@pytest.mark.parametrize("params", [GREEDY, NOISY], ids=["greedy", "random"])
def test_another_model_changes_nothing(model_root, small, llama, prompts, params):
    other = Drafted(model_root, "small")
    prompt = prompts([9], seed=73)[0]
    alone = other.driver.generate(1, prompt, 40, params)
    tokens, steps = other.run(1, prompt, params, 40)
    assert tokens == alone
    assert steps > 12, "it can hardly be right"
    other.worker.close()


def test_rows_do_not_disturb_each_other(twin, prompts):
    """Rows that were used before, beside others, and decodes without drafts in between."""
    texts = dict(zip((0, 1, 3), prompts([9, 20, 5], seed=75), strict=True))
    alone = {slot: twin.driver.generate(slot, text, 30, NOISY) for slot, text in texts.items()}
    new = [(slot, text, NOISY) for slot, text in texts.items()]
    found = twin.driver.execute({slot: len(text) for slot, text in texts.items()}, new)
    gained = {slot: [each.token] for slot, each in found.items()}
    for count in (MOST, 1, 0, 2, 0, 0, MOST):
        drafts = {slot: [-1] * count for slot in texts} if count else None
        found = twin.driver.execute(dict.fromkeys(texts, 1 + count), drafts=drafts)
        for slot, newest in found.items():
            gained[slot] += [each.token for each in (*newest.earlier, newest)]
    for slot in texts:
        assert len(gained[slot]) == 1 + 2 * (1 + MOST) + 2 + 3 + 3, "a draft was refused"
        assert gained[slot] == alone[slot][: len(gained[slot])]
        twin.finish(slot)


def test_a_cached_prefix_holds_for_the_draft_model_too(twin, prompts):
    """The second request computes one block less, and its drafts are right all the same."""
    prompt = prompts([75], seed=77)[0]
    first = [*twin.driver.execute({4: 64}, [(4, prompt, GREEDY)])]
    assert not first
    shared = twin.driver.blocks[4][:1]
    twin.driver.execute({4: 11})
    alone = twin.driver.generate(5, prompt, 17)
    hit = (5, prompt, GREEDY, (64, shared))
    tokens = [twin.driver.execute({5: 11}, [hit])[5].token]
    while len(tokens) < 17:
        own = twin.step(5)
        assert len(own) == 1 + MOST
        tokens += own
    assert tokens == alone
    twin.driver.blocks[5] = twin.driver.blocks[5][1:]
    for slot in (4, 5):
        twin.finish(slot)


@pytest.fixture
def passes(monkeypatch):
    """The number of tokens in each forward pass of a draft model from now on."""
    sizes, forward = [], ModelDrafter._forward

    def note(drafter, token_ids, positions, metadata):
        sizes.append(token_ids.shape[0])
        return forward(drafter, token_ids, positions, metadata)

    monkeypatch.setattr(ModelDrafter, "_forward", note)
    return sizes


def test_a_draft_model_that_rests_computes_nothing(twin, prompts, passes):
    """Then all that it has missed, in one pass, and K tokens of each row."""
    texts = dict(zip((0, 3, 5), prompts([9, 20, 5], seed=81), strict=True))
    twin.driver.execute(
        {slot: len(text) for slot, text in texts.items()},
        [(slot, text, GREEDY) for slot, text in texts.items()],
        skip_drafts=True,
    )
    assert passes == [34], "prompts are followed"
    passes.clear()
    for _ in range(11):
        twin.driver.execute(dict.fromkeys(texts, 1), skip_drafts=True)
    assert passes == []
    twin.driver.execute(dict.fromkeys(texts, 1))
    assert passes == [3 * 12, 3, 3, 3]
    for _ in range(2):
        found = twin.driver.execute(
            dict.fromkeys(texts, 1 + MOST), drafts=dict.fromkeys(texts, [-1] * MOST)
        )
        assert [len(each.earlier) for each in found.values()] == [MOST] * 3
    twin.driver.execute({}, finished=[*texts])


def test_a_row_that_lacks_many_tokens_catches_up_step_by_step(twin, prompts, passes):
    """A pass has max_num_batched_tokens at most, first for the rows that lack the fewest."""
    texts = dict(zip((1, 2), prompts([9, 12], seed=83), strict=True))
    for slot, text in texts.items():
        twin.driver.execute({slot: len(text)}, [(slot, text, GREEDY)], skip_drafts=True)
    for _ in range(63):
        twin.driver.execute({1: 1}, skip_drafts=True)
    for _ in range(6):
        twin.driver.execute(dict.fromkeys(texts, 1), skip_drafts=True)
    passes.clear()
    twin.driver.execute(dict.fromkeys(texts, 1))
    assert passes[0] == 64  # 7 of one, 57 of 70 of the other
    drafts = {slot: [-1] * MOST for slot in texts}
    found = twin.driver.execute(dict.fromkeys(texts, 1 + MOST), drafts=drafts, skip_drafts=True)
    assert len(found[2].earlier) == MOST > len(found[1].earlier)
    missing = MOST - len(found[1].earlier)
    twin.driver.computed[1] -= missing
    passes.clear()
    twin.driver.execute(
        dict.fromkeys(texts, 1), corrections=int32s([1, missing]), settled=bitmap(texts)
    )
    assert passes[0] == 13 + 1 + MOST + 1 + 1, "refused drafts count until it has caught up"
    found = twin.driver.execute(dict.fromkeys(texts, 1 + MOST), drafts=drafts)
    assert [len(each.earlier) for each in found.values()] == [MOST] * 2
    twin.driver.execute({}, finished=[1, 2])


def test_a_prefix_that_was_filled_at_rest_is_caught_up_where_it_lacks(
    model_root, llama, prompts, passes
):
    """Blocks of 16 tokens: those of a row that has caught up are whole again, whoever has them."""
    own = Drafted(model_root, "llama")
    driver = own.driver
    driver.cache = msgspec.structs.replace(driver.cache, block_size=16)
    driver.reset("DEVICE_READY")
    driver.serve("llama")
    text = prompts([21], seed=85)[0]
    text.append(driver.execute({0: 21}, [(0, text, GREEDY)], skip_drafts=True)[0].token)

    def rest(slot, count):
        for _ in range(count):
            text.append(driver.execute({slot: 1}, skip_drafts=True)[slot].token)

    rest(0, 11)
    passes.clear()
    driver.execute({5: 1}, [(5, text, GREEDY, (32, driver.blocks[0][:2]))])
    assert passes == [32 - 16 + 1, 1, 1, 1]
    rest(0, 19)
    hit = (1, text, GREEDY, (48, driver.blocks[0][:3]))
    text.append(driver.execute({1: 4}, [hit], skip_drafts=True)[1].token)
    rest(1, 20)
    passes.clear()
    driver.execute({0: 1})
    assert passes == [30 + 1, 1, 1, 1], "it has lacked what it had computed at rest"
    last = driver.blocks[1][:4]
    for slot, steps in ((2, [9, 16 + 9]), (1, [72 - 16 + 1]), (3, [9])):
        passes.clear()
        if slot == 1:
            driver.execute({1: 1})
        else:
            driver.execute({slot: len(text) - 64}, [(slot, text, GREEDY, (64, last))])
        assert passes == [*steps, 1, 1, 1]
        found = driver.execute({slot: 1 + MOST}, drafts={slot: [-1] * MOST}, skip_drafts=True)
        assert len(found[slot].earlier) == MOST
    own.worker.close()


def test_rows_with_bounds_catch_up_too(twin, prompts, passes):
    """Drafts of a driver were refused, and neither rank nor driver knows how many: the rest of a
    few steps is caught up at once, a longer one once the counts are exact."""
    prompt = prompts([9], seed=87)[0]
    alone = twin.driver.generate(6, prompt, 60)
    found = twin.driver.execute({6: 9}, [(6, prompt, GREEDY)])
    drafts = {6: [*alone[1:3], (alone[3] + 1) % VOCAB]}
    found = twin.driver.execute({6: 1 + MOST}, drafts=drafts)
    assert [len(each.earlier) for each in found.values()] == [2]
    late = int32s([6, 1])
    for num_rests, fields in ((4, {}), (10, {"settled": bitmap([6])})):
        for _ in range(num_rests):
            twin.driver.execute({6: 1}, skip_drafts=True)
        passes.clear()
        if fields:
            twin.driver.execute({6: 1})
            assert passes == [1] * MOST, "more than the tokens that the row certainly has"
            twin.driver.computed[6] -= 1
            fields["corrections"] = late
        passes.clear()
        twin.driver.execute({6: 1}, **fields)
        assert passes[0] == num_rests + 1 + bool(fields)
        found = twin.driver.execute({6: 1 + MOST}, drafts={6: [-1] * MOST}, skip_drafts=True)
        assert len(found[6].earlier) == MOST
    twin.driver.execute({}, finished=[6])


@pytest.mark.parametrize("seed", range(2))
def test_after_a_rest_every_draft_is_accepted(model_root, llama, prompts, monkeypatch, seed):
    """Whatever rows have been through meanwhile, prefixes that were filled at rest among them."""
    rng = np.random.default_rng([84, seed])
    rests = Rests(model_root, prompts, rng)
    events = (rests.preempt, rests.fork, rests.adopt, partial(rests.fail, monkeypatch))
    for number in range(6):
        for _ in range(int(rng.integers(1, 30))):
            rests.step(skips=True)
        for _ in range(8):
            events[int(rng.integers(len(events)))]()
            rests.step(skips=rng.random() < 0.3)
        if number == 3:
            rests.relink()
    assert rests.num_accepted > 100 and len(rests.num_of) == 5, rests.num_of
    rests.check_tokens()


class Rests:
    """Random rows of a worker whose draft model is the target's twin. All steps leave exact counts:
    each draft is accepted, or was made while the row's blocks had no room for it."""

    def __init__(self, root, prompts, rng):
        self._worker, self._prompts, self._rng = make_worker(root), prompts, rng
        scheduler = msgspec.structs.replace(SCHEDULER, max_num_batched_tokens=1024)
        self._driver = WorkerDriver(
            self._worker, 1500, scheduler=scheduler, speculative=drafted("llama")
        )
        self._driver.init_device()
        self._driver.serve("llama")
        self._rows, self._new = {}, []
        self._fields, self._made, self._bound = {}, {}, set()
        self._uses = collections.Counter()
        self.num_accepted = 0
        self.num_of = collections.Counter()
        for slot in range(4):
            self._begin(slot)

    def _begin(self, slot, text=None, *hit):
        """Let a row begin with the next step: one that resumes or a new one."""
        if text is None:
            size = int(self._rng.integers(3, 40))
            text = (*self._prompts([size], seed=int(self._rng.integers(9999))), NOISY, [])
        self._rows[slot] = prompt, params, output = text
        self._new.append((slot, prompt + output, params, *hit))
        self._uses.update(block for _, blocks in hit for block in blocks)

    def _free_slot(self):
        return next(slot for slot in range(8) if slot not in self._rows)

    def _prefix(self, slot):
        """A row's full blocks, as a hit of them."""
        size = self._driver.cache.block_size
        count = (self._driver.computed[slot] - 1) // size
        return count * size, self._driver.blocks[slot][:count]

    def step(self, *, skips):
        """Let all rows decode, with drafts where the device has made some, and new ones begin."""
        driver, new, self._new = self._driver, self._new, []
        scheduled = dict.fromkeys(self._rows, 1)
        for slot, tokens, _, *hit in new:
            scheduled[slot] = len(tokens) - (hit[0][0] if hit else 0)
        starting = {slot for slot, *_ in new}
        drafts = {}
        for slot, room in self._made.items():
            if slot in self._rows and slot not in starting and room and self._rng.random() < 0.7:
                drafts[slot] = [-1] * room
        fields, self._fields, self._made = self._fields, {}, {}
        if "resync" in fields:
            drafts = {}
        was_bound, self._bound = self._bound, {*drafts}
        settled = (was_bound & {*self._rows}) - starting - {*drafts}
        found = driver.execute(
            {slot: count + len(drafts.get(slot, ())) for slot, count in scheduled.items()},
            new,
            drafts=drafts,
            settled=bitmap(settled) if settled else b"",
            skip_drafts=skips,
            **fields,
        )
        for slot, newest in found.items():
            assert len(newest.earlier) == len(drafts.get(slot, ())), (slot, drafts)
            self.num_accepted += len(newest.earlier)
            self._rows[slot][2].extend(each.token for each in (*newest.earlier, newest))
            length, room = driver.computed[slot] + 1, len(driver.blocks[slot])
            if not skips:
                self._made[slot] = min(MOST, room * driver.cache.block_size - length + 1)
        for slot in [s for s, (prompt, _, own) in self._rows.items() if len(prompt + own) > 110]:
            self._end(slot)
            self._begin(self._free_slot())

    def _end(self, slot):
        """Note that a row ends with the next step, which frees the blocks that no other row has;
        return its request."""
        kept = [block for block in self._driver.blocks[slot] if self._uses[block]]
        self._uses.subtract(kept)
        self._driver.blocks[slot] = [b for b in self._driver.blocks[slot] if b not in kept]
        self._fields["finished"] = [*self._fields.get("finished", ()), slot]
        self._bound.discard(slot)
        return self._rows.pop(slot)

    def preempt(self):
        """Let a request resume in another row, with the blocks that it has filled."""
        slot = int(self._rng.choice([*self._rows]))
        if slot in {own for own, *_ in self._new}:
            return
        hit, target = self._prefix(slot), self._free_slot()
        self._uses.update(hit[1])
        text = self._end(slot)
        self._uses.subtract(hit[1])
        self._begin(target, text, hit)
        self.num_of["preempt"] += 1
        self.step(skips=bool(self._rng.random() < 0.5))

    def fork(self):
        """Replace a request by one whose prompt is the text of another, which goes on."""
        first, second = (int(slot) for slot in self._rng.permutation([*self._rows])[:2])
        if {first, second} & {own for own, *_ in self._new}:
            return
        hit = self._prefix(first)
        self._end(second)
        prompt, params, output = self._rows[first]
        self._begin(self._free_slot(), (prompt + output, params, []), hit)
        self.num_of["fork"] += 1

    def fail(self, monkeypatch):
        """Let a step of a new request fail."""
        if self._new or self._fields or self._bound:
            return
        slot, driver = self._free_slot(), self._driver
        with monkeypatch.context() as patch:
            patch.setattr(self._worker._model.stage, "forward", lambda *args: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                driver.execute({slot: 5}, [(slot, [1, 2, 3, 4, 5], GREEDY)])
        self._fields["resync"] = {*self._rows}
        self.num_of["fail"] += 1

    def adopt(self):
        """Let another driver adopt the rows."""
        if self._new or self._fields or self._bound:
            return
        self._worker.on_attach(keep_requests=True)
        self._worker.adopt_requests(AdoptRequests(**self._driver.ids()))
        self._fields["resync"], self._made = {*self._rows}, {}
        self.num_of["adopt"] += 1

    def relink(self):
        """Let the drafter forget what it has computed, as with a new link."""
        self._worker._serving.runner.inputs.restart_drafts()
        self._made = {}
        self.num_of["relink"] += 1

    def check_tokens(self):
        """Compare the last outputs with those of steps without drafts."""
        self._worker.on_attach()
        alone = WorkerDriver(self._worker, scheduler=self._driver.scheduler)
        for prompt, params, output in self._rows.values():
            if output:
                assert output == alone.generate(0, prompt, len(output), params, chunk=1024)
        self._worker.close()


def test_blocks_that_a_row_lacks_cost_drafts_alone(model_root, llama, prompts):
    """The driver gives no blocks beyond a step's tokens: drafts there see nothing of each other."""
    own = Drafted(model_root, "llama")
    own.driver.cache = msgspec.structs.replace(own.driver.cache, block_size=16)
    own.driver.reset("DEVICE_READY")
    own.driver.serve("llama")
    prompt = prompts([14], seed=79)[0]
    alone = own.driver.generate(0, prompt, 60, NOISY)
    tokens, steps = own.run(0, prompt, NOISY, 60)
    assert tokens == alone
    assert 15 <= steps < 30
    own.worker.close()


def test_the_draft_model_survives_sleep_and_is_reloaded(model_root, small, llama, prompts):
    """Level 2 drops the weights, which are then loaded again; the draft model's are kept."""
    shutil.copytree(model_root / "llama", model_root / "twin")
    own = Drafted(model_root, "twin", enable_sleep_mode=True)
    prompt = prompts([13], seed=71)[0]
    tokens, steps = own.run(2, prompt, GREEDY, 41)
    assert steps == 10
    ids = own.driver.ids
    for level in (1, 2):
        own.finish(2)
        own.worker.sleep(lifecycle.Sleep(**ids(), level=level))
        own.worker.wake_up(lifecycle.WakeUp(**ids()))
        if level == 2:
            own.worker.reload_weights(wt.ReloadWeights(**ids()))
        assert own.run(2, prompt, GREEDY, 41) == (tokens, 10)
    own.finish(2)
    (weights,) = (model_root / "twin").glob("*.safetensors")
    halved = {name: 0.5 * tensor for name, tensor in safetensors.torch.load_file(weights).items()}
    safetensors.torch.save_file(halved, weights, metadata={"format": "pt"})
    own.worker.reload_weights(wt.ReloadWeights(**ids()))
    again, steps = own.run(2, prompt, GREEDY, 41)
    assert again == tokens
    assert steps > 12, "the draft model is still the old one"
    own.worker.close()


def test_an_update_of_the_draft_model_changes_no_token(model_root, small, llama, prompts):
    """It makes a model that has the target's shape, and drafts badly, the target's twin: between
    two steps of a request, which goes on. What another has is then computed again."""
    shutil.copytree(model_root / "llama", model_root / "drifted")
    (weights,) = (model_root / "drifted").glob("*.safetensors")
    halved = {name: 0.5 * tensor for name, tensor in safetensors.torch.load_file(weights).items()}
    safetensors.torch.save_file(halved, weights, metadata={"format": "pt"})
    own = Drafted(model_root, "drifted")
    ids, worker = own.driver.ids, own.worker
    before = worker.describe().weights()
    files = worker.describe().draft_weights().identity
    assert files.content and files.content != before.identity.content
    prompt = prompts([13], seed=71)[0]
    alone = own.driver.generate(2, prompt, 41)
    tokens, steps = own.run(2, prompt, GREEDY, 20)
    assert steps > 6, "it can hardly be right"
    own.driver.execute({4: 13}, [(4, prompt, GREEDY)])
    worker.init_weight_transfer_engine(wt.InitWeightTransferEngine(**ids(), engine=wt.DiskEngine()))
    start = wt.StartWeightUpdate(**ids(), format="checkpoint", target="draft_model")
    worker.start_weight_update(start)
    tokens += own.step(2)
    assert worker.describe().draft_weights().state == "updating"
    assert worker.describe().weights() == before
    worker.update_weights(wt.UpdateWeights(**ids(), source=wt.DiskSource(model="llama")))
    assert worker.finish_weight_update(wt.FinishWeightUpdate(**ids())).version == 1
    own.driver.execute({4: 1})
    found = own.driver.execute({4: 1 + MOST}, drafts={4: [-1] * MOST})
    assert len(found[4].earlier) == MOST
    while len(tokens) < 41:
        tokens += own.step(2)
    assert tokens[:41] == alone
    own.finish(2)
    assert own.run(2, prompt, GREEDY, 41) == (alone, 10), "it is the target's twin now"
    own.finish(2)
    after = worker.describe()
    assert (after.draft_weights().version, after.draft_weights().state) == (1, "whole")
    assert after.draft_weights().identity.content != files.content
    assert after.weights() == before
    # A reload reads both again.
    worker.reload_weights(wt.ReloadWeights(**ids()))
    again = worker.describe().draft_weights()
    assert (again.version, again.identity.content) == (2, files.content)
    worker.close()


def test_an_update_of_no_draft_model_is_refused(serving):
    start = wt.StartWeightUpdate(**serving.ids(), format="checkpoint", target="draft_model")
    with pytest.raises(ConfigError, match="without a draft model") as caught:
        serving.worker.start_weight_update(start)
    assert (caught.value.field, caught.value.value) == ("target", "draft_model")
    assert serving.worker.describe().weights().state == "whole"


def test_a_plan_counts_the_draft_model(model_root, small, llama, twin):
    worker = make_worker(model_root)
    driver = WorkerDriver(worker, speculative=drafted("small"))
    driver.init_device()
    loaded = driver.load_model("llama")
    config = WorkerConfig(
        parallel=ParallelConfig(),
        model=ModelConfig(model="llama"),
        scheduler=driver.scheduler,
        cache=driver.cache,
        speculative=driver.speculative,
    )
    (rank,) = plan_memory(config, 1 << 32, [model_root]).ranks
    texts = twin.worker._serving.runner.inputs.drafter._texts.table
    texts_bytes = sum(each.nbytes for each in (texts.tokens, texts.lengths, texts.scratch))
    brought = SpeculativeConfig(method="driver", num_speculative_tokens=MOST)
    (other,) = plan_memory(
        msgspec.structs.replace(config, speculative=brought), 1 << 32, [model_root]
    ).ranks
    assert rank.step_estimate_bytes == other.step_estimate_bytes + texts_bytes
    assert rank.weights_bytes == loaded.model_memory_bytes
    plan = driver.plan()
    assert rank.kv_block_bytes * plan.num_blocks == plan.size_bytes + plan.draft_bytes
    with pytest.raises(ConfigError, match="another size"):
        driver.allocate(driver.plan(draft_bytes=64))
    with pytest.raises(ConfigError, match="other further pages"):
        driver.allocate(driver.plan(draft_layers=()))
    worker.close()


def test_what_cannot_draft_is_refused(model_root, llama, qwen, small, copy_config, prompts):
    copy_config("no-weights")
    shutil.copytree(model_root / "small", model_root / "short")
    short = model_root / "short" / "config.json"
    short.write_text(json.dumps(json.loads(short.read_text()) | {"max_position_embeddings": 64}))
    cases = [
        ("nowhere", CheckpointError, "no such directory"),
        ("../elsewhere", ConfigError, "outside"),
        ("no-weights", CheckpointError, "the draft model"),
        ("qwen", ConfigError, "vocabulary has 97 tokens, the model's 151"),
        ("short", ConfigError, "made for 64 tokens"),
    ]
    worker = make_worker(model_root)
    for name, kind, words in cases:
        driver = WorkerDriver(worker, speculative=drafted(name))
        driver.init_device()
        with pytest.raises(kind, match=words) as refused:
            driver.load_model("llama")
        assert refused.value.field == "speculative.model", refused.value
        assert refused.value.value == name
        driver.reset("CREATED")
    driver = WorkerDriver(worker, speculative=drafted(None))
    driver.init_device()
    with pytest.raises(ConfigError, match="name its directory"):
        driver.load_model("llama")
    worker.close()
