"""Structured output through vLLM: with the grammar library of our own driver the tokens are that
driver's, with any the same tokens with drafts and without, and each text is what its grammar
allows, by judges that are none of ours."""

import random

import pytest

from tests.support.serving import scheduler_limits
from tests.support.structured import (
    EOS_TOKEN_ID,
    VOCAB_SIZE,
    forced_schema,
    grammar_case,
    random_case,
    regex_case,
    schema_case,
)
from tests.vllm.models import write_tokenizer
from worker_client.driver import Driver
from worker_client.driver_parts.registry import DriverOptions
from worker_client.inputs.request_parser import RequestParser
from worker_client.scheduler import Scheduler
from worker_client.structured.grammars import GrammarLimits, Grammars

MAX_TOKENS = 120
SIZES = {"max_num_seqs": 8, "max_num_batched_tokens": 64}


@pytest.fixture(scope="module")
def model(checkpoint):
    made = checkpoint(vocab_size=VOCAB_SIZE, eos_token_id=EOS_TOKEN_ID, seed=71)
    write_tokenizer(made.path)
    return made


@pytest.fixture
def serve(engine, model):
    """serve(backend, pp, **options): an engine that compiles grammars with this library."""

    def start(backend, pp, **options):
        chosen = {"backend": backend}
        if backend != "outlines":  # which has no such option
            chosen["disable_any_whitespace"] = True
        return engine(
            model.path,
            pp,
            skip_tokenizer_init=False,
            structured_outputs_config=chosen,
            disable_log_stats=False,
            **options,
        )

    return start


def lines_of(cases, rng):
    """Return a request for each grammar as an input line of ours, greedy or sampled."""
    lines = []
    for index, case in enumerate(cases):
        fields = {"temperature": rng.choice([0.7, 1.0, 2.0]), "seed": rng.randrange(1 << 40)}
        prompt = [rng.randrange(4, VOCAB_SIZE) for _ in range(rng.randint(1, 30))]
        lines.append(
            {
                "id": str(index),
                "prompt_token_ids": prompt,
                "max_tokens": MAX_TOKENS,
                "structured_outputs": case.options,
                **(fields if index % 4 else {}),
            }
        )
    return lines


def without_hint(options):
    """Return a grammar without the key that only our driver reads: vLLM has a setting for it."""
    value = options.get("json")
    if not isinstance(value, dict):
        return options
    return {"json": {key: own for key, own in value.items() if key != "x-guidance"}}


def run_vllm(llm, lines):
    """Return vLLM's tokens of each line."""
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    prompts = [{"prompt_token_ids": line["prompt_token_ids"]} for line in lines]
    params = [
        SamplingParams(
            temperature=line.get("temperature", 0.0),
            seed=line.get("seed"),
            max_tokens=line["max_tokens"],
            structured_outputs=StructuredOutputsParams(**without_hint(line["structured_outputs"])),
        )
        for line in lines
    ]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def check(case, tokens, tokenizer):
    """Check a text that has ended; return whether it has."""
    if tokens[-1] != EOS_TOKEN_ID:
        return False
    case.check(tokenizer.decode(tokens, skip_special_tokens=True))
    return True


def kinds(rng):
    """Return some grammars of each kind, whose texts are short."""
    made = [schema_case(forced_schema(rng, 0)) for _ in range(6)]
    made += [grammar_case(rng) for _ in range(4)]
    return [*made, regex_case("[ab]{3}-[0-9]{2}"), regex_case("(red|green){2}[a-f0-9]{4}")]


@pytest.mark.parametrize(("pp", "num_blocks"), [(1, 20), (2, 256)])
def test_tokens_are_those_of_our_driver(serve, ours, model, pp, num_blocks):
    """In batches with few blocks, where requests are preempted, and from cached prefixes.

    vLLM's matcher refuses forced text that is an added token, which our driver serves.
    """
    rng = random.Random(31 + pp)
    cases = [*kinds(rng), *(random_case(rng, tagged=False) for _ in range(16))]
    cases = [case for case in cases if not isinstance(case.options.get("json"), str)]
    lines = lines_of(cases, rng)
    grammars = Grammars(model.path, VOCAB_SIZE, [EOS_TOKEN_ID], GrammarLimits(max_jump=0))
    with ours(model.path, pp, **SIZES) as (group, loaded):
        scheduler = Scheduler(scheduler_limits(group, loaded))
        driver = Driver(group, scheduler, options=DriverOptions(grammars))
        parser = RequestParser(None, seed=1)
        for index, line in enumerate(lines):
            driver.add_request(parser.from_fields(line, index))
        outputs = {output.req_id: output.token_ids for output in driver.run()}
    grammars.close()
    expected = [outputs[line["id"]] for line in lines]
    with serve("guidance", pp, num_gpu_blocks_override=num_blocks) as llm:
        for _ in range(2):
            assert run_vllm(llm, lines) == expected
        preemptions = [each for each in llm.get_metrics() if each.name == "vllm:num_preemptions"]
        assert sum(each.value for each in preemptions) > 0 or pp == 2
        tokenizer = llm.get_tokenizer()
        ended = [check(*pair, tokenizer) for pair in zip(cases, expected, strict=True)]
    assert sum(ended) > 0.8 * len(cases)


def test_texts_are_what_their_grammars_allow(serve):
    """With the library that vLLM chooses."""
    rng = random.Random(41)
    cases = kinds(rng)
    with serve("xgrammar", 2) as llm:
        tokens = run_vllm(llm, lines_of(cases, rng))
        tokenizer = llm.get_tokenizer()
        ended = [check(*pair, tokenizer) for pair in zip(cases, tokens, strict=True)]
    assert sum(ended) > 0.5 * len(cases)


def repeating_lines(rng):
    """Return lines whose outputs repeat themselves, and their prompts: drafts are often right."""
    words = {"type": "array", "items": {"enum": ["red", "green"]}, "minItems": 4, "maxItems": 9}
    schema = {
        "type": "object",
        "properties": {"colors": words, "more": words},
        "required": ["colors", "more"],
        "additionalProperties": False,
    }
    cases = [regex_case("(abc|abe){4,12}-[0-9]{3}"), schema_case(schema)] * 4
    lines = lines_of(cases, rng)
    for line in lines:
        line["prompt_token_ids"] *= 1 + 12 // len(line["prompt_token_ids"])
    return cases, lines


def accepted(llm):
    """Return the numbers of drafts that vLLM counts as given and as accepted."""
    counts = {each.name: each.value for each in llm.get_metrics() if hasattr(each, "value")}
    return [counts[f"vllm:spec_decode_num_{name}_tokens"] for name in ("draft", "accepted")]


@pytest.mark.parametrize(
    ("backend", "pp", "num_blocks"),
    [("guidance", 1, 256), ("xgrammar", 1, 24), ("xgrammar", 2, 256), ("outlines", 1, 256)],
)
def test_drafts_of_the_devices_change_no_token(serve, model, backend, pp, num_blocks):
    """Greedy and sampled ones, alone and beside requests without a grammar, in batches with few
    blocks, and from cached prefixes. All requests have a grammar, so each accepted draft is of
    one."""
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    rng = random.Random(seed)
    cases, lines = repeating_lines(rng)
    with serve(backend, pp) as llm:
        expected = run_vllm(llm, lines)
        tokenizer = llm.get_tokenizer()
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}
    options = {"speculative_config": drafts, "num_gpu_blocks_override": num_blocks}
    with serve(backend, pp, **options) as llm:
        for _ in range(2):
            assert run_vllm(llm, lines) == expected
        given, taken = accepted(llm)
    ended = [check(*pair, tokenizer) for pair in zip(cases, expected, strict=True)]
    assert sum(ended) > 0.5 * len(cases)
    assert taken > 50 and given > taken
