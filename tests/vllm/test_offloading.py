"""vLLM's --kv-offloading-size on daemons: prompts that begin with blocks in the daemons' host
memory get the same tokens as transformers', whatever became of the blocks meanwhile."""

import contextlib
import os
import random
import sys

import pytest

from tests.support.checkpoints import NearTie, prompts
from tests.support.flipping_daemon import FlippingDaemons
from tests.support.serving import greedy_request
from tests.support.tiered_waves import HOST_BYTES, NUM_GPU_BLOCKS, Waves
from tests.support.window_models import MODELS, WINDOW
from tests.vllm.models import merged, write_adapter
from tests.vllm.test_drafts import counted, drafting_by
from tests.vllm.test_parity import run_vllm, tokens_of
from worker_client.vllm.refusals import DaemonsUnusable

CONFIG = {
    "block_size": 4,
    "kv_offloading_size": HOST_BYTES / (1 << 30),
    "max_model_len": 96,
    "max_num_batched_tokens": 32,
    "num_gpu_blocks_override": NUM_GPU_BLOCKS,
}
PYTHON = os.environ.get("DAEMON_PYTHON", sys.executable)


def tiers(llm):
    """The host tier of each rank."""
    group = llm.llm_engine.model_executor._workers.group
    return [status.host_tier for status in group.get_status()]


def run_waves(llm, waves):
    outputs = {}
    for wave in waves:
        outputs |= run_vllm(llm, wave)
    return outputs


def assert_right(outputs, model, requests, seed):
    """Compare with transformers' tokens, where rounding cannot change them."""
    found, num_clear = tokens_of(outputs), 0
    for request in requests:
        with contextlib.suppress(NearTie):
            expected = model.greedy(request.prompt.tolist(), request.max_tokens)
            assert found[request.id] == expected, (request.id, seed)
            num_clear += 1
    assert num_clear > 0, seed


@pytest.fixture
def waves():
    made = Waves(random.randrange(1 << 30))
    print(f"seed {made.seed}")
    return made


@pytest.mark.parametrize(("pp", "tp"), [(1, 1), (2, 1), (1, 2)])
def test_loaded_prefixes_give_the_same_tokens(engine, checkpoint, waves, pp, tp):
    model = checkpoint()
    size = pp * tp * HOST_BYTES / (1 << 30)
    with engine(model.path, pp, tp, **{**CONFIG, "kv_offloading_size": size}) as llm:
        outputs = run_waves(llm, waves.requests)
        found = tiers(llm)
    assert_right(outputs, model, waves.flat, waves.seed)
    assert all(tier.num_invalid == 0 < tier.num_loaded for tier in found), (waves.seed, found)
    assert all(tier.size_bytes == HOST_BYTES for tier in found)


def test_windows(engine, checkpoint, waves):
    model = checkpoint(**MODELS["mixed"], sliding_window=WINDOW, seed=22)
    config = {
        **CONFIG,
        "num_gpu_blocks_override": 150,
        "kv_offloading_size": HOST_BYTES / (1 << 29),
    }
    with engine(model.path, **config) as llm:
        outputs = run_waves(llm, waves.requests)
        (found,) = tiers(llm)
    assert_right(outputs, model, waves.flat, waves.seed)
    assert found.num_invalid == 0 < found.num_loaded, (waves.seed, found)


def test_drafts_and_preemptions(engine, checkpoint, waves):
    model = checkpoint()
    drafts = {"method": "ngram", "num_speculative_tokens": 3}
    config = {**CONFIG, "num_gpu_blocks_override": 27, "scheduling_policy": "priority"}
    with engine(model.path, speculative_config=drafts, **config) as llm:
        outputs = run_waves(llm, waves.requests)
        (found,) = tiers(llm)
    assert_right(outputs, model, waves.flat, waves.seed)
    assert found.num_invalid == 0 < found.num_loaded, (waves.seed, found)


@pytest.mark.parametrize(
    ("pp", "fields", "num_blocks"),
    [(2, {}, 32), (1, {**MODELS["mixed"], "sliding_window": WINDOW, "seed": 22}, 150)],
)
def test_a_draft_models_blocks_come_back_too(engine, checkpoint, waves, pp, fields, num_blocks):
    """The model drafts for itself: behind a loaded prefix too, its drafts are right."""
    model = checkpoint(**fields)
    offloading = {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"cpu_bytes_to_use": 4 * pp * HOST_BYTES},
    }
    config = {
        **CONFIG,
        "kv_offloading_size": None,
        "kv_transfer_config": offloading,
        "num_gpu_blocks_override": num_blocks,
        "speculative_config": drafting_by(model.path),
        "disable_log_stats": False,
    }
    with engine(model.path, pp, **config) as llm:
        outputs = run_waves(llm, waves.requests[:1])
        before = counted(llm)
        outputs |= run_waves(llm, waves.requests[1:])
        found, after = tiers(llm), counted(llm)
    assert_right(outputs, model, waves.flat, waves.seed)
    assert all(tier.num_invalid == 0 < tier.num_loaded for tier in found), (waves.seed, found)
    names = (f"spec_decode_num_{each}_tokens" for each in ("draft", "accepted"))
    drafted, taken = (after[name] - before[name] for name in names)
    assert drafted >= taken > 0.9 * drafted > 0, (waves.seed, drafted, taken)


@pytest.fixture(scope="module")
def flipping(model_root, tmp_path_factory):
    """Two daemons whose host memory changes bits when told."""
    directory = tmp_path_factory.mktemp("flips")
    with FlippingDaemons(2, model_root, directory, python=PYTHON) as daemons:
        yield daemons


@pytest.mark.parametrize(("pp", "tp"), [(2, 1), (1, 2)])
def test_changed_bits_cost_their_requests_a_computation(
    engine, flipping, checkpoint, waves, pp, tp
):
    model = checkpoint()
    for flips in flipping.flips:
        flips.put(one_of=4, seed=waves.seed)
    before = [flips.num_done for flips in flipping.flips]
    config = {**CONFIG, "kv_offloading_size": 2 * HOST_BYTES / (1 << 30)}
    with engine(model.path, pp, tp, on=flipping.endpoints, **config) as llm:
        outputs = run_waves(llm, waves.requests)
        found = tiers(llm)
    num_done = [f.num_done - n for f, n in zip(flipping.flips, before, strict=True)]
    assert_right(outputs, model, waves.flat, waves.seed)
    assert [tier.num_invalid for tier in found] == num_done, waves.seed
    assert sum(num_done) > 0, waves.seed


def test_a_replaced_daemon_has_nothing_to_load(engine, flipping, checkpoint, waves):
    model = checkpoint()
    for flips in flipping.flips:
        flips.put(one_of=0, seed=0)
    config = {**CONFIG, "kv_offloading_size": 2 * HOST_BYTES / (1 << 30)}
    with engine(model.path, 2, 1, on=flipping.endpoints, **config) as llm:
        run_waves(llm, waves.requests[:-1])
        os.kill(flipping.pids[1], 9)
        flipping.restart_dead()
        outputs = run_waves(llm, waves.requests)
        found = tiers(llm)
    assert_right(outputs, model, waves.flat, waves.seed)
    assert [tier.num_invalid for tier in found] == [0, 0], waves.seed
    assert found[1].num_loaded > 0, waves.seed


def test_the_next_server_loads_what_an_earlier_one_has_left(engine, checkpoint, waves):
    model = checkpoint()
    with engine(model.path, **CONFIG) as llm:
        run_waves(llm, waves.requests)
        (before,) = tiers(llm)
    with engine(model.path, **CONFIG, settings={"reload": False}) as llm:
        outputs = run_waves(llm, waves.requests[:1])
        (after,) = tiers(llm)
    assert_right(outputs, model, waves.requests[0], waves.seed)
    assert after.num_loaded > before.num_loaded, waves.seed
    assert after.num_invalid == 0


def test_old_blocks_are_not_found(engine, checkpoint, waves):
    """Those of other weights, and those of before a reset that includes them."""
    old, new = checkpoint(), checkpoint(seed=77)
    with engine(old.path, **CONFIG) as llm:
        run_waves(llm, waves.requests)
        llm.collective_rpc("reload_weights", kwargs={"weights_path": str(new.path)})
        outputs = run_waves(llm, waves.requests[:1])
        (found,) = tiers(llm)
        assert_right(outputs, new, waves.requests[0], waves.seed)
        assert found.num_invalid == 0
        run_waves(llm, waves.requests)
        assert llm.reset_prefix_cache(reset_connector=True)
        (before,) = tiers(llm)
        outputs = run_waves(llm, waves.requests[:1])
        (after,) = tiers(llm)
    assert_right(outputs, new, waves.requests[0], waves.seed)
    assert after.num_loaded == before.num_loaded > 0, waves.seed


def test_adapters_load_their_own_blocks(engine, checkpoint, model_root, waves):
    """Also after another one has taken an adapter's name."""
    from vllm.lora.request import LoRARequest

    model = checkpoint("LlamaForCausalLM", seed=31)
    made = {}
    for number in (1, 2):
        path = model_root / f"tiered-{number}-{waves.seed}"
        made[path] = merged(model, write_adapter(path, model.model, waves.seed + number))
    stem = prompts(waves.seed, [40])[0].tolist()
    request = greedy_request("a", stem, 6)
    lora = {"enable_lora": True, "max_loras": 1, "max_lora_rank": 8}
    with engine(model.path, **CONFIG, **lora) as llm:
        for lora_id, path in enumerate(made, 1):
            for adapter in (None, LoRARequest("same", lora_id, str(path))):
                for _ in range(2):
                    expected = made[path] if adapter else model
                    (output,) = run_vllm(llm, [request], adapter).values()
                    with contextlib.suppress(NearTie):
                        tokens = expected.greedy(stem, 6)
                        assert list(output.outputs[0].token_ids) == tokens, waves.seed
                    run_waves(llm, waves.requests[:2])  # evict the stem's blocks
            llm.reset_prefix_cache()
        (found,) = tiers(llm)
    assert found.num_invalid == 0 < found.num_loaded, waves.seed


def test_more_than_the_host_has_is_refused_by_vllms_name(engine, checkpoint):
    config = {**CONFIG, "kv_offloading_size": 1 << 30}
    said = r"field kv_offloading_size .* = 1152921504606846976; fix: at most"
    with pytest.raises(DaemonsUnusable, match=said), engine(checkpoint().path, **config):
        pass
