"""Updates of LoRA adapters while requests run: the same tokens as transformers' models with the
adapters merged by PEFT, each token by the version that the output names."""

import json
import random
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import DynamicCache

from rpc_schema.config import LoraConfig
from rpc_schema.errors import ConfigError, StateError, TransferError
from rpc_schema.lora_request import LoraRequest
from rpc_schema.weight_transfer import BroadcastSource, DiskEngine, DiskSource
from tests.e2e.test_weight_update import listed, trainer
from tests.support.checkpoints import prompts
from tests.support.lora_adapters import make_adapter
from tests.support.serving import LONG_LEASE, connect, scheduler_limits, worker_config
from tests.support.watched import TIMEOUT_S, Watched
from worker_client.driver import Driver
from worker_client.errors import ClientConfigError
from worker_client.requests import GenerationRequest
from worker_client.scheduler import Scheduler
from worker_client.trainer.deltas import SparseDelta, TensorPiece
from worker_client.trainer.sender import WeightSender
from worker_client.wire.worker_client import TensorList
from worker_client.worker_group import WorkerGroup

CLOSE = 1e-4
"""In nats; float32."""
ROOM = LoraConfig(max_loras=2, max_lora_rank=8, max_cpu_loras=2)
FORM = {"rank": 5, "alpha": 7.0, "rank_pattern": {"down_proj": 3}}


@pytest.fixture(scope="module")
def base(checkpoint):
    return checkpoint("LlamaForCausalLM", seed=31)


@pytest.fixture(scope="module")
def contents(base):
    """Adapters of one form, which an update can turn into each other: merged models by seed."""
    return {seed: make_adapter(base, f"policy-{seed}", seed=seed, **FORM) for seed in (1, 2, 3)}


@pytest.fixture(scope="module")
def other(base):
    return make_adapter(base, "other", seed=9, rank=2)


def tensors(content):
    """What PEFT's get_peft_model_state_dict returns."""
    return load_file(content.path / "adapter_model.safetensors")


def request(req_id, prompt, max_tokens, adapter=None):
    features = () if adapter is None else (adapter.extension,)
    prompt = torch.tensor(list(map(int, prompt)), dtype=torch.int32).numpy()
    return GenerationRequest(id=req_id, prompt=prompt, max_tokens=max_tokens, features=features)


def assert_as_swapped(model_of, prompt, output):
    """Check a greedy output token by token with the model of its adapter's version, on one KV
    cache."""
    cache, given, place = DynamicCache(), torch.tensor([[*map(int, prompt)]]), 0
    for run in output.weights_versions:
        for _ in range(run.num_tokens):
            with torch.no_grad():
                model = model_of[run.adapter_version].model
                out = model(given, past_key_values=cache, use_cache=True)
            expected = out.logits[0, -1].float().log_softmax(-1)
            token = output.token_ids[place]
            assert expected[token] > expected.max() - CLOSE, (output.req_id, place, run)
            given, place = torch.tensor([[token]]), place + 1
    assert place == len(output.token_ids)


def assert_greedy(model, prompt, tokens):
    """Check that a model continues a prompt with these tokens: each is its likeliest one, or as
    likely."""
    known = [*map(int, prompt), *tokens]
    with torch.no_grad():
        logits = model.model(torch.tensor([known])).logits[0].float()
    expected = logits[-len(tokens) - 1 : -1].log_softmax(-1)
    chosen = expected[torch.arange(len(tokens)), torch.tensor(tokens)]
    assert tokens and bool((chosen > expected.amax(-1) - CLOSE).all()), (prompt, tokens)


def by_gloo(_group, sender, content, adapter, **options):
    return sender.send(tensors(content), target=adapter, **options).version


def in_pieces(_group, sender, content, adapter, **options):
    cut = {
        name: [TensorPiece((0, 0), each[:, :1]), TensorPiece((0, 1), each[:, 1:])]
        for name, each in tensors(content).items()
    }
    return sender.send(cut, target=adapter, packed_bytes=1000, **options).version


def from_disk(group, sender, content, adapter, **options):
    sender.close()
    group.weights.init_transfer_engine(DiskEngine())
    group.weights.start_update(target=adapter, **options)
    group.weights.update(TensorList(), DiskSource(model=content.path.name))
    return group.weights.finish_update()[0].version


@pytest.mark.parametrize(("pp", "tp"), [(1, 1), (2, 2)])
def test_kept_requests_change_adapters_between_tokens(serve, base, contents, other, pp, tp, seed):
    """Only requests of the updated adapter notice."""
    rng = random.Random(seed)
    texts = prompts(seed, [40, 33, 21, 26])
    with serve(base.path, pp, tp, lora=ROOM, block_size=4) as (group, loaded):
        policy, second = group.loras.add("policy-1"), group.loras.add("other")
        watched = Watched(group, loaded)
        users = {"r0": policy, "r1": policy, "other": second, "base": None}
        for (name, adapter), text in zip(users.items(), texts, strict=True):
            watched.driver.add_request(request(name, text, 40, adapter))
        model_of = {0: contents[1]}
        with WeightSender(group, "gloo", timeout_s=TIMEOUT_S) as sender:
            for number, update in enumerate((by_gloo, from_disk, in_pieces)):
                watched.step(rng.randrange(2, 6))
                content = contents[(2, 3, 1)[number]]
                version = update(group, sender, content, policy, running="keep")
                model_of[version] = content
        assert sorted(model_of) == [0, 1, 2, 3]
        watched.step(2)
        # No prefix of the adapter's requests is found again; those of the others are.
        known = [*texts[0].tolist(), *watched.scheduler.generated_tokens("r0", 0)]
        late = {"copy": texts[0].tolist(), "tail": known}
        for name, text in late.items():
            watched.driver.add_request(request(name, text, 6, policy))
        watched.driver.add_request(request("other again", texts[2], 3, second))
        watched.driver.add_request(request("base again", texts[3], 3))
        watched.finish()
        watched.driver.add_request(request("again", late["copy"], 3, policy))
        watched.finish()
        reports = [reply.adapters for reply in group.loras.list_by_rank()]
    outputs = watched.outputs
    assert watched.driver.num_failures == 0
    assert dict.fromkeys(outputs, 1) == watched.admitted
    for name, text in zip(users, texts, strict=True):
        output = outputs[name]
        if users[name] is policy:
            assert_as_swapped(model_of, text, output)
            assert [run.adapter_version for run in output.weights_versions] == [0, 1, 2, 3]
        else:
            models = {0: other, None: base}
            assert len(output.weights_versions) == 1
            assert_as_swapped(models, text, output)
    for name, text in late.items():
        assert outputs[name].num_cached_tokens == 0
        assert_as_swapped({3: contents[1]}, text, outputs[name])
    assert outputs["again"].num_cached_tokens >= 32
    assert outputs["other again"].num_cached_tokens >= 16
    assert outputs["base again"].num_cached_tokens >= 20
    for adapters in reports:
        versions = {each.name: each.weights_version for each in adapters}
        assert versions == {"policy-1": 3, "other": 0}
    assert len({each.identity for own in reports for each in own if each.weights_version}) == 1


@pytest.mark.parametrize("running", ["drop", "abort"])
def test_requests_of_the_adapter_begin_again_or_end(serve, base, contents, running, seed):
    texts = prompts(seed, [30, 17, 25, 12])
    with serve(base.path, 2, lora=ROOM, block_size=4, max_num_seqs=3) as (group, loaded):
        policy = group.loras.add("policy-1")
        watched = Watched(group, loaded)
        users = {"r0": policy, "base": None, "r1": policy, "waits": policy}
        for (name, adapter), text in zip(users.items(), texts, strict=True):
            watched.driver.add_request(request(name, text, 24, adapter))
        watched.step(8)
        counts = {n: len(watched.scheduler.generated_tokens(n, 0)) for n in users}
        with WeightSender(group, "gloo", timeout_s=TIMEOUT_S) as sender:
            sender.send(tensors(contents[2]), target=policy, running=running)
        watched.finish()
    outputs, text_of = watched.outputs, dict(zip(users, texts, strict=True))
    assert watched.driver.num_failures == 0
    assert min(counts["r0"], counts["r1"], counts["base"]) > 1 and not counts["waits"]
    again = running == "drop"
    assert watched.admitted == {"r0": 1 + again, "r1": 1 + again, "base": 1, "waits": 1}
    assert_greedy(base, texts[1], outputs["base"].token_ids)
    assert_greedy(contents[2], texts[3], outputs["waits"].token_ids)
    for name in ("r0", "r1"):
        output, prompt = outputs[name], text_of[name].tolist()
        runs = {run.adapter_version: run.num_tokens for run in output.weights_versions}
        # Steps that were in flight have sampled with the old weights, and count while they are.
        assert runs[0] >= counts[name]
        assert_greedy(contents[1], prompt, output.token_ids[: runs[0]])
        if running == "abort":
            assert output.finish_reason == "abort" and runs == {0: len(output.token_ids)}
        else:
            known = [*prompt, *output.token_ids[: runs[0]]]
            assert_greedy(contents[2], known, output.token_ids[runs[0] :])
            assert len(output.token_ids) == 24


def test_refused_and_failed_updates_leave_the_adapter_as_it_was(serve, base, contents, seed):
    text = prompts(seed, [20])[0].tolist()
    sent = tensors(contents[2])
    name = next(each for each in sent if "q_proj.lora_A" in each)
    shutil.copytree(contents[2].path, base.path.parent / "scaled", dirs_exist_ok=True)
    fields = json.loads((contents[2].path / "adapter_config.json").read_text())
    (base.path.parent / "scaled" / "adapter_config.json").write_text(
        json.dumps(fields | {"lora_alpha": 14.0})
    )
    with serve(base.path, 2, lora=ROOM) as (group, loaded):
        policy = group.loras.add("policy-1")
        driver = Driver(group, Scheduler(scheduler_limits(group, loaded)))

        def tokens(req_id):
            driver.add_request(request(req_id, text, 8, policy))
            (output,) = driver.run()
            return output.token_ids

        before = tokens("a")
        assert_greedy(contents[1], text, before)
        with WeightSender(group, "gloo", timeout_s=TIMEOUT_S) as sender:
            for changed, options, words in (
                (sent | {name: sent[name][:4]}, {}, f"{name} has another shape.*\\[5, "),
                (
                    sent | {"base_model.model.x.lora_A.weight": sent[name].clone()},
                    {},
                    "'policy-1' has no",
                ),
                ({name: sent[name]}, {}, "tensors are missing"),
                (sent, {"format": "kernel"}, "PEFT's names alone"),
                (sent, {"version": 0}, "have version 0 already"),
                (sent, {"target": policy._replace(version=5)}, "no such adapter"),
            ):
                with pytest.raises((ConfigError, ClientConfigError), match=words):
                    sender.send(changed, **{"target": policy} | options)
        group.weights.init_transfer_engine(DiskEngine())
        group.weights.start_update(target=policy)
        with pytest.raises(ConfigError, match="rank 3 and scale 4"):
            group.weights.update(TensorList(), DiskSource(model="scaled"))
        assert tokens("b") == before, "the update is open"
        group.weights.update(TensorList(), DiskSource(model="policy-2"))
        assert group.loras.remove(policy.lora_id)
        with pytest.raises(StateError, match="removed or replaced"):
            group.weights.finish_update()
        policy = group.loras.add("policy-1")
        file = contents[2].path / "adapter_model.safetensors"
        with trainer(2, file, 3) as (process, engine):
            group.weights.init_transfer_engine(engine, timeout_s=TIMEOUT_S)
            group.weights.start_update(target=policy)
            process.stdin.write("send\n")
            process.stdin.flush()
            with pytest.raises(TransferError):
                group.weights.update(listed(load_file(file)), BroadcastSource(round=1))
        assert tokens("c") == before
        # Single elements, and then what has changed in one tensor alone.
        b_name = name.replace("lora_A", "lora_B")
        own = tensors(contents[1])
        flat = sent[b_name].reshape(-1)
        delta = SparseDelta(torch.arange(flat.numel(), dtype=torch.int32), flat)
        rest = {each: sent[each] for each in sent if each != b_name}
        with WeightSender(group, "gloo", timeout_s=TIMEOUT_S) as sender:
            sender.send({b_name: delta}, target=policy, partial=True)
            partly = base.path.parent / "partly"
            shutil.copytree(contents[1].path, partly, dirs_exist_ok=True)
            save_file(own | {b_name: sent[b_name]}, partly / "adapter_model.safetensors")
            reference = group.loras.add("partly")
            mixed = tokens("d")
            driver.add_request(request("e", text, 8, reference))
            assert next(iter(driver.run())).token_ids == mixed
            sender.send(rest, target=policy, partial=True)
        assert_greedy(contents[2], text, tokens("f"))
        assert group.weights.version.number == 0


@pytest.mark.parametrize("first", ["driver", "scheduler"])
def test_next_driver_and_replaced_rank(daemons, base, contents, other, seed, first):
    """The next driver adopts requests with their versions and prefixes; a new rank has the files
    alone, so that an updated adapter is removed."""
    texts = prompts(seed, [24, 18, 15])
    config = worker_config(base.path, 2, lora=ROOM, block_size=4)
    with connect(daemons.endpoints(2), config) as (group, loaded):
        policy, second = group.loras.add("policy-1"), group.loras.add("other")
        driver, outputs = Driver(group, Scheduler(scheduler_limits(group, loaded))), []
        with WeightSender(group, "gloo", timeout_s=TIMEOUT_S) as sender:
            sender.send(tensors(contents[2]), target=policy)
            for number, text in enumerate(texts[:2]):
                driver.add_request(request(f"r{number}", text, 20 + 8 * number, policy))
            outputs += [each for _ in range(6) for each in driver.step()]
            sender.send(tensors(contents[3]), target=policy, running="keep")
        driver.add_request(request("late", texts[2], 30, policy))
        outputs += [each for _ in range(6) for each in driver.step()]
        known = dict(group.loras.known)
    with WorkerGroup(daemons.endpoints(2), config.parallel, lease=LONG_LEASE) as group:
        group.attach(keep_requests=True, force=True)
        loaded = group.prepare(config)
        assert group.loras.known == known
        assert known[policy.lora_id].weights_version == 2
        scheduler = Scheduler(scheduler_limits(group, loaded))

        def recover(died):
            daemons.restart_dead()
            group.replace(died.rank)

        if first == "driver":
            driver = Driver(group, scheduler, recover=recover)
        outputs += scheduler.adopt_requests(group.adopt_requests())
        if first == "scheduler":
            driver = Driver(group, scheduler, recover=recover)
        outputs += driver.run()
        found = {output.req_id: output for output in outputs}
        for req_id in ("r0", "r1"):  # whose tokens of both weights no one can tell apart any more
            assert {run.adapter_version for run in found[req_id].weights_versions} <= {None, 2}
        (run,) = found["late"].weights_versions
        assert run.adapter_version == 2
        assert_as_swapped({2: contents[3]}, texts[2], found["late"])
        driver.add_request(request("again", texts[2], 4, policy))
        driver.add_request(request("kept", texts[0], 4, policy))
        more = {output.req_id: output for output in driver.run()}
        assert more["again"].num_cached_tokens == (12 if first == "driver" else 0)
        assert not more["kept"].num_cached_tokens
        driver.add_request(request("lost", texts[0], 30, policy))
        driver.add_request(request("stays", texts[1], 30, second))
        driver.step()
        daemons.kill(1)
        ended = {output.req_id: output for output in driver.run()}
        assert "lacks its adapter 'policy-1'" in ended["lost"].error
        assert_greedy(other, texts[1], ended["stays"].token_ids)
        assert [adapter.name for adapter in group.loras.known.values()] == ["other"]
        with pytest.raises(ClientConfigError, match="no such adapter"):
            group.weights.start_update(target=policy)


def test_a_scheduler_without_versions_refuses_updates(serve, base, contents):
    class Plain:
        """A scheduler that keeps no versions of adapters."""

        def __init__(self, scheduler):
            for name in ("add_request", "abort_request", "has_unfinished_requests", "schedule"):
                setattr(self, name, getattr(scheduler, name))
            self.update_from_output = scheduler.update_from_output
            self.step_failed = scheduler.step_failed

    with serve(base.path, lora=ROOM) as (group, loaded):
        policy = group.loras.add("policy-1")
        assert isinstance(policy.extension, LoraRequest)
        Driver(group, Plain(Scheduler(scheduler_limits(group, loaded))))
        with pytest.raises(ClientConfigError, match="use_adapter"):
            group.weights.start_update(target=policy)
