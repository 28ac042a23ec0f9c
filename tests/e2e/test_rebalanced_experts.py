"""Experts that move between ranks while these serve: the same tokens as transformers' at each move,
even ranks under a skewed router, and what is left when a rank stalls or dies in a move."""

import contextlib
import dataclasses
import json
import random
import threading
import time
from functools import partial

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from tokenizers import Tokenizer
from typer.testing import CliRunner

from rpc_schema.config import LoraConfig
from rpc_schema.errors import ConfigError, StateError, WorkerError
from rpc_schema.expert_placement import ExpertPlacement, MoveExperts, SwitchExperts
from tests.support.checkpoints import decisive_prompts, make_checkpoint
from tests.support.exhaustive import exhaustively
from tests.support.forked_daemons import ForkedDaemons
from tests.support.lora_adapters import ATTENTION, adapted_requests, make_adapter
from tests.support.moved_experts import (
    ARCHITECTURE,
    FIELDS,
    NUM_BLOCKS,
    TOKENS,
    begin_rebalance,
    clear_case,
    finish,
    new_scheduler,
    placements,
    rebalance,
    worker_config,
)
from tests.support.saving_daemons import saving_daemons
from tests.support.service_app import service_app
from tests.support.serving import MAX_DAEMONS, drafts_by, greedy_request, kill_and_wait
from tests.support.structured import EOS_TOKEN_ID, VOCAB_SIZE, make_tokenizer
from tests.support.waiting import wait_until
from worker_client.__main__ import app
from worker_client.driver import Driver
from worker_client.driver_parts.registry import DriverOptions
from worker_client.errors import ClientConfigError, WorkerDied
from worker_client.scheduler import scheduler_limits
from worker_client.trainer.sender import WeightSender
from worker_client.worker_group import WorkerGroup

SEED = random.randrange(1 << 30)
print(f"seed {SEED}")


@pytest.fixture(scope="module")
def model(checkpoint):
    return checkpoint(ARCHITECTURE, seed=SEED % 1000, **FIELDS)


@pytest.fixture(scope="module")
def case(model):
    return clear_case(model, SEED)


@pytest.fixture
def open_group(daemons, model_root, model):
    """Attach to given daemons, the pool's if they suffice, or own ones, and load them anew: (group,
    scheduler)."""
    with contextlib.ExitStack() as opened:

        def make(dp, pp, tp, *, endpoints=None, path=None, **options):
            config, count = worker_config(path or model.path, dp, pp, tp, **options), dp * pp * tp
            if endpoints is None and count > MAX_DAEMONS:
                own = opened.enter_context(ForkedDaemons(["cpu"] * count, model_root))
                endpoints = own.endpoints
            endpoints = endpoints or daemons.endpoints(count)
            group = opened.enter_context(WorkerGroup(endpoints, config.parallel))
            group.attach(force=True)
            loaded = group.prepare(config, num_gpu_blocks=NUM_BLOCKS, reload=True)
            return group, new_scheduler(dp, scheduler_limits(loaded, config))

        yield make


def tokens_of(outputs):
    return {each.req_id: each.token_ids for each in outputs}


def run(group, scheduler, requests):
    driver = Driver(group, scheduler)
    for request in requests:
        driver.add_request(request)
    return tokens_of(driver.run())


def renamed(requests, expected, name):
    again = [dataclasses.replace(each, id=f"{name}-{each.id}") for each in requests]
    return again, {f"{name}-{req_id}": own for req_id, own in expected.items()}


SHAPES = [(dp, pp, tp) for dp in (1, 2, 3) for pp in (1, 2) for tp in (1, 2) if dp * tp > 1]
OFTEN = [(2, 1, 1), (1, 2, 2)]


@pytest.mark.parametrize(
    ("dp", "pp", "tp"),
    [
        pytest.param(*shape, marks=() if shape in OFTEN else pytest.mark.exhaustive)
        for shape in SHAPES
    ],
)
@pytest.mark.parametrize("more", [exhaustively(0), 1])
def test_tokens_are_the_model_s_at_each_move(open_group, case, dp, pp, tp, more):
    """Requests run on through moves at random steps, and between their begin and the switch; all
    ranks have one placement after each. The same tokens follow."""
    redundant = -FIELDS["num_experts"] % (dp * tp) + more * dp * tp
    if redundant > FIELDS["num_experts"] * (dp * tp - 1):
        pytest.skip("an expert would be on a rank twice")
    group, scheduler = open_group(dp, pp, tp, redundant=redundant)
    requests, expected = case
    driver, chance, outputs, moved = Driver(group, scheduler), random.Random(SEED), [], 0
    for request in requests:
        driver.add_request(request)
        for _ in range(chance.randrange(1, 4)):
            if driver.busy:
                outputs += driver.step()
        moved += rebalance(group, chance)
        assert all(len(each) == 1 for each in placements(group).values())
    again, more_expected = renamed(requests, expected, "again")
    for request in again:
        driver.add_request(request)
    begun = begin_rebalance(group, chance)
    moved += finish(begun, lambda: outputs.extend(driver.step() if driver.busy else []))
    outputs += driver.run()
    assert tokens_of(outputs) == {**expected, **more_expected}, f"seed {SEED}"
    assert not driver.num_failures
    counts = [status.expert_moves for status in group.get_status()]
    assert not any(each.num_failed or each.num_dropped for each in counts)
    assert sum(each.num_moved for each in counts) == moved > 0


HOT = {9, 10, 11}
"""Experts that nearly every token chooses: of 16 on four ranks with 6 slots each, all on rank 1."""


@pytest.fixture(scope="module")
def skewed(model_root, tmp_path_factory):
    """A model whose routers prefer three experts, which a load puts on one rank."""
    fields = {"num_local_experts": 16, "num_experts_per_tok": 4, "num_hidden_layers": 2}
    fields |= {"vocab_size": VOCAB_SIZE, "eos_token_id": EOS_TOKEN_ID}
    made = make_checkpoint(model_root, "GptOssForCausalLM", seed=SEED % 1000, **fields)
    with torch.no_grad():
        for layer in made.model.model.layers:
            layer.mlp.router.bias[sorted(HOT)] += 100.0
    made.model.save_pretrained(made.path)
    make_tokenizer(made.path)
    return made


@pytest.mark.exhaustive
def test_ranks_of_a_skewed_router_become_even(open_group, skewed):
    """From three times the mean load to at most 1.3 times, by other requests' loads too; the same
    tokens."""
    group, scheduler = open_group(2, 1, 2, path=skewed.path, redundant=8)
    drawn = decisive_prompts(skewed, SEED, [31, 40, 25, 36, 28, 33], TOKENS)
    requests = [greedy_request(f"s{index}", own, TOKENS) for index, own in enumerate(drawn)]
    expected = {each.id: skewed.greedy(each.prompt.tolist(), TOKENS) for each in requests}
    assert run(group, scheduler, requests) == expected
    report = group.experts.rebalance()
    assert report.layers.keys() == {0, 1}
    assert all(2.8 <= each.before <= 4 for each in report.layers.values()), report
    assert all(each.after <= 1.3 for each in report.layers.values()), report
    drawn = decisive_prompts(skewed, SEED + 1, [38, 27, 30, 41], TOKENS)
    others = [greedy_request(f"o{index}", own, TOKENS) for index, own in enumerate(drawn)]
    expected = {each.id: skewed.greedy(each.prompt.tolist(), TOKENS) for each in others}
    scheduler = new_scheduler(2, limits_of(group, skewed.path, 2, 1, 2, redundant=8))
    assert run(group, scheduler, others) == expected
    later = group.experts.begin_rebalance()
    found = {**later.report.layers, **later.planned}
    assert len(found) == 2
    assert all(each.before <= 1.3 for each in found.values()), found


def test_driver_rebalances_between_its_steps(open_group, skewed):
    """One layer after another, while steps go on; the same tokens."""
    group, scheduler = open_group(2, 1, 1, path=skewed.path, redundant=8)
    drawn = decisive_prompts(skewed, SEED + 2, [13, 9, 21, 7], TOKENS)
    requests = [greedy_request(f"d{index}", own, TOKENS) for index, own in enumerate(drawn)]
    expected = {each.id: skewed.greedy(each.prompt.tolist(), TOKENS) for each in requests}
    before = placements(group)
    driver = Driver(group, scheduler, options=DriverOptions(eplb_step_interval=4))
    for request in requests:
        driver.add_request(request)
    outputs = [output for _ in range(4) for output in driver.step()]
    assert placements(group) == before
    outputs += [*driver.run()]
    assert tokens_of(outputs) == expected

    def all_have_moved():
        again, tokens = renamed(requests, expected, f"again-{time.monotonic_ns()}")
        for request in again:
            driver.add_request(request)
        assert tokens_of(driver.run()) == tokens
        after = placements(group)
        return all(len(each) == 1 and each != before[layer] for layer, each in after.items())

    wait_until(all_have_moved, "moves of all layers")
    assert {status.expert_moves.num_failed for status in group.get_status()} == {0}
    with pytest.raises(ConfigError, match=r"saved set.*biases.*enable_eplb"):
        group.weights.save_sharded_state("any")
    with pytest.raises(ClientConfigError, match="eplb_step_interval"):
        Driver(group, scheduler, options=DriverOptions(eplb_step_interval=0))


@pytest.mark.parametrize("command", ["generate", exhaustively("bench")])
def test_a_command_rebalances_by_its_options(daemons, skewed, tmp_path, command):
    """The same tokens; the daemons have moved experts. What does not fit the model is refused."""
    endpoints = daemons.endpoints(2)
    drawn = decisive_prompts(skewed, SEED + 3, [13, 9, 21, 7], TOKENS)
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [{"prompt_token_ids": own.tolist(), "max_tokens": TOKENS} for own in drawn]
    source.write_text("".join(json.dumps({**line, "ignore_eos": True}) + "\n" for line in lines))
    words = [command, "--model", skewed.path, "--endpoints", ",".join(endpoints), "--reload"]
    words += ["--tensor-parallel-size", 2, "--input", source, "--output", target, "--force"]
    words += ["--enable-expert-parallel", "--enable-eplb", "--num-gpu-blocks", NUM_BLOCKS]
    done = run_command(*words, "--num-redundant-experts", 3)
    assert "field num_redundant_experts = 3; fix: use 0" in str(done.exception)
    done = run_command(*words, "--num-redundant-experts", 8, "--eplb-step-interval", 4)
    assert done.exit_code == 0, done
    found = [json.loads(line)["token_ids"] for line in target.read_text().splitlines()]
    assert found == [skewed.greedy(own.tolist(), TOKENS) for own in drawn]
    with WorkerGroup(endpoints, worker_config(skewed.path, 1, 1, 2).parallel) as group:
        assert all(has_begun_to_move(status) for status in group.get_status())


def has_begun_to_move(status):
    """Return True if a move was switched, or the end of the driver came first."""
    moves = status.expert_moves
    has_come = any(entry.moved for entry in status.expert_placements)
    return moves.num_switches or moves.num_dropped or has_come


def run_command(*words):
    return CliRunner().invoke(app, list(map(str, words)))


def test_a_service_rebalances_between_its_steps(daemons, skewed):
    config = worker_config(skewed.path, 1, 1, 2, redundant=8)
    (prompt,) = decisive_prompts(skewed, SEED + 4, [9], TOKENS)
    body = {"model": skewed.path.name, "prompt": prompt.tolist(), "max_tokens": TOKENS}
    body |= {"temperature": 0, "ignore_eos": True}
    decode = Tokenizer.from_file(str(skewed.path / "tokenizer.json")).decode
    endpoints = daemons.endpoints(2)
    with service_app(skewed.path, config, endpoints, eplb_step_interval=3) as service:
        text, call = decode(skewed.greedy(prompt.tolist(), TOKENS)), service.context.engine.ask

        def have_switched():
            (choice,) = service.ok("/v1/completions", body)["choices"]
            assert choice["text"] == text
            (statuses,) = service.runner.run(call(lambda driver: driver.group.get_status()))
            return all(status.expert_moves.num_switches for status in statuses)

        wait_until(have_switched, "a switch")


def limits_of(group, path, dp, pp, tp, **options):
    config = worker_config(path, dp, pp, tp, **options)
    return scheduler_limits(group.prepare(config, num_gpu_blocks=NUM_BLOCKS), config)


@pytest.mark.parametrize("rank", [0, exhaustively(1)])
@pytest.mark.parametrize("attempt", [0, *(exhaustively(each) for each in range(1, 6))])
def test_killed_mover_is_replaced_and_gets_the_placement(open_group, daemons, case, rank, attempt):
    """At a random moment of one move after another. All ranks then have one placement, the same
    tokens follow, and experts move again."""
    group, scheduler = open_group(2, 1, 1)
    chance, reports = random.Random(SEED + attempt), []

    def recover(died):
        daemons.restart_dead()
        reports.append(group.replace(died.rank))

    driver, (requests, expected) = Driver(group, scheduler, recover=recover), case
    for request in requests:
        driver.add_request(request)
    outputs = [*driver.step(), *driver.step()]
    rebalance(group, chance)
    killer = threading.Timer(chance.uniform(0.0, 0.05), daemons.kill, [rank])
    killer.start()
    with pytest.raises((WorkerDied, WorkerError)):
        for _ in range(1000):
            rebalance(group, chance)
    killer.join()
    outputs += driver.run()
    assert tokens_of(outputs) == expected, f"seed {SEED}"
    assert [report.loaded_ranks for report in reports] == [(rank,)]
    assert all(len(each) == 1 for each in placements(group).values())
    again, expected = renamed(requests, expected, "again")
    for request in again:
        driver.add_request(request)
    assert rebalance(group, chance)
    assert tokens_of(driver.run()) == expected


@pytest.mark.parametrize("switched", [0, exhaustively(1)])
def test_next_driver_finishes_a_switch_and_adopts_the_requests(open_group, model, case, switched):
    """A driver is lost when one rank has switched. The next one brings the other there; requests
    go on with the same tokens."""
    first, scheduler = open_group(2, 1, 1)
    driver, (requests, expected) = Driver(first, scheduler), case
    for request in requests:
        driver.add_request(request)
    outputs = [output for _ in range(6) for output in driver.step()]
    planned = begin_rebalance(first, random.Random(SEED))
    ask = first.experts._ask

    def dying(build, ranks):
        is_switch = build.func is SwitchExperts
        replies = ask(build, frozenset([switched]) if is_switch else ranks)
        if is_switch:
            raise KeyboardInterrupt
        return replies

    first.experts._ask = dying
    with pytest.raises(KeyboardInterrupt):
        finish(planned)
    assert sorted(len(each) for each in placements(first).values()) == [1, 2]
    config = worker_config(model.path, 2, 1, 1)
    with WorkerGroup([c.endpoint.control for c in first.clients], config.parallel) as group:
        group.attach(force=True, keep_requests=True)
        limits = scheduler_limits(group.prepare(config, num_gpu_blocks=NUM_BLOCKS), config)
        assert [len(each) for each in placements(group).values()] == [1, 1]
        adopted = group.adopt_requests()
        assert len(adopted) + len(outputs) == len(requests)
        scheduler = new_scheduler(2, limits)
        driver = Driver(group, scheduler)
        outputs += scheduler.adopt_requests(adopted)
        assert rebalance(group, random.Random(SEED + 1))
        outputs += driver.run()
        assert tokens_of(outputs) == expected


def test_new_weights_land_in_all_copies(open_group, checkpoint, case, model):
    """A trainer's, and a reload's, after a move: the same tokens as transformers'. Sleep keeps
    them, and the placement."""
    new = checkpoint(ARCHITECTURE, seed=SEED % 1000 + 1, **FIELDS)
    others, tokens = clear_case(new, SEED)
    group, scheduler = open_group(2, 1, 1, redundant=5, enable_sleep_mode=True)
    chance = random.Random(SEED)
    rebalance(group, chance)
    moved = placements(group)
    with WeightSender(group, "gloo", timeout_s=20.0) as sender:
        sender.send(dict(new.model.state_dict()))
        with pytest.raises(ConfigError, match=r"format.*checkpoint"):
            sender.send({"any": torch.zeros(1)}, format="kernel", partial=True)
    assert run(group, scheduler, others) == tokens
    group.memory.sleep(1)
    group.memory.wake_up()
    assert placements(group) == moved
    rebalance(group, chance)
    options = {"redundant": 5, "enable_sleep_mode": True}
    scheduler = new_scheduler(2, limits_of(group, model.path, 2, 1, 1, **options))
    again, expected = renamed(others, tokens, "again")
    assert run(group, scheduler, again) == expected
    group.weights.reload(str(model.path))
    scheduler = new_scheduler(2, limits_of(group, model.path, 2, 1, 1, **options))
    assert run(group, scheduler, case[0]) == case[1]


@pytest.mark.parametrize("quantization", ["fp8", exhaustively("auto")])
def test_every_copy_has_the_bytes_of_its_expert(open_group, quantization):
    """Matrices, and their scales in FP8, are those of the load, on each rank that a move has
    brought them to."""
    group, _ = open_group(2, 1, 1, redundant=3, quantization=quantization)
    loaded = {}
    for reply in group.weights.compute_checksums():
        loaded.update(reply.checksums)
    chance = random.Random(SEED)
    for _ in range(5):
        assert rebalance(group, chance)
        replies = group.weights.compute_checksums()
        held = [name for reply in replies for name in reply.checksums if ".experts." in name]
        assert all(reply.checksums.items() <= loaded.items() for reply in replies)
        assert {name for name in loaded if ".experts." in name} == set(held)
        tensors = len(set(held)) // FIELDS["num_experts"]
        assert len(held) == tensors * (FIELDS["num_experts"] + 3)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("pp", "tp"), [(1, 1), (2, 1), (1, 2)])
def test_saved_set_has_the_experts_wherever_they_are(
    open_group, model_root, tmp_path, case, pp, tp
):
    """Saved after moves, it is read by a group whose experts begin in order, and by a killed rank's
    successor after further moves; the same tokens."""
    with saving_daemons(model_root, *[tmp_path / "saves"] * (2 * pp * tp)) as own:
        options = {"endpoints": own.endpoints, "redundant": 5 if tp == 1 else 9}
        group, _ = open_group(2, pp, tp, **options)
        chance = random.Random(SEED)
        rebalance(group, chance)
        group.weights.save_sharded_state("moved")
        path = tmp_path / "saves" / "moved"
        group, scheduler = open_group(2, pp, tp, path=path, load_format="sharded_state", **options)
        requests, expected = case
        rebalance(group, chance)
        driver = Driver(group, scheduler, recover=lambda died: replaced(own, group, died.rank))
        for request in requests:
            driver.add_request(request)
        outputs = [*driver.step(), *driver.step()]
        kill_and_wait(own.pids[0])
        outputs += driver.run()
        assert tokens_of(outputs) == expected
        assert all(len(each) == 1 for each in placements(group).values())


def replaced(daemons, group, rank):
    daemons.restart_dead()
    return group.replace(rank)


@pytest.mark.exhaustive
@pytest.mark.parametrize("method", ["ngram", "draft_model", "suffix"])
def test_drafts_and_adapters_go_on_through_moves(open_group, checkpoint, case, method):
    """The same tokens, those of an adapter too."""
    base = checkpoint(ARCHITECTURE, seed=SEED % 1000, **FIELDS)
    merged = make_adapter(base, f"moves-{method}", seed=7, targets=ATTENTION)
    room = LoraConfig(max_loras=1, max_lora_rank=4, max_cpu_loras=2)
    drafts = drafts_by(method, base.path)
    group, scheduler = open_group(1, 1, 2, lora=room, speculative=drafts)
    adapter = group.loras.add(f"moves-{method}")
    adapted, expected = adapted_requests([(merged, adapter)], SEED, 4)
    driver = Driver(group, scheduler)
    for request in [*case[0], *adapted]:
        driver.add_request(request)
    outputs, chance = [], random.Random(SEED)
    while driver.busy:
        outputs += driver.step()
        rebalance(group, chance)
    assert tokens_of(outputs) == {**case[1], **expected}


def test_what_cannot_move_is_refused_by_name(open_group, model, daemons, case):
    with pytest.raises(ConfigError, match=r"3 ranks cannot.*num_redundant_experts = 1.*use 2"):
        open_group(3, 1, 1, redundant=1)
    with pytest.raises(ConfigError, match=r"num_redundant_experts = 9.*at most 7"):
        open_group(2, 1, 1, redundant=9)
    with pytest.raises(ConfigError, match=r"one rank has all experts.*enable_eplb"):
        open_group(1, 1, 1)
    group, scheduler = open_group(2, 1, 1)
    links = {status.link for status in group.get_status()}
    with pytest.raises(ConfigError, match="would have an expert twice"):
        twice = np.array([0, 1, 2, 2, 3, 4, 5, 6], "<u2").tobytes()
        group._channel.ask(partial(MoveExperts, placement=ExpertPlacement(layer=0, experts=twice)))
    with pytest.raises(StateError, match=r"layer 0.*move_experts"):
        other = np.array([4, 1, 2, 3, 0, 5, 6, 1], "<u2").tobytes()
        place = ExpertPlacement(layer=0, experts=other)
        group._channel.ask(partial(SwitchExperts, placement=place))
    assert run(group, scheduler, case[0]) == case[1]
    assert {status.link for status in group.get_status()} == links
    plain = replace(worker_config(model.path, 2, 1, 1).model, enable_eplb=False)
    config = replace(worker_config(model.path, 2, 1, 1), model=plain)
    with pytest.raises(ClientConfigError, match=r"num_redundant_experts.*enable_eplb"):
        group.prepare(config, num_gpu_blocks=NUM_BLOCKS, reload=True)
    config = replace(config, model=replace(plain, num_redundant_experts=0))
    group.prepare(config, num_gpu_blocks=NUM_BLOCKS, reload=True)
    with pytest.raises(ClientConfigError, match="enable_eplb"):
        group.experts.rebalance()
    with pytest.raises(ClientConfigError, match="enable_eplb"):
        Driver(group, scheduler, options=DriverOptions(eplb_step_interval=3000))
