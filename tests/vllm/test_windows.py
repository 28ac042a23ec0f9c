"""Models with several KV groups, through vLLM: layers with a window and layers that see everything
give the tokens of our own driver, and the greedy ones those of transformers."""

import pytest

from rpc_schema.kv_cache import request_blocks
from tests.support.checkpoints import VOCAB_SIZE, prompts
from tests.support.flat_requests import changed
from tests.support.serving import generate
from tests.support.window_models import BLOCK_SIZE, MAX_MODEL_LEN, MODELS, WINDOW, make_requests
from tests.vllm.test_parity import run_vllm, tokens_of

STEP_TOKENS = 32
CASES = [
    ("mistral", 1, 1, (1,)),
    ("mixed", 1, 1, (4,)),
    ("mixed", 2, 1, (4, 5)),
    ("upper", 1, 2, (2, 5)),
]
"""Model, stages, ranks of a stage, and how many groups there may be."""


@pytest.fixture(scope="module")
def models(checkpoint):
    """All layers slide; one in four sees everything; the upper ones slide."""
    return {
        name: checkpoint(**fields, sliding_window=WINDOW, seed=21 + index)
        for index, (name, fields) in enumerate(MODELS.items())
    }


def options(num_blocks):
    return {
        "block_size": BLOCK_SIZE,
        "disable_log_stats": False,
        "max_model_len": MAX_MODEL_LEN,
        "max_num_batched_tokens": STEP_TOKENS,
        "max_num_seqs": 6,
        "num_gpu_blocks_override": num_blocks,
    }


def counted(llm, name):
    return sum(each.value for each in llm.get_metrics() if each.name == name)


def as_seeded(requests):
    """Return the requests again, sampled."""
    return [
        changed(each, id=f"{each.id}-seeded", temperature=1.1, top_p=0.95, seed=index)
        for index, each in enumerate(requests)
    ]


@pytest.mark.parametrize(("name", "pp", "tp", "num_groups"), CASES)
def test_tokens_are_those_of_our_driver(ours, engine, models, name, pp, tp, num_groups):
    """Prompts of up to seven windows, in chunks, with so few blocks that those behind windows are
    given to others at once and requests are preempted; then again, from cached prefixes."""
    reference = models[name]
    greedy = make_requests(reference, 3, [61, 9, 40, 22, 5, 33, 14, 70])
    requests = [*greedy, *as_seeded(greedy)]
    sizes = {"max_num_seqs": 6, "max_num_batched_tokens": STEP_TOKENS}
    cache = {"block_size": BLOCK_SIZE, "max_model_len": MAX_MODEL_LEN}
    with ours(reference.path, pp, tp, **sizes, **cache) as served:
        expected = generate(*served, requests).tokens
        groups = served.loaded.groups
    assert len(groups) in num_groups
    for request in greedy:
        prompt = request.prompt.tolist()
        assert expected[request.id] == reference.greedy(prompt, request.max_tokens)
    in_flight = STEP_TOKENS * (pp + 1)  # vLLM keeps blocks until their step has ended
    longest, other = (request_blocks(n, groups, in_flight) for n in (MAX_MODEL_LEN, 110))
    few = 2 + longest + other // 4
    with engine(reference.path, pp, tp, **options(few)) as llm:
        before = counted(llm, "vllm:num_preemptions")
        assert tokens_of(run_vllm(llm, requests)) == expected
        num_preemptions = counted(llm, "vllm:num_preemptions") - before
        assert num_preemptions > 0 or all(each.window is not None for each in groups)
        again = requests[::4]
        assert tokens_of(run_vllm(llm, again)) == {each.id: expected[each.id] for each in again}


def test_shared_prefixes_of_several_windows(ours, engine, models):
    """Requests of one step that begin alike, and others that come later."""
    reference = models["mixed"]
    shared = prompts(1, [50], VOCAB_SIZE)[0].tolist()
    first = make_requests(reference, 1, [53, 55, 56, 62, 80], prefix=shared)
    sampled = as_seeded(first)
    sizes = {"max_num_seqs": 6, "max_num_batched_tokens": 128, "block_size": BLOCK_SIZE}
    with engine(reference.path, 2, **{**options(2000), **sizes}) as llm:
        for requests in (first, sampled, first[::-1]):
            for each, output in run_vllm(llm, requests).items():
                known = next(r for r in requests if r.id == each)
                if not known.sampling.temperature:
                    prompt = known.prompt.tolist()
                    tokens = reference.greedy(prompt, known.max_tokens)
                    assert list(output.outputs[0].token_ids) == tokens
                if requests is not first:
                    wanted = (len(known.prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE
                    assert output.num_cached_tokens == wanted
        outputs = tokens_of(run_vllm(llm, sampled))
    with ours(reference.path, 2, max_model_len=MAX_MODEL_LEN, **sizes) as served:
        assert generate(*served, sampled).tokens == outputs
