"""The experts of requests' tokens: those of transformers' routers, for all positions, however the
model is split and whatever happens to the requests. The same tokens as without."""

import asyncio
import base64
import contextlib
import io
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from rpc_schema.errors import ConfigError
from rpc_schema.extensions import extension_of
from rpc_schema.pooling import PoolingParams
from rpc_schema.routed_experts import MAX_REPORTED_BYTES, ReplayExperts, RoutedExpertsShape
from tests.support import structured
from tests.support.checkpoints import VOCAB_SIZE, prompts
from tests.support.chosen_experts import assert_experts, chosen_experts
from tests.support.exhaustive import exhaustively
from tests.support.service_app import service_app
from tests.support.serving import LONG_LEASE, generate, scheduler_limits, worker_config
from worker_client.async_driver import AsyncDriver
from worker_client.driver import Driver
from worker_client.errors import RequestError
from worker_client.requests import GenerationRequest, SamplingParams
from worker_client.scheduler import Scheduler
from worker_client.worker_group import WorkerGroup

FIELDS = {
    "Qwen2MoeForCausalLM": {"num_experts": 5, "num_hidden_layers": 4, "mlp_only_layers": [1]},
    "Qwen3MoeForCausalLM": {"num_experts": 6, "num_hidden_layers": 3},
    "MixtralForCausalLM": {"num_local_experts": 4, "num_hidden_layers": 2},
    "GptOssForCausalLM": {"num_local_experts": 4, "num_hidden_layers": 2},
}
MAX_TOKENS = 12
SAME = 1e-4
SIZES = {
    "block_size": 4,
    "max_num_seqs": 6,
    "max_num_batched_tokens": 24,
    "max_model_len": 90,
    "enable_return_routed_experts": True,
}


@pytest.fixture
def rng():
    seed = int(np.random.default_rng().integers(1 << 30))
    print("seed", seed)
    return np.random.default_rng(seed)


@pytest.fixture(scope="module")
def model(checkpoint):
    return checkpoint("Qwen2MoeForCausalLM", seed=211, **FIELDS["Qwen2MoeForCausalLM"])


def requests_of(rng, count=9, stem=17):
    """Requests of which most ask. Half of them begin with the same tokens."""
    first = rng.integers(0, VOCAB_SIZE, stem).tolist()
    own = prompts(int(rng.integers(1 << 30)), rng.integers(2, 30, count).tolist())
    return [
        GenerationRequest(
            f"r{index}",
            [*first, *prompt] if index % 2 else prompt,
            MAX_TOKENS,
            routed_experts=index != 2,
        )
        for index, prompt in enumerate(own)
    ]


def assert_all(model, requests, outputs):
    for request in requests:
        output = outputs[request.id]
        assert output.finish_reason in ("length", "stop"), output.error
        if not request.routed_experts:
            assert output.routed_experts is None
            continue
        tokens, replayed = [*request.prompt, *output.token_ids], request.replay_experts
        expected = assert_experts(model.model, tokens, output.routed_experts, replayed)
        for place, found in enumerate(output.full_logprobs or (), len(request.prompt)):
            assert abs(found.full - expected[place - 1, tokens[place]]) < SAME, (request.id, place)


@pytest.mark.usefixtures("each_drafter")
@pytest.mark.parametrize("shape", [(1, 1), (2, 1), exhaustively((1, 2)), exhaustively((2, 2))])
def test_all_positions_have_those_of_transformers(serve, model, rng, shape):
    """In chunks of prompts, with cached prefixes, and after preemptions."""
    requests = requests_of(rng)
    with serve(model.path, *shape, num_gpu_blocks=200, **SIZES) as (group, loaded):
        first = generate(group, loaded, requests)
        again = generate(group, loaded, requests, num_blocks=24)
    assert_all(model, requests, first.outputs)
    assert_all(model, requests, again.outputs)
    assert sum(output.num_cached_tokens for output in first.outputs.values()) > 0
    assert sum(output.num_preemptions for output in again.outputs.values()) > 0


@pytest.mark.parametrize("architecture", list(FIELDS))
def test_each_family_reports_its_routers_choices(serve, checkpoint, rng, architecture):
    """Expert parallelism divides the experts, not the routing."""
    model = checkpoint(architecture, seed=212, **FIELDS[architecture])
    requests = requests_of(rng, 4)
    with serve(model.path, 1, 2, enable_expert_parallel=True, **SIZES) as (group, loaded):
        assert_all(model, requests, generate(group, loaded, requests).outputs)


def driver_of(group, loaded, **options):
    scheduler = Scheduler(scheduler_limits(group, loaded))
    return scheduler, Driver(group, scheduler, **options)


@contextlib.contextmanager
def adopting(endpoints, config, loaded, **options):
    """A driver that takes over the requests of the one before, which is gone; those that had ended
    already, and the positions that have KV."""
    with WorkerGroup(endpoints, config.parallel, lease=LONG_LEASE) as group:
        group.attach(force=True, keep_requests=True)
        assert group.prepare(config, num_gpu_blocks=256).was_loaded
        recover = options.get("recover", lambda group, died: None)
        scheduler, driver = driver_of(group, loaded, recover=partial(recover, group))
        adopted, lost = driver.claim(group.adopt_requests())
        assert not lost
        ended = scheduler.adopt_requests(adopted)
        yield driver, adopted, ended


def steps_of(driver, requests, count):
    for request in requests:
        driver.add_request(request)
    return [output for _ in range(count) for output in driver.step()]


def finish(driver, requests, adopted, ended):
    """The outputs of all requests, those included that had no row to adopt."""
    known = {each.req_id for each in adopted} | {output.req_id for output in ended}
    for request in requests:
        if request.id not in known:
            driver.add_request(request)
    return {output.req_id: output for output in [*ended, *driver.run()]}


def test_next_driver_gets_those_of_all_positions(serve, model, rng):
    """From the blocks: nothing is computed again."""
    requests = requests_of(rng, 5)
    config = worker_config(model.path, 2, **SIZES)
    with serve(model.path, 2, **SIZES) as (group, loaded):
        endpoints = [status.endpoint for status in group.get_status()]
        ended = steps_of(driver_of(group, loaded)[1], requests, 8)
        with adopting(endpoints, config, loaded) as (driver, adopted, done):
            assert sum(each.num_computed_tokens for each in adopted) > 0
            outputs = finish(driver, requests, adopted, [*ended, *done])
    assert_all(model, requests, outputs)


def test_next_driver_replays_what_it_never_had(serve, daemons, model, rng):
    """In the middle of its prompts, with and without their KV, and after a rank has died that had
    kept the experts. Tokens are those of transformers, forced to the experts."""
    with_numbers = replaying(rng, requests_of(rng, 3))
    plain = SamplingParams(ignore_eos=True)
    requests = [
        *with_numbers[:2],
        *(replace(each, id=f"{each.id} goes on", sampling=plain) for each in with_numbers[2:]),
    ]
    config = worker_config(model.path, 2, **SIZES)

    def recover(group, died):
        daemons.restart_dead()
        group.replace(died.rank)

    with serve(model.path, 2, **SIZES) as (group, loaded):
        endpoints = [status.endpoint for status in group.get_status()]
        ended = steps_of(driver_of(group, loaded)[1], requests, int(rng.integers(3, 9)))
        with adopting(endpoints, config, loaded, recover=recover) as (driver, adopted, done):
            replay = [extension_of(each.extensions, ReplayExperts) for each in adopted]
            assert all(replay)
            ended += [*done, *driver.step()]
            daemons.kill(int(rng.integers(2)))
            outputs = finish(driver, requests, adopted, ended)
            assert driver.group.get_status()[0].upload_bytes == 0
    assert_all(model, requests, outputs)
    for request in requests:
        tokens = [*request.prompt, *outputs[request.id].token_ids]
        logprobs = chosen_experts(model.model, tokens, request.replay_experts)[2]
        first = len(request.prompt) + len(request.output_token_ids)
        for place in range(first, len(tokens)):
            best = logprobs[place - 1]
            assert best.max() - best[tokens[place]] < SAME, (request.id, place)


def assert_all_despite_a_death(serve, daemons, model, requests, num_steps, rng):
    """Kill a random one of two ranks after some steps; its successor takes over."""
    with serve(model.path, 2, **SIZES) as (group, loaded):

        def recover(died):
            daemons.restart_dead()
            group.replace(died.rank)

        _, driver = driver_of(group, loaded, recover=recover)
        for request in requests:
            driver.add_request(request)
        ended = [output for _ in range(num_steps) for output in driver.step()]
        daemons.kill(int(rng.integers(2)))
        outputs = {output.req_id: output for output in [*ended, *driver.run()]}
    assert_all(model, requests, outputs)


def test_rank_that_dies_costs_no_position(serve, daemons, model, rng):
    requests = requests_of(rng, 5)
    assert_all_despite_a_death(serve, daemons, model, requests, int(rng.integers(4, 10)), rng)


def test_replies_have_room_for_the_cached_tokens_of_a_step(serve, model, rng):
    """Others wait for the next step."""
    text = rng.integers(0, VOCAB_SIZE, 60).tolist()
    ask = {"max_tokens": 4, "routed_experts": True}
    requests = [GenerationRequest(f"r{index}", [*text, index], **ask) for index in range(6)]
    most = 90
    shape = RoutedExpertsShape(num_layers=MAX_REPORTED_BYTES // 2 // most, top_k=2, num_experts=5)
    assert shape.max_positions == most
    with serve(model.path, **SIZES) as (group, loaded):
        steps, execute = [], group.execute_model

        def note(output):
            steps.append([new.num_computed_tokens for new in output.scheduled_new_reqs])
            return execute(output)

        group.execute_model = note
        scheduler = Scheduler(scheduler_limits(group, loaded, routed_experts=shape))
        driver = Driver(group, scheduler)
        driver.add_request(GenerationRequest("warm", text, 2))
        warm = {output.req_id: output for output in driver.run()}
        assert warm["warm"].routed_experts is None
        for request in requests:
            driver.add_request(request)
        outputs = {output.req_id: output for output in driver.run()}
    assert_all(model, requests, outputs)
    assert max(map(sum, steps)) <= most
    assert sum(map(sum, steps)) >= 6 * 60


def test_streams_bring_each_position_once(serve, model, rng):
    requests = requests_of(rng, 4)

    async def streamed(driver, request):
        chunks, output = [], None
        async for progress in driver.generate(request):
            reports, output = progress.reports, progress.output
            if reports is not None and reports.routed_experts is not None:
                chunks.append(reports.routed_experts)
        return output, chunks

    async def all_of(driver):
        async with AsyncDriver(lambda: contextlib.nullcontext(driver)) as stream:
            return await asyncio.gather(*(streamed(stream, request) for request in requests))

    with serve(model.path, **SIZES) as (group, loaded):
        found = asyncio.run(all_of(driver_of(group, loaded)[1]))
    assert_all(model, requests, {output.req_id: output for output, _ in found})
    for output, chunks in found:
        if output.routed_experts is not None:
            assert len(chunks) > 2
            np.testing.assert_array_equal(np.concatenate(chunks), output.routed_experts)


def replaying(rng, requests):
    """The requests with eight tokens of their outputs, and random experts for a random number of
    first tokens; one of them twice, and once more with other experts."""
    tokens = rng.integers(0, VOCAB_SIZE, (len(requests), 8)).tolist()
    made = []
    for request, output in zip(requests, tokens, strict=True):
        count = int(rng.integers(1, len(request.prompt) + 9))
        made.append(
            replace(
                request,
                max_tokens=8 + 20,
                routed_experts=True,
                output_token_ids=tuple(output),
                sampling=SamplingParams(full_logprobs=True, ignore_eos=True),
                replay_experts=random_experts(rng, count),
            )
        )
    same = replace(made[1], id="same")
    other = random_experts(rng, len(made[1].replay_experts))
    return [*made, same, replace(same, id="other", replay_experts=other)]


def random_experts(rng, count):
    """Experts of Qwen2-MoE's three layers, no two of a token alike."""
    return rng.permuted(np.tile(np.arange(5), (count, 3, 1)), axis=-1)[..., :2]


@pytest.mark.usefixtures("each_drafter")
@pytest.mark.parametrize("shape", [(1, 1), (2, 1), (1, 2), exhaustively((2, 2))])
def test_replayed_experts_are_those_of_transformers_forced_to_them(serve, model, rng, shape):
    """With the log probabilities that follow; in chunks, from cached prefixes of the same experts,
    and after preemptions."""
    requests = replaying(rng, requests_of(rng, 6))
    with serve(model.path, *shape, num_gpu_blocks=200, **SIZES) as (group, loaded):
        first = generate(group, loaded, requests)
        again = generate(group, loaded, requests[-2:])
        full = generate(group, loaded, requests, num_blocks=22)
    for outputs in (first.outputs, full.outputs, first.outputs | again.outputs):
        assert_all(model, requests, outputs)
    assert again.outputs["same"].num_cached_tokens > 0
    assert first.outputs["other"].num_cached_tokens == 0
    assert sum(output.num_preemptions for output in full.outputs.values()) > 0


def test_a_replayed_run_is_the_same(serve, model, rng):
    """Replay of what was reported changes nothing, and a rank that dies in between neither."""
    requests = [
        replace(r, routed_experts=True, sampling=SamplingParams(full_logprobs=True))
        for r in requests_of(rng, 5)
    ]
    with serve(model.path, 2, **SIZES) as (group, loaded):
        outputs = generate(group, loaded, requests).outputs
        again = [
            replace(
                request,
                output_token_ids=tuple(outputs[request.id].token_ids),
                max_tokens=len(outputs[request.id].token_ids),
                replay_experts=outputs[request.id].routed_experts,
            )
            for request in requests
        ]
        replayed = generate(group, loaded, again).outputs
    for request in requests:
        one, two = outputs[request.id], replayed[request.id]
        np.testing.assert_array_equal(one.routed_experts, two.routed_experts)
        np.testing.assert_allclose(one.full_logprobs, two.full_logprobs, atol=SAME)


def test_replay_survives_a_rank(serve, daemons, model, rng):
    requests = replaying(rng, requests_of(rng, 4))
    assert_all_despite_a_death(serve, daemons, model, requests, int(rng.integers(2, 8)), rng)


def test_experts_that_cannot_be_replayed_are_refused(serve, model):
    cases = [
        (np.zeros((3, 2, 2), int), "[3, 2] experts of each token"),
        (np.zeros((3, 3, 1), int), "[3, 2] experts of each token"),
        (np.full((3, 3, 2), 5), "experts from 0 to 4"),
        (np.full((3, 3, 2), -1), "from 0"),
        (np.zeros((3, 3, 2)), "an array of integers"),
        (np.zeros((3, 2), int), "an array of integers"),
        (np.zeros((0, 3, 2), int), "1 to 3 tokens"),
        (np.zeros((4, 3, 2), int), "1 to 3 tokens"),
        ([[[0, 1]]], "an array of integers"),
    ]
    with serve(model.path, **SIZES) as (group, loaded):
        for experts, fix in cases:
            request = GenerationRequest("a", [1, 2, 3], replay_experts=experts)
            with pytest.raises(RequestError) as caught:
                generate(group, loaded, [request])
            assert caught.value.field == "replay_experts"
            assert fix in caught.value.fix


def test_what_cannot_be_reported_is_refused(serve, model, checkpoint):
    asks = GenerationRequest("a", [1, 2, 3], routed_experts=True)
    with serve(model.path) as (group, loaded), pytest.raises(RequestError) as caught:
        generate(group, loaded, [asks])
    assert caught.value.field == "routed_experts"
    with serve(model.path, **SIZES) as (group, loaded):
        pools = replace(asks, pooling=PoolingParams(task="embed"))
        with pytest.raises(RequestError) as caught:
            generate(group, loaded, [pools])
    assert caught.value.field == "routed_experts"
    dense = checkpoint("Qwen2ForCausalLM", seed=31)
    with (
        pytest.raises(ConfigError, match="has no experts; field enable_return_routed_experts"),
        serve(dense.path, enable_return_routed_experts=True),
    ):
        pass


def assert_as_reported(model, request, output, before, num_recomputed=0):
    """The first experts of a request are those reported before an update, the others those of its
    weights."""
    tokens, found = [*request.prompt, *output.token_ids], output.routed_experts
    expected, clear, _ = chosen_experts(model.model, tokens, request.replay_experts)
    assert found.shape == (len(tokens) - 1, 3, 2)
    assert output.num_recomputed_experts == num_recomputed
    np.testing.assert_array_equal(found[: len(before)], before)
    is_new = clear[:-1].all(1) & (np.arange(len(found)) >= len(before))
    np.testing.assert_array_equal(found[is_new], expected[:-1][is_new])


NONE = np.zeros((0, 3, 2))


def settled(scheduler, requests):
    """The experts of each request behind which a token was sampled, or reported."""
    found = {}
    for request in requests:
        count = len(scheduler.generated_tokens(request.id, 0))
        own = scheduler.generated_reports(request.id, 0).routed_experts
        found[request.id] = own[: len(request.prompt) + count - 1].copy() if count else NONE
    return found


def settle(driver):
    """Take the results of all steps in flight."""
    driver.pause()
    ended = []
    while driver.num_in_flight:
        ended += driver.step()
    driver.resume()
    assert not ended


def asking(rng, count):
    made = requests_of(rng, count)
    return [replace(request, id=f"{request.id} asks", routed_experts=True) for request in made]


def test_recomputation_leaves_what_was_reported(serve, model, checkpoint, rng):
    """Those that are kept with the KV are of the weights that have computed it: a request that
    begins with it gets these."""
    other = checkpoint("Qwen2MoeForCausalLM", seed=213, **FIELDS["Qwen2MoeForCausalLM"])
    requests = asking(rng, 3)
    again = [replace(request, id=f"{request.id} again") for request in requests]
    with serve(model.path, 2, **SIZES) as (group, loaded):
        scheduler, driver = driver_of(group, loaded)
        steps_of(driver, requests, 0)
        while not all(map(len, settled(scheduler, requests).values())):
            driver.step()
        settle(driver)
        before = settled(scheduler, requests)
        group.weights.reload(str(other.path), running="recompute")
        assert not group.weights.recomputed.lost_req_ids
        steps_of(driver, again, 0)
        outputs = {output.req_id: output for output in driver.run()}
    for request in (*requests, *again):
        assert_as_reported(other, request, outputs[request.id], before.get(request.id, NONE))
    block_size = SIZES["block_size"]
    longer = [request.id for request in again if len(request.prompt) > block_size]
    assert longer and all(outputs[req_id].num_cached_tokens for req_id in longer)


def test_next_driver_is_told_which_were_recomputed(serve, model, checkpoint, rng):
    """Requests without a token begin again, as their prompts' first experts are of old weights."""
    other = checkpoint("Qwen2MoeForCausalLM", seed=213, **FIELDS["Qwen2MoeForCausalLM"])
    requests = [*asking(rng, 3), *replaying(rng, requests_of(rng, 2))[:2]]
    config = worker_config(other.path, 2, **SIZES)
    with serve(model.path, 2, **SIZES) as (group, loaded):
        endpoints = [status.endpoint for status in group.get_status()]
        scheduler, driver = driver_of(group, loaded)
        ended = steps_of(driver, requests, int(rng.integers(5, 8)))
        settle(driver)
        before = {name: own for name, own in settled(scheduler, requests).items() if "asks" in name}
        group.weights.reload(str(other.path), running="recompute")
        sampled = {name for name, own in before.items() if len(own)}
        assert sampled and sampled.isdisjoint(group.weights.recomputed.lost_req_ids)
        ended += driver.step()
        with adopting(endpoints, config, loaded) as (driver, adopted, done):
            outputs = finish(driver, requests, adopted, [*ended, *done])
    for request in requests:
        num_recomputed = len(before.get(request.id, NONE))
        assert_as_reported(other, request, outputs[request.id], NONE, num_recomputed)


def unpacked(choice):
    return np.load(io.BytesIO(base64.b64decode(choice["routed_experts"])), allow_pickle=False)


def test_service_returns_them_whole_and_streamed(daemons, checkpoint, rng):
    """As vLLM's server: a .npy file in base64, for each choice; streams bring what is new."""
    fields = {"vocab_size": structured.VOCAB_SIZE, "eos_token_id": structured.EOS_TOKEN_ID}
    own = FIELDS["Qwen2MoeForCausalLM"]
    model = checkpoint("Qwen2MoeForCausalLM", seed=214, **own, **fields)
    structured.make_tokenizer(model.path)
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    (model.path / "chat_template.jinja").write_text(template)
    prompt = rng.integers(3, structured.VOCAB_SIZE, 9).tolist()
    ask = {"return_routed_experts": True, "temperature": 0, "max_tokens": 7, "ignore_eos": True}
    completion = {**ask, "prompt": [prompt, prompt[:5]], "n": 2}
    chat = {**ask, "messages": [{"role": "user", "content": "abc ab"}]}
    with service_app(
        model.path, worker_config(model.path, **SIZES), daemons.endpoints(1)
    ) as service:
        whole = service.ok("/v1/completions", completion)["choices"]
        for place, choice in enumerate(whole):
            assert choice["index"] == place
            found = unpacked(choice)
            assert (found.dtype, found.shape) == (np.uint8, ((9, 5)[place // 2] + 6, 3, 2))
        only_prompt = {**completion, "prompt": prompt, "n": 1, "max_tokens": 0}
        (first,) = service.ok("/v1/completions", only_prompt)["choices"]
        assert_experts(model.model, [*prompt, 0], unpacked(first))
        assert (
            "routed_experts" not in service.ok("/v1/completions", {"prompt": prompt})["choices"][0]
        )
        for path, body in (("/v1/completions", completion), ("/v1/chat/completions", chat)):
            whole = service.ok(path, body)["choices"]
            parts = [[] for _ in whole]
            for chunk in service.chunks(path, body):
                for choice in chunk["choices"]:
                    if "routed_experts" in choice:
                        parts[choice["index"]].append(unpacked(choice))
            for choice, own in zip(whole, parts, strict=True):
                np.testing.assert_array_equal(np.concatenate(own), unpacked(choice))
        service.refused("/v1/completions", {"prompt": "a", "return_routed_experts": 1})
    plain = worker_config(model.path, **{**SIZES, "enable_return_routed_experts": False})
    with service_app(model.path, plain, daemons.endpoints(1)) as service:
        for path, body in (("/v1/completions", completion), ("/v1/chat/completions", chat)):
            field, message = service.refused(path, body)
            assert field == "return_routed_experts"
            assert "enable_return_routed_experts" in message
