"""A draft model on the target's ranks: it agrees with a target of the same weights, whatever
becomes of the request, and changes no output where it disagrees."""

import json
import shutil

import msgspec
import numpy as np
import pytest
import safetensors.torch
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from worker_driver import GREEDY, WorkerDriver

from rpc_schema import lifecycle
from rpc_schema import weight_transfer as wt
from rpc_schema.config import ModelConfig, ParallelConfig, SpeculativeConfig, WorkerConfig
from rpc_schema.errors import CheckpointError, ConfigError
from worker_client.requests import SamplingParams
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
    two steps of a request, which goes on."""
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
    worker.init_weight_transfer_engine(wt.InitWeightTransferEngine(**ids(), engine=wt.DiskEngine()))
    start = wt.StartWeightUpdate(**ids(), format="checkpoint", target="draft_model")
    worker.start_weight_update(start)
    tokens += own.step(2)
    assert worker.describe().draft_weights().state == "updating"
    assert worker.describe().weights() == before
    worker.update_weights(wt.UpdateWeights(**ids(), source=wt.DiskSource(model="llama")))
    assert worker.finish_weight_update(wt.FinishWeightUpdate(**ids())).version == 1
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


def test_a_plan_counts_the_draft_model(model_root, small, llama):
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
