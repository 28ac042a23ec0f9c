"""Weight updates that keep running requests: the same tokens, and log probabilities, as a loop over
transformers' models that changes the weights between tokens and keeps the KV cache."""

import random
from functools import partial

import numpy as np
import pytest
import torch
from transformers import DynamicCache

from rpc_schema.errors import CheckpointError, ConfigError, TransferError
from rpc_schema.lifecycle import GetSupportedTasks
from rpc_schema.weight_transfer import BroadcastSource, DiskEngine, DiskSource, ReloadWeights
from tests.e2e.test_weight_update import listed, settled_states, tensors_in_file, trainer
from tests.support.checkpoints import prompts
from tests.support.serving import (
    LONG_LEASE,
    connect,
    greedy_request,
    worker_config,
)
from tests.support.watched import TIMEOUT_S, Watched, successor
from worker_client.driver import Driver
from worker_client.errors import ClientConfigError, ConfigMismatchError, WeightsNotWhole
from worker_client.trainer.sender import WeightSender
from worker_client.wire.worker_client import TensorList
from worker_client.worker_group import WorkerGroup

CLOSE = 1e-4
"""In nats; float32."""


def assert_as_swapped(model_of, prompt, output):
    """Check a greedy output by transformers: token by token with the model of its version, on one
    KV cache. The prompt was computed in one step."""
    cache, given, place = DynamicCache(), torch.tensor([[*map(int, prompt)]]), 0
    for run in output.weights_versions:
        for _ in range(run.num_tokens):
            with torch.no_grad():
                out = model_of[run.version].model(given, past_key_values=cache, use_cache=True)
            expected = out.logits[0, -1].float().log_softmax(-1)
            token = output.token_ids[place]
            assert expected[token] > expected.max() - CLOSE, (output.req_id, place, run)
            if output.logprobs is not None:
                found = output.logprobs[place].logprobs[0]
                assert abs(found - expected[token].item()) < CLOSE, (output.req_id, place)
            given, place = torch.tensor([[token]]), place + 1
    assert place == len(output.token_ids)


def versions_of(output):
    return [run.version for run in output.weights_versions for _ in range(run.num_tokens)]


def reloading(group, model, _sender):
    group.weights.reload(str(model.path), running="keep")


def from_disk(group, model, _sender):
    group.weights.init_transfer_engine(DiskEngine())
    group.weights.start_update(running="keep")
    group.weights.update(TensorList(), DiskSource(model=str(model.path)))
    group.weights.finish_update()


def over_gloo(group, model, sender):
    sender.connect()
    sender.send(dict(model.model.state_dict()), running="keep")


@pytest.mark.parametrize(("pp", "tp"), [(1, 1), (2, 1), (1, 2)])
def test_rows_go_on_with_their_kv_over_updates_by_every_engine(serve, models, pp, tp, seed):
    rng = random.Random(seed)
    texts = prompts(seed, [40, 33, 9, 21])
    with serve(models[0].path, pp, tp) as (group, loaded):
        watched = Watched(group, loaded)
        model_of = {group.weights.version.number: models[0]}
        lengths = [40, 25, 60, 33]
        for number, (text, length) in enumerate(zip(texts, lengths, strict=True)):
            request = greedy_request(f"r{number}", text.tolist(), length, logprobs=1)
            watched.driver.add_request(request)
        with WeightSender(group, "gloo", timeout_s=TIMEOUT_S) as sender:
            for number in range(6):
                watched.step(rng.randrange(1, 5))
                model = models[(number + 1) % 3]
                update = (reloading, from_disk, over_gloo)[number % 3]
                update(group, model, sender)
                model_of[group.weights.version.number] = model
        last = max(model_of)
        # What runs on shares nothing of its blocks: neither those before the updates, nor those
        # that it fills now.
        watched.step(3)
        known = [*texts[2].tolist(), *watched.scheduler.generated_tokens("r2", 0)]
        late = {"copy": texts[2].tolist(), "tail": known}
        for name, text in late.items():
            watched.driver.add_request(greedy_request(name, text, 6))
        watched.finish()
        outputs = watched.outputs
        # Blocks of the new weights alone are shared as ever.
        watched.driver.add_request(greedy_request("again", late["copy"], 3))
        watched.finish()
    assert watched.driver.num_failures == 0
    assert dict.fromkeys(outputs, 1) == watched.admitted
    for number, text in enumerate(texts):
        output = outputs[f"r{number}"]
        assert_as_swapped(model_of, text, output)
        assert len(output.token_ids) == lengths[number]
        assert watched.versions[output.req_id][: len(output.token_ids)] == versions_of(output)
    assert len(outputs["r2"].weights_versions) >= 3  # some may have sampled none of its tokens
    for name, text in late.items():
        assert outputs[name].num_cached_tokens == 0
        assert [run.version for run in outputs[name].weights_versions] == [last]
        assert_as_swapped({last: models[0]}, text, outputs[name])
    assert outputs["again"].num_cached_tokens >= 8
    assert outputs["again"].token_ids == outputs["copy"].token_ids[:3]


def test_failed_updates_hold_the_requests_until_one_is_complete(serve, models, model_root, seed):
    """Refused, interrupted and mended updates; no request is admitted again."""
    rng = random.Random(seed)
    texts = prompts(seed, [30, 12])
    old, new, _ = models
    with serve(old.path, 2) as (group, loaded):
        watched = Watched(group, loaded)
        first = group.weights.version.number
        for number, text in enumerate(texts):
            request = greedy_request(f"r{number}", text.tolist(), 24, logprobs=1)
            watched.driver.add_request(request)
        watched.step(rng.randrange(3, 8))
        # Refused before the first byte: they go on with the old weights.
        with pytest.raises(CheckpointError):
            group.weights.reload(str(model_root / "nowhere"), running="keep")
        with pytest.raises(ClientConfigError):
            group.weights.start_update(version=first, running="keep")
        watched.step(2)
        assert {*watched.versions["r0"]} == {first}
        # Interrupted: no step runs.
        file = new.path / "model.safetensors"
        with trainer(2, file, rng.randrange(3, 9)) as (process, engine):
            group.weights.init_transfer_engine(engine, timeout_s=TIMEOUT_S)
            group.weights.start_update(running="keep")
            process.stdin.write("send\n")
            process.stdin.flush()
            with pytest.raises(TransferError):
                group.weights.update(listed(tensors_in_file(new)), BroadcastSource(round=1))
        assert set(settled_states(group)) == {"dirty"}
        watched.driver.add_request(greedy_request("later", texts[0].tolist(), 4))
        for _ in range(2):
            with pytest.raises(WeightsNotWhole):
                watched.step(8)
        group.weights.reload(str(new.path), running="keep")
        models_of = {first: old, group.weights.version.number: new}
        watched.finish()
    outputs = watched.outputs
    assert watched.driver.num_failures == 0
    assert watched.admitted == {"r0": 1, "r1": 1, "later": 1}
    for number, text in enumerate(texts):
        assert_as_swapped(models_of, text, outputs[f"r{number}"])
        assert [run.version for run in outputs[f"r{number}"].weights_versions] == [*models_of]
    assert [run.version for run in outputs["later"].weights_versions] == [max(models_of)]


def test_next_driver_goes_on_with_requests_that_were_kept(serve, models, seed):
    """A driver is replaced in the middle of an update, and its successor too: tokens of three
    drivers and four versions, each stamped."""
    rng = random.Random(seed)
    old, new, other = models
    texts = prompts(seed, [26, 11])
    config = worker_config(old.path, 2)
    with serve(old.path, 2) as (group, loaded):
        endpoints = [status.endpoint for status in group.get_status()]
        watched = Watched(group, loaded)
        model_of = {group.weights.version.number: old}
        for number, text in enumerate(texts):
            watched.driver.add_request(greedy_request(f"r{number}", text.tolist(), 40))
        watched.step(rng.randrange(3, 7))
        group.weights.reload(str(new.path), running="keep")
        model_of[group.weights.version.number] = new
        watched.step(rng.randrange(2, 6))
        group.weights.init_transfer_engine(DiskEngine())
        group.weights.start_update(running="keep")  # and its driver is gone
        group.weights.update(TensorList(), DiskSource(model=str(other.path)))
        for is_last in (False, True):
            config = worker_config(new.path, 2)
            with successor(endpoints, config, loaded) as (next_one, adopted):
                model_of[next_one.group.weights.version.number] = new
                assert all(each.num_computed_tokens for each in adopted)
                assert all(each.earlier_versions for each in adopted) is not is_last
                if not is_last:
                    # Nobody else begins with the blocks of an adopted request that was kept.
                    text = texts[0].tolist()
                    next_one.driver.add_request(greedy_request("copy", text, 20))
                    next_one.step(rng.randrange(2, 6))
                    next_one.settle()
                else:
                    next_one.finish()
                    outputs = next_one.outputs
    for number, text in enumerate(texts):
        assert_as_swapped(model_of, text, outputs[f"r{number}"])
        assert [run.version for run in outputs[f"r{number}"].weights_versions] == [*model_of]
    assert outputs["copy"].num_cached_tokens == 0
    assert_as_swapped(model_of, texts[0], outputs["copy"])


@pytest.mark.parametrize("engine", [from_disk, reloading])
def test_rank_that_dies_takes_the_kv_but_no_request(serve, daemons, models, engine, seed):
    """Its successor reads the files that the others have read last. If these have other weights
    since, requests are held until an update. Then they are computed again by the newest weights,
    and every token has the version that results said."""
    rng = random.Random(seed)
    old, new, _ = models
    texts = prompts(seed, [26, 11])
    with serve(old.path, 2) as (group, loaded):
        watched = Watched(group, loaded)

        def recover(died):
            daemons.restart_dead()
            group.replace(died.rank)

        watched.driver = Driver(group, watched.scheduler, watched._listen, recover=recover)
        for number, text in enumerate(texts):
            watched.driver.add_request(greedy_request(f"r{number}", text.tolist(), 40))
        watched.step(rng.randrange(3, 7))
        engine(group, new, None)
        watched.step(rng.randrange(3, 7))
        while any(len(set(watched.versions[f"r{each}"])) < 2 for each in range(len(texts))):
            watched.step()
        num_before = {name: len(own) + 3 for name, own in watched.versions.items()}  # in flight too
        daemons.kill(rng.randrange(2))
        if engine is from_disk:
            with pytest.raises(WeightsNotWhole):
                watched.step(40)
            engine(group, new, None)
        watched.finish()
        last = group.weights.version.number
        names = {status.config.model.model for status in group.get_status()}
    assert names == {str((old if engine is from_disk else new).path)}
    for number, text in enumerate(texts):
        output = watched.outputs[f"r{number}"]
        assert len(output.token_ids) == 40
        assert watched.versions[output.req_id][:40] == versions_of(output)
        assert len(output.weights_versions) == (3 if engine is from_disk else 2)
        known = [*text.tolist(), *output.token_ids]
        expected = new.logprobs(known)
        for place in range(len(text) + num_before[output.req_id], len(known)):
            best = expected[place - 1].max()
            assert expected[place - 1][known[place]] > best - CLOSE, (last, place)


def test_kept_requests_that_lose_their_kv_are_computed_again(serve, models, seed):
    """By preemption, in a cache that is too small: the newest weights compute all of it."""
    texts = [text.tolist() for text in prompts(seed, [18, 17, 16, 15])]
    old, new, _ = models
    with serve(old.path) as (group, loaded):
        watched = Watched(group, loaded, num_blocks=29)
        first = group.weights.version.number
        for number, text in enumerate(texts):
            watched.driver.add_request(greedy_request(f"r{number}", text, 24))
        watched.step(4)
        group.weights.reload(str(new.path), running="keep")
        watched.finish()
    preempted = [each for each in watched.outputs.values() if each.num_preemptions]
    assert preempted
    for output in watched.outputs.values():
        text = texts[int(output.req_id[1:])]
        before, after = output.weights_versions
        assert (before.version, after.version) == (first, first + 1)
        if output.num_preemptions:
            # At the latest from the last preemption on, only the tokens are of the old weights.
            known = np.array([*text, *output.token_ids[:-1]])
            expected = new.logprobs(known)[-1]
            assert expected[output.token_ids[-1]] > expected.max() - CLOSE
        else:
            assert_as_swapped({first: old, first + 1: new}, text, output)


def test_reload_keeps_no_requests_over_other_scales_of_the_cache(daemons, models):
    config = worker_config(models[0].path, kv_cache_dtype="fp8")
    with connect(daemons.endpoints(1), config) as (group, loaded):
        before = group.weights.version
        with pytest.raises(ConfigError, match="scales of the KV cache in FP8"):
            group.weights.reload(running="keep")
        assert group.weights.version == before
        watched = Watched(group, loaded)
        watched.driver.add_request(greedy_request("a", [1, 2, 3], 5))
        watched.step(2)
        over_gloo_of(group, models[1])
        watched.finish()
    assert len(watched.outputs["a"].weights_versions) == 2
    assert watched.admitted == {"a": 1}


def over_gloo_of(group, model):
    with WeightSender(group, "gloo", timeout_s=TIMEOUT_S) as sender:
        over_gloo(group, model, sender)


def test_aborted_requests_bring_their_tokens_and_can_be_continued(serve, models, seed):
    rng = random.Random(seed)
    texts = [text.tolist() for text in prompts(seed, [31, 18, 9, 14])]
    old, new, _ = models
    with serve(old.path, 2, max_num_seqs=3) as (group, loaded):
        watched = Watched(group, loaded)
        first = group.weights.version.number
        for number, text in enumerate(texts):  # the last one waits for a row
            watched.driver.add_request(greedy_request(f"r{number}", text, 30, logprobs=1))
        while "r0" not in watched.versions or rng.random() < 0.8:
            watched.step()
        group.weights.init_transfer_engine(DiskEngine())
        group.weights.start_update(running="abort")
        with pytest.raises(WeightsNotWhole):
            watched.step(8)
        group.weights.update(TensorList(), DiskSource(model=str(new.path)))
        group.weights.finish_update()
        watched.finish()
        aborted = {name: each for name, each in watched.outputs.items() if name != "r3"}
        assert aborted.keys() == {"r0", "r1", "r2"}
        for name, output in aborted.items():
            text = texts[int(name[1:])]
            assert output.finish_reason == "abort"
            assert 0 < len(output.token_ids) < 30
            assert len(watched.versions[name]) == len(output.token_ids) == len(output.logprobs)
            assert_as_swapped({first: old}, text, output)
            # Continued as a request of its own.
            known = [*text, *output.token_ids]
            watched.driver.add_request(greedy_request(f"{name}+", known, 5))
        watched.finish()
    assert watched.driver.num_failures == 0
    assert set(watched.admitted.values()) == {1}
    for name, output in watched.outputs.items():
        if name == "r3" or name.endswith("+"):
            known = (
                texts[3]
                if name == "r3"
                else [
                    *texts[int(name[1])],
                    *watched.outputs[name[:2]].token_ids,
                ]
            )
            assert output.finish_reason == "length"
            assert_as_swapped({first + 1: new}, known, output)


def test_reload_that_aborts_ends_preempted_requests_too(serve, models, seed):
    texts = [text.tolist() for text in prompts(seed, [18, 17, 16, 15])]
    old, new, _ = models
    with serve(old.path) as (group, loaded):
        watched = Watched(group, loaded, num_blocks=29)
        for number, text in enumerate(texts):
            watched.driver.add_request(greedy_request(f"r{number}", text, 24))
        while watched.scheduler.num_running == 4 or not watched.versions:
            watched.step()
        group.weights.reload(str(new.path), running="abort")
        watched.finish()
    assert {each.finish_reason for each in watched.outputs.values()} == {"abort"}
    for name, output in watched.outputs.items():
        assert len(watched.versions[name]) == len(output.token_ids) > 0
        assert_as_swapped({output.weights_versions[0].version: old}, texts[int(name[1])], output)


@pytest.mark.parametrize("named", ["old", "new", "other"])
def test_a_reload_that_reached_one_rank_is_completed_by_the_next_driver(
    daemons, models, named, seed
):
    """From the directory that its configuration names; the requests go on with their KV."""
    rng = random.Random(seed)
    by_name = dict(zip(("old", "new", "other"), models, strict=True))
    texts = prompts(seed, [33, 12])
    config, endpoints = worker_config(models[0].path, 2), daemons.endpoints(2)
    with WorkerGroup(endpoints, config.parallel, lease=LONG_LEASE) as group:
        group.attach(force=True)
        loaded = group.prepare(config, num_gpu_blocks=256, reload=True)
        watched = Watched(group, loaded)
        model_of = {group.weights.version.number: models[0]}
        for number, text in enumerate(texts):
            watched.driver.add_request(greedy_request(f"r{number}", text.tolist(), 40))
        watched.step(rng.randrange(3, 7))
        watched.settle()
        reached = rng.randrange(2)
        reload = partial(ReloadWeights, model=str(by_name["new"].path), running="keep")
        group._channel.ask_each(
            lambda rank: reload if rank == reached else GetSupportedTasks
        )  # and its driver is gone
    with WorkerGroup(endpoints, config.parallel, lease=LONG_LEASE) as successor:
        successor.attach(force=True, keep_requests=True)
        with pytest.raises(ConfigMismatchError, match="max_num_batched_tokens"):
            wrong = worker_config(by_name[named].path, 2, max_num_batched_tokens=33)
            successor.prepare(wrong, num_gpu_blocks=256)
        config = worker_config(by_name[named].path, 2)
        assert successor.prepare(config, num_gpu_blocks=256).was_loaded
        model_of[successor.weights.version.number] = by_name[named]
        next_one = Watched(successor, loaded)
        adopted, _ = next_one.driver.claim(successor.adopt_requests())
        assert len(adopted) == 2 and all(each.num_computed_tokens for each in adopted)
        assert next_one.scheduler.adopt_requests(adopted) == []
        next_one.finish()
    for number, text in enumerate(texts):
        assert_as_swapped(model_of, text, next_one.outputs[f"r{number}"])
