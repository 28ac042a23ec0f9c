"""Prompts with embeddings through vLLM: whole, between token ids, over HTTP, while a daemon dies.
Tokens are those of transformers' inputs_embeds, or of the same prompt by token ids."""

import base64
import concurrent.futures
import io
import shutil
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from tokenizers import Tokenizer
from vllm import SamplingParams
from vllm.utils.hashing import sha256_cbor
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

from tests.support.command_line import short_directory, status_of
from tests.support.embedded_prompts import clear_tokens, random_prompts, random_rows
from tests.support.supervised import Supervised
from tests.support.waiting import wait_until
from tests.vllm.conftest import BLOCK_SIZE as KV_BLOCK_SIZE
from tests.vllm.serving import CHAT_TEMPLATE, DAEMON_PYTHON, MODEL_NAME, SMALL, start_server
from worker_client.cli.demo_model import VOCAB_SIZE
from worker_client.vllm.embedded_prompts import salt_request

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]

NUM_TOKENS = 8
BLOCK_SIZE = 2
LIMIT_S = 120.0


# ---------------------------------------------------------------- in this process


@pytest.fixture(scope="module")
def model(checkpoint):
    return checkpoint(seed=43)


@pytest.fixture(scope="module")
def llm(engine, model):
    with engine(model.path, enable_prompt_embeds=True) as llm:
        yield llm


def as_vllm(prompt):
    """Return one of tests.support.embedded_prompts as vLLM takes it."""
    if not prompt.token_ids:
        return {"prompt_embeds": prompt.rows}
    is_token = np.ones(len(prompt.ids), np.bool_)
    for start, length in prompt.at or ((0, len(prompt.rows)),):
        is_token[start : start + length] = False
    whole = torch.zeros(len(prompt.ids), prompt.rows.shape[1], dtype=prompt.rows.dtype)
    whole[torch.from_numpy(~is_token)] = prompt.rows
    ids = np.where(is_token, prompt.ids, 100_000)  # as that of a tokenizer's added token
    return {
        "prompt_embeds": whole,
        "prompt_token_ids": ids.tolist(),
        "prompt_is_token_ids": is_token.tolist(),
    }


def run(llm, prompts, **fields):
    """Return the tokens of some prompts, served together."""
    given = {"temperature": 0.0, "max_tokens": NUM_TOKENS, "ignore_eos": True, "detokenize": False}
    params = SamplingParams(**{**given, **fields})
    return [
        list(each.outputs[0].token_ids) for each in llm.generate(prompts, params, use_tqdm=False)
    ]


def test_tokens_are_those_of_transformers(llm, model):
    cases = []
    for prompt in random_prompts(model, 17):
        tokens = clear_tokens(model, prompt, NUM_TOKENS)
        if tokens is not None:
            cases.append((as_vllm(prompt), tokens))
        if len(cases) == 15:
            break
    prompts = [prompt for prompt, _ in cases]
    expected = [tokens for _, tokens in cases]
    assert run(llm, prompts) == expected
    assert run(llm, prompts) == expected  # from the prefix cache


def test_rows_and_tokens_of_id_zero_are_different_prompts(llm, model):
    """vLLM's own block hashes are equal here: a chat has rows at positions of tokens too."""
    zeros = torch.zeros(KV_BLOCK_SIZE, dtype=torch.long)
    with torch.no_grad():
        embedded = model.model.get_input_embeddings()(zeros)
    rows = random_rows(np.random.default_rng(5), KV_BLOCK_SIZE + 2, embedded.shape[1])
    own = rows[KV_BLOCK_SIZE:]
    mixed = {
        "prompt_embeds": rows,
        "prompt_token_ids": [0] * len(rows),
        "prompt_is_token_ids": [True] * KV_BLOCK_SIZE + [False] * len(own),
    }
    expected = [first_logprob(model, each) for each in (rows, torch.cat([embedded, own]))]
    assert abs(expected[0] - expected[1]) > 0.01
    params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=0, detokenize=False)
    llm.reset_prefix_cache()
    found = []
    for prompt in ({"prompt_embeds": rows}, mixed):
        (output,) = llm.generate([prompt], params, use_tqdm=False)
        (entry,) = output.outputs[0].logprobs[0].values()
        found.append(entry.logprob)
    assert found == pytest.approx(expected, abs=1e-4)


def first_logprob(model, rows):
    """Return transformers' log probability of the most likely token after some rows."""
    with torch.no_grad():
        logits = model.model(inputs_embeds=rows[None]).logits[0, -1]
    return logits.log_softmax(-1).max().item()


def test_wrong_prompts_are_refused_alone(llm, model):
    width = model.model.config.hidden_size
    rows = torch.zeros(4, width)
    ids = {"prompt_token_ids": [5, 6, 7, 8]}
    wrong = {
        "hidden size": {"prompt_embeds": torch.zeros(4, width + 1)},
        "floating-point": {"prompt_embeds": torch.zeros(4, width, dtype=torch.int64)},
        "no position": {"prompt_embeds": rows, "prompt_is_token_ids": [True] * 4, **ids},
        "unknown": {
            "prompt_embeds": rows,
            "prompt_token_ids": [5, 6, 7, 100_000],
            "prompt_is_token_ids": [False, True, True, True],
        },
    }
    good = {"prompt_token_ids": [5, 6, 7]}
    alone = run(llm, [good])
    for problem, prompt in wrong.items():
        outputs = llm.generate(
            [good, prompt],
            SamplingParams(
                temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, detokenize=False
            ),
            use_tqdm=False,
        )
        assert [list(outputs[0].outputs[0].token_ids)] == alone, problem
        assert outputs[1].outputs[0].finish_reason == "error", problem


# ---------------------------------------------------------------- vLLM's block hashes

ROWS = torch.tensor([[0.0], [1.0]])
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
init_none_hash(sha256_cbor)
HASHER = get_request_block_hasher(BLOCK_SIZE, sha256_cbor)


@dataclass(frozen=True)
class Variant:
    """What else a request with some rows and token ids may say."""

    dtype: torch.dtype
    is_token: list[bool] | None
    has_ids: bool
    salt: str | None

    def request(self, rows, ids):
        """Return vLLM's Request, as our scheduler has it."""
        made = Request(
            "a",
            ids if self.has_ids else None,
            SamplingParams(max_tokens=4),
            None,
            prompt_embeds=rows.to(self.dtype),
            prompt_is_token_ids=self.is_token,
            cache_salt=self.salt,
            block_hasher=HASHER,
        )
        salt_request(made, "torch.float32")
        return made

    def contents(self, rows, ids):
        """Return what the KV cache of each position follows from, with those before it."""
        is_token = self.is_token or [False] * len(ids)
        places = zip(ids, rows[:, 0].tolist(), is_token, strict=True)
        return [
            (self.salt, "token", token) if counts else (self.salt, self.dtype, row)
            for token, row, counts in places
        ]


@st.composite
def pairs(draw):
    """Two requests with the same few token ids and rows."""
    num_tokens = draw(st.integers(2, 4))
    zeros = st.lists(st.integers(0, 1), min_size=num_tokens, max_size=num_tokens)
    mask = st.none() | st.lists(st.booleans(), min_size=num_tokens, max_size=num_tokens)
    salts = st.sampled_from([None, "a"])
    variants = st.builds(Variant, st.sampled_from(DTYPES), mask, st.booleans(), salts)
    return ROWS[draw(zeros)], draw(zeros), draw(variants), draw(variants)


@settings(max_examples=300)
@given(pairs())
def test_prompts_of_one_block_hash_have_equal_contents(drawn):
    rows, ids, *variants = drawn
    assume(all(each.has_ids or not any(each.is_token or ()) for each in variants))
    hashes = [each.request(rows, ids).block_hashes for each in variants]
    contents = [each.contents(rows, ids) for each in variants]
    for place, (one, other) in enumerate(zip(*hashes, strict=True)):
        end = (place + 1) * BLOCK_SIZE
        assert one != other or contents[0][:end] == contents[1][:end]


# ---------------------------------------------------------------- over HTTP


@pytest.fixture(scope="module")
def directory():
    path = short_directory()
    yield path
    shutil.rmtree(path)


@pytest.fixture(scope="module")
def daemons(root, directory):
    daemons = Supervised(2, root, directory, python=DAEMON_PYTHON)
    yield daemons
    daemons.close()


@pytest.fixture(scope="module")
def server(daemons, root):
    template = root / "chat.jinja"
    template.write_text(CHAT_TEMPLATE)
    words = ("--enable-prompt-embeds", "--pipeline-parallel-size", "2")
    server = start_server(
        daemons.endpoints,
        root / "demo",
        root,
        *words,
        options={**SMALL, "--chat-template": str(template)},
        settings={"replace_within_s": 90.0},
        variables={"VLLM_LOGGING_LEVEL": "INFO"},
    )
    try:
        server.wait_until_ready()
        yield server
    finally:
        server.close()


@pytest.fixture(scope="module")
def table(root):
    """The checkpoint's embeddings."""
    return load_file(root / "demo" / "model.safetensors")["model.embed_tokens.weight"]


def as_text(tensor):
    """Return a tensor as vLLM's API takes it."""
    buffer = io.BytesIO()
    torch.save(tensor, buffer)  # noqa: TID251  # vLLM's format
    return base64.b64encode(buffer.getvalue()).decode()


def prompts(seed, count):
    """Return token ids; some prompts begin alike."""
    rng = np.random.default_rng(seed)
    shared = rng.integers(1, VOCAB_SIZE, 40)
    lengths = rng.integers(3, 90, count)
    drawn = [rng.integers(1, VOCAB_SIZE, n) for n in lengths]
    return [
        np.concatenate([shared[: n // 3], own]) if n % 2 else own
        for n, own in zip(lengths.tolist(), drawn, strict=True)
    ]


def tokens_of(answer):
    return [choice["token_ids"] for choice in answer["choices"]]


FIELDS = {"max_tokens": 30, "ignore_eos": True, "return_token_ids": True}


def together(server, bodies):
    """Return the tokens of completions asked for at once."""
    with concurrent.futures.ThreadPoolExecutor(len(bodies)) as pool:
        answers = pool.map(
            lambda body: server.complete(**{"prompt": None, **body}, **FIELDS), bodies
        )
        return [tokens_of(each) for each in answers]


def num_upload_bytes(daemons):
    return [status_of(each).upload_bytes for each in daemons.endpoints]


def test_embeddings_of_tokens_give_the_same_text_as_their_ids(server, daemons, table):
    asked = prompts(3, 12)
    expected = together(server, [{"prompt": ids.tolist()} for ids in asked])
    embedded = [{"prompt_embeds": as_text(table[torch.from_numpy(ids)])} for ids in asked]
    plain = [{"prompt": ids.tolist()} for ids in prompts(4, 4)]
    assert together(server, embedded + plain)[: len(asked)] == expected
    assert together(server, embedded) == expected  # from the prefix cache
    wait_until(lambda: num_upload_bytes(daemons) == [0, 0], "the uploads are dropped", LIMIT_S)


def test_several_prompts_and_samples_of_one_body(server, table):
    first, second, third = prompts(5, 3)
    rows = [as_text(table[torch.from_numpy(ids)].to(torch.bfloat16)) for ids in (first, second)]
    fields = {"n": 2, "seed": 0, "temperature": 0.9, **FIELDS}
    exact = [as_text(table[torch.from_numpy(ids)]) for ids in (first, second)]
    by_ids = server.complete([first.tolist(), second.tolist()], **fields)
    assert tokens_of(server.complete(None, prompt_embeds=exact, **fields)) == tokens_of(by_ids)
    both = server.complete(third.tolist(), prompt_embeds=rows, **FIELDS)  # ids come last
    assert tokens_of(both)[-1:] == tokens_of(server.complete(third.tolist(), **FIELDS))


def test_embeddings_between_the_words_of_a_chat(server, root, table):
    tokenizer = Tokenizer.from_file(str(root / "demo" / "tokenizer.json"))
    parts = [tokenizer.encode(text).ids for text in ("The", " driver", " decides")]
    content = [
        {"type": "text", "text": "The"},
        {"type": "prompt_embeds", "data": as_text(table[parts[1]])},
        {"type": "text", "text": " decides"},
    ]
    messages = [{"role": "user", "content": content}]
    body = {"model": MODEL_NAME, "messages": messages, "temperature": 0.0, **FIELDS}
    answer = server.post("/v1/chat/completions", body)
    assert answer.status_code == 200, answer.text
    plain = server.complete([*parts[0], *parts[1], *parts[2]], **FIELDS)
    assert tokens_of(answer.json()) == tokens_of(plain)


def test_what_embeddings_do_not_allow_is_refused(server, table):
    rows = as_text(table[:5])
    refused = {
        "hidden_size": {"prompt_embeds": as_text(torch.zeros(5, 8))},
        "dtype": {"prompt_embeds": as_text(table[:5].long())},
        "2D": {"prompt_embeds": as_text(table[0])},
        "base64": {"prompt_embeds": "~"},
        "prompt_logprobs": {"prompt_embeds": rows, "prompt_logprobs": 1},
    }
    for problem, body in refused.items():
        answer = server.try_to_complete(None, **body)
        assert answer.status_code == 400, (problem, answer.text)
    assert "prompt_logprobs" in answer.json()["error"]["message"]
    good = server.complete(None, prompt_embeds=rows, **FIELDS)
    assert tokens_of(good) == tokens_of(server.complete([0, 1, 2, 3, 4], **FIELDS))


@pytest.mark.parametrize("rank", [0, 1])
def test_killed_daemon_gets_the_embeddings_again(server, daemons, table, rank):
    asked = prompts(6 + rank, 10)
    expected = together(server, [{"prompt": ids.tolist()} for ids in asked])
    embedded = [{"prompt_embeds": as_text(table[torch.from_numpy(ids)])} for ids in asked]
    before = server.log().count("replaced ranks")
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        answers = pool.submit(together, server, embedded)
        wait_until(lambda: num_upload_bytes(daemons)[0] > 0, "embeddings are uploaded", LIMIT_S)
        daemons.kill(rank)
        daemons.restart_later(rank)
        assert answers.result() == expected
    assert server.log().count("replaced ranks") == before + 1
    wait_until(lambda: num_upload_bytes(daemons) == [0, 0], "the uploads are dropped", LIMIT_S)
