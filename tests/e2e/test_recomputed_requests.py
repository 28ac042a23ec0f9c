"""Weight updates that recompute running requests: each token is the one that its version of
transformers' model gives after the same tokens, all computed by that version, and has the same log
probability."""

import random
from contextlib import closing
from functools import partial
from itertools import islice

import pytest
import torch

from rpc_schema.config import LoraConfig
from rpc_schema.errors import ConfigError
from rpc_schema.weight_transfer import DiskEngine, DiskSource
from tests.support.decaying_reference import make_decaying
from tests.support.embedded_prompts import random_prompts
from tests.support.families import command
from tests.support.faulty_daemon import Fault
from tests.support.fresh_reference import CLOSER, assert_all_fresh, assert_as_fresh, texts_of
from tests.support.lora_adapters import make_adapter
from tests.support.serving import (
    LOOKUPS,
    connect,
    drafts_by,
    greedy_request,
    scheduler_limits,
    worker_config,
)
from tests.support.structured import EOS_TOKEN_ID, VOCAB_SIZE, make_tokenizer, regex_case
from tests.support.watched import TIMEOUT_S, Watched, successor
from tests.support.window_models import MAX_MODEL_LEN, STEP_TOKENS, WINDOW, make_model
from worker_client.driver import Driver
from worker_client.driver_parts.registry import DriverOptions
from worker_client.errors import WorkerDied
from worker_client.inputs.request_parser import RequestParser
from worker_client.inputs.tokenizer import load_tokenizer
from worker_client.launcher import LocalDaemons
from worker_client.scheduler import Scheduler
from worker_client.structured.grammars import Grammars
from worker_client.trainer.sender import WeightSender
from worker_client.wire.worker_client import TensorList


@pytest.fixture(scope="module")
def two_daemons(model_root):
    """Daemons that have the families of tests."""
    with LocalDaemons(["cpu", "cpu"], model_root, command=command(model_root)) as daemons:
        yield daemons


def recompute(group, model, engine="reload"):
    """Give the group a model's weights."""
    if engine == "reload":
        group.weights.reload(str(model.path), running="recompute")
    elif engine == "disk":
        group.weights.init_transfer_engine(DiskEngine())
        group.weights.start_update(running="recompute")
        group.weights.update(TensorList(), DiskSource(model=str(model.path)))
        group.weights.finish_update()
    elif engine == "mended":
        group.weights.init_transfer_engine(DiskEngine())
        group.weights.start_update(running="recompute")
        group.weights.reload(str(model.path), running="keep")
    else:
        with WeightSender(group, "gloo", timeout_s=TIMEOUT_S) as sender:
            sender.send(dict(model.model.state_dict()), running="recompute")


@pytest.mark.parametrize(("pp", "tp"), [(1, 1), (2, 1), (1, 2)])
def test_requests_go_on_as_if_the_new_weights_had_computed_them(serve, models, pp, tp, seed):
    """By every engine, in several passes, in the middle of a prompt, and with shared blocks. An
    update that keeps requests recomputes what one before it has not."""
    rng = random.Random(seed)
    texts = texts_of(seed, [40, 33, 9, 90])
    texts.insert(1, texts[0])
    with serve(models[0].path, pp, tp, max_num_batched_tokens=32) as (group, loaded):
        watched = Watched(group, loaded)
        model_of = {group.weights.version.number: models[0]}
        watched.add(texts[:1], 40)
        watched.step(4)
        watched.add(texts[1:], 40, first=1)
        watched.step(2)
        for number, engine in enumerate(["reload", "disk", "gloo", "mended"]):
            watched.step(rng.randrange(1, 4))
            model = models[(number + 1) % 3]
            recompute(group, model, engine)
            model_of[group.weights.version.number] = model
            # The second request has begun with nine blocks of the first.
            computed = [group.slots.slot_of(name) for name in group.slots.req_ids]
            counts = group.slots._rows.num_computed[computed]
            assert group.weights.recomputed.num_tokens == counts.sum() - 36
            assert group.weights.recomputed.num_passes == -(-(counts.sum() - 36) // 32)
        texts.append(texts[0])
        watched.add(texts[-1:], 5, first=5)
        watched.finish()
    assert watched.driver.num_failures == 0
    assert dict.fromkeys(watched.outputs, 1) == watched.admitted
    assert watched.outputs["r5"].num_cached_tokens == 36
    assert_all_fresh(watched, model_of, texts)


@pytest.mark.parametrize("method", ["ngram", "draft_model"])
def test_adapters_and_drafts(serve, models, method, seed):
    """Rows with LoRA adapters, and rows whose counts are upper bounds."""
    rng = random.Random(seed)
    texts = texts_of(seed, [30, 12, 25, 7])
    old, new, _ = models
    merged = [make_adapter(model, f"both{method}", seed=5, rank=4) for model in (old, new)]
    options = {"lora": LoraConfig(max_loras=1, max_lora_rank=8, max_cpu_loras=1)}
    speculative = drafts_by(method, new.path)
    with serve(old.path, 2, speculative=speculative, **options) as (group, loaded):
        adapter = group.loras.add(f"both{method}")
        watched = Watched(group, loaded)
        watched.add(texts[:2], 40)
        watched.add(texts[2:], 40, first=2, features=(adapter.extension,))
        watched.step(rng.randrange(3, 12))
        first = group.weights.version.number
        recompute(group, new)
        watched.finish()
    assert watched.driver.num_failures == 0
    models_of = [dict(zip((first, first + 1), pair, strict=True)) for pair in ((old, new), merged)]
    for number, text in enumerate(texts):
        assert_as_fresh(models_of[number // 2], text, watched.outputs[f"r{number}"])
        assert len(watched.outputs[f"r{number}"].weights_versions) == 2


def embed(model, token_ids):
    with torch.no_grad():
        return model.model.get_input_embeddings()(torch.tensor(token_ids))


def test_grammars_and_prompt_embeddings(serve, checkpoint, seed):
    """Of rows with grammars the model's own log probabilities are compared, without the mask."""
    sizes = {"vocab_size": VOCAB_SIZE, "eos_token_id": EOS_TOKEN_ID}
    old, new = (checkpoint(seed=each, **sizes) for each in (97, 98))
    make_tokenizer(old.path)
    texts = texts_of(seed, [18, 31])
    embedded = list(islice(random_prompts(old, seed, 20), 5))
    with (
        closing(Grammars(old.path, VOCAB_SIZE, [EOS_TOKEN_ID])) as grammars,
        serve(old.path, 2, speculative=LOOKUPS["ngram"]) as (group, loaded),
    ):
        watched = Watched(group, loaded)
        watched.scheduler = Scheduler(scheduler_limits(group, loaded), load_tokenizer(old.path))
        options = DriverOptions(grammars)
        watched.driver = Driver(group, watched.scheduler, watched._listen, options=options)
        parser = RequestParser(load_tokenizer(old.path).encode, seed=1)
        for number, text in enumerate(texts):
            fields = {"id": f"g{number}", "prompt_token_ids": text, "max_tokens": 40}
            grammar = regex_case("([ab]{3}-){20}").options
            fields |= {"structured_outputs": grammar, "full_logprobs": True}
            watched.driver.add_request(parser.from_fields(fields, number))
        for number, prompt in enumerate(embedded):
            watched.driver.add_request(prompt.request(f"e{number}", 30, full_logprobs=True))
        while "g0" not in watched.versions or "e4" not in watched.versions:
            watched.step()
        first = group.weights.version.number
        recompute(group, new)
        watched.finish()
    assert watched.driver.num_failures == 0
    model_of = {first: old, first + 1: new}

    def check(name, embed_prompt):
        output, place = watched.outputs[name], 0
        assert [run.version for run in output.weights_versions] == [*model_of], name
        for run in output.weights_versions:
            model = model_of[run.version]
            rows = torch.cat((embed_prompt(model), embed(model, output.token_ids)))
            expected = model.exact_logprobs_of(rows)[len(rows) - len(output.token_ids) - 1 :]
            for _ in range(run.num_tokens):
                found = output.full_logprobs[place].full
                wanted = expected[place][output.token_ids[place]].item()
                assert abs(found - wanted) < CLOSER, (name, place, run)
                place += 1

    for number, text in enumerate(texts):
        check(f"g{number}", partial(embed, token_ids=text))
    for number, prompt in enumerate(embedded):
        check(f"e{number}", prompt.whole)


def test_cache_in_fp8_with_other_scales(daemons, models, seed):
    """A reload reads its scales again, which no other way of keeping requests survives. They go on
    as requests that begin then, up to the rounding of the cache."""
    texts = texts_of(seed, [30, 12])
    old, new, _ = models
    config = worker_config(old.path, kv_cache_dtype="fp8")
    with connect(daemons.endpoints(1), config) as (group, loaded):
        watched = Watched(group, loaded, enable_prefix_caching=False)
        watched.add(texts, 20)
        watched.step(5)
        recompute(group, new)
        watched.finish()
        firsts = {}
        for number, text in enumerate(texts):
            output = watched.outputs[f"r{number}"]
            before, after = output.weights_versions
            assert before.num_tokens and after.num_tokens
            firsts[number] = before.num_tokens
            known = [*text, *output.token_ids[: before.num_tokens]]
            watched.add([known], 1, first=10 + number)
        watched.finish()
    assert set(watched.admitted.values()) == {1}
    for number, place in firsts.items():
        found = watched.outputs[f"r{number}"].logprobs[place].logprobs[0]
        fresh = watched.outputs[f"r{10 + number}"]
        assert abs(found - fresh.logprobs[0].logprobs[0]) < 0.02


def test_rows_that_windows_have_passed_are_admitted_again(serve, model_root, seed):
    """Before, they are recomputed in place."""
    old, new = (make_model(model_root, "mixed", each) for each in (95, 96))
    texts = texts_of(seed, [4, 5, 3])
    sizes = {"max_model_len": MAX_MODEL_LEN, "max_num_batched_tokens": STEP_TOKENS}
    with serve(old.path, **sizes) as (group, loaded):
        assert any(each.window for each in loaded.groups)
        watched = Watched(group, loaded)
        watched.add(texts, 30)
        first = group.weights.version.number
        for num_steps, model in ((3, new), (2 * WINDOW, old)):
            watched.step(num_steps)
            watched.settle()
            before = dict(watched.admitted)
            recompute(group, model)
        watched.finish()
    assert before == dict.fromkeys(watched.admitted, 1)
    assert watched.admitted == dict.fromkeys(before, 2)
    assert_all_fresh(watched, {first: old, first + 1: new, first + 2: old}, texts)


def test_next_driver_recomputes_what_its_predecessor_has_not(serve, models, seed):
    """One dies between the update and its recomputation; then one after it."""
    rng = random.Random(seed)
    old, new, _ = models
    texts = texts_of(seed, [26, 11])
    with serve(old.path, 2) as (group, loaded):
        endpoints = [status.endpoint for status in group.get_status()]
        watched = Watched(group, loaded)
        watched.add(texts, 40, logprobs=None)
        watched.step(rng.randrange(3, 7))
        first = group.weights.version.number
        group.weights.recomputation.begin = lambda planned: None  # and its driver is gone
        recompute(group, new)
        for is_last in (False, True):
            config = worker_config((old if is_last else new).path, 2)
            with successor(endpoints, config, loaded) as (next_one, adopted):
                assert len(adopted) == 2
                assert all(bool(each.num_computed_tokens) == is_last for each in adopted)
                if is_last:
                    next_one.finish()
                else:
                    next_one.step(rng.randrange(3, 6))
                    recompute(next_one.group, old)
                    next_one.settle()
    model_of = {first: old, first + 1: new, first + 2: old}
    for number, text in enumerate(texts):
        output = next_one.outputs[f"r{number}"]
        assert [run.version for run in output.weights_versions] == [first, first + 1, first + 2]
        assert_as_fresh(model_of, text, output)


@pytest.mark.parametrize("what", ["raise", "kill"])
def test_rank_that_fails_meanwhile_loses_no_request(faulty, models, what, seed):
    """All are computed again from their tokens, by the new weights."""
    texts = texts_of(seed, [26, 41])
    old, new, _ = models
    config = worker_config(old.path, 2, max_num_batched_tokens=32, step_deadline_ms=3000)
    with connect(faulty.endpoints, config) as (group, loaded):
        watched = Watched(group, loaded)
        watched.replace_dead(faulty)
        watched.add(texts, 30)
        watched.step(6)
        first = group.weights.version.number
        watched.settle()
        faulty.faults[1].put(Fault("forward", what, 1))
        if what == "kill":
            with pytest.raises(WorkerDied):
                recompute(group, new)  # the weights are whole, and the next rank reads them
        else:
            recompute(group, new)
            assert group.weights.recomputed is None
        watched.finish()
        last = group.weights.version.number
    assert set(watched.admitted.values()) == {2}
    assert_all_fresh(watched, {first: old, last: new}, texts)


def test_what_cannot_be_recomputed_is_refused_before_anything_changes(
    two_daemons, model_root, models
):
    reference = make_decaying(model_root, "state", (1, 2), seed=43, checkpoint_blocks=2)
    config = worker_config(reference.path, 2, max_model_len=64)
    with connect(two_daemons.endpoints, config) as (group, loaded):
        watched = Watched(group, loaded)
        watched.driver.add_request(greedy_request("a", [1, 2, 3], 12))
        watched.step(3)
        before = group.weights.version
        for refused in (group.weights.reload, group.weights.start_update):
            with pytest.raises(ConfigError, match="state per request"):
                refused(running="recompute")
        assert group.weights.version == before
        watched.finish()
    assert watched.admitted == {"a": 1}
    assert watched.driver.num_failures == 0
