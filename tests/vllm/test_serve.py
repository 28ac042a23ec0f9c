"""`vllm serve` on one daemon, by HTTP: what it serves and what it refuses. The demo's
model continues its sentences; log probabilities and adapters are compared with transformers."""

import concurrent.futures
import contextlib
import json
import random
import re
import subprocess
import sys
import time

import jsonschema
import pytest
import torch
import transformers
from tokenizers import Tokenizer

from tests.support.checkpoints import Checkpoint
from tests.support.command_line import status_of
from tests.vllm.models import merged, write_adapter
from tests.vllm.serving import (
    CHAT_TEMPLATE,
    MODEL_NAME,
    ROOT,
    SMALL,
    serving,
    start_daemons,
    start_server,
    vllm_environment,
)
from worker_client.cli.demo_model import VOCAB_SIZE

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]

PROMPT = "The driver"
SENTENCE = " decides which requests run in a step and sends one small message to every daemon."
NOWHERE = "ipc:///nowhere/w0"


@pytest.fixture(scope="module")
def daemons(root):
    with start_daemons(1, root) as daemons:
        yield daemons


@pytest.fixture(scope="module")
def server(root, daemons):
    template = root / "chat.jinja"
    template.write_text(CHAT_TEMPLATE)
    profiler = {"profiler": "torch", "torch_profiler_dir": str(root / "profiles")}
    options = {
        **SMALL,
        "--chat-template": str(template),
        "--max-lora-rank": "8",
        "--profiler-config": json.dumps(profiler),
    }
    variables = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
    flags = ("--enable-sleep-mode", "--enable-lora", "--enable-request-id-headers")
    model, settings = root / "demo", {"lora_root": str(root)}
    with serving(
        daemons.endpoints,
        model,
        root,
        *flags,
        options=options,
        settings=settings,
        variables=variables,
    ) as server:
        yield server


@pytest.fixture(scope="module")
def tokenizer(root):
    return Tokenizer.from_file(str(root / "demo" / "tokenizer.json"))


@pytest.fixture
def alive(server):
    """The server answers before and after."""
    yield server
    assert server.text(PROMPT, max_tokens=40) == SENTENCE
    assert server.client.get("/health").status_code == 200


# ---------------------------------------------------------------- what is served


def test_text_and_usage(server, tokenizer):
    answer = server.complete(PROMPT, max_tokens=40)
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == (SENTENCE, "stop")
    assert answer["usage"]["prompt_tokens"] == len(tokenizer.encode(PROMPT).ids)


def test_a_stream_has_the_same_tokens(server):
    events = list(server.stream(PROMPT, max_tokens=40))
    assert "".join(event["choices"][0]["text"] for event in events) == SENTENCE
    assert len(events) > 5


def test_many_at_once_are_as_one_by_one(server):
    """Greedy and seeded; the prompts share their first tokens with others."""
    source = random.Random(71)
    shared = [source.randrange(1, VOCAB_SIZE) for _ in range(60)]
    asked = [
        {
            "prompt": shared[: source.randrange(60)]
            + [source.randrange(1, VOCAB_SIZE) for _ in range(source.randrange(1, 40))],
            "max_tokens": source.randrange(5, 30),
            "ignore_eos": True,
            "temperature": source.choice((0.0, 1.5)),
            "seed": source.randrange(1 << 40),
            "return_token_ids": True,
        }
        for _ in range(24)
    ]

    def ask(fields):
        return server.complete(**fields)["choices"][0]["token_ids"]

    with concurrent.futures.ThreadPoolExecutor(len(asked)) as pool:
        together = list(pool.map(ask, asked))
    assert server.post("/reset_prefix_cache").json() == {"success": True}
    assert together == [ask(fields) for fields in asked]
    assert [len(tokens) for tokens in together] == [fields["max_tokens"] for fields in asked]


def test_chat(server):
    body = {
        "model": MODEL_NAME,
        "messages": [{"role": "user", "content": PROMPT}],
        "temperature": 0.0,
        "max_tokens": 40,
        "logprobs": True,
        "top_logprobs": 2,
    }
    answer = server.post("/v1/chat/completions", body).json()
    (choice,) = answer["choices"]
    assert choice["message"]["content"] == SENTENCE
    for token in choice["logprobs"]["content"][:-1]:
        assert token["token"] == token["top_logprobs"][0]["token"]
        assert len(token["top_logprobs"]) == 2


def test_several_samples_and_seeds(server):
    fields = {"max_tokens": 12, "temperature": 2.0, "n": 4, "ignore_eos": True}
    prompt = [7, 301, 44]

    def texts(seed):
        return [each["text"] for each in server.complete(prompt, seed=seed, **fields)["choices"]]

    first = texts(5)
    assert first == texts(5)
    assert len(set(first)) > 1
    assert first != texts(6)


def test_log_probabilities_are_those_of_transformers(server, root):
    model = transformers.LlamaForCausalLM.from_pretrained(root / "demo", dtype=torch.float32).eval()
    source = random.Random(72)
    prompt = [source.randrange(1, VOCAB_SIZE) for _ in range(9)]
    answer = server.complete(
        prompt, max_tokens=6, logprobs=3, echo=True, return_token_ids=True, ignore_eos=True
    )
    (choice,) = answer["choices"]
    ids = prompt + choice["token_ids"][-6:]
    with torch.inference_mode():
        expected = model(torch.tensor([ids])).logits[0].log_softmax(dim=-1)
    given = choice["logprobs"]["token_logprobs"]
    assert given[0] is None
    wanted = [expected[at, token].item() for at, token in enumerate(ids[1:])]
    assert given[1:] == pytest.approx(wanted, abs=1e-3)


def test_stop_strings(server):
    answer = server.complete(PROMPT, max_tokens=40, stop=["requests"])
    (choice,) = answer["choices"]
    assert (choice["text"], choice["stop_reason"]) == (" decides which ", "requests")
    text = server.text(PROMPT, max_tokens=40, stop=["run"], include_stop_str_in_output=True)
    assert text == " decides which requests run"


@pytest.mark.parametrize(
    ("wanted", "form"),
    [
        ({"choice": ["yes", "no"]}, "yes|no"),
        ({"regex": "[0-9]{3}-[a-c]"}, "[0-9]{3}-[a-c]"),
        ({"grammar": 'root ::= "left" | "right"'}, "left|right"),
    ],
    ids=["choice", "regex", "grammar"],
)
def test_guided_output(server, wanted, form):
    text = server.text(PROMPT, max_tokens=30, structured_outputs=wanted)
    assert re.fullmatch(form, text)


def test_guided_json(server, tokenizer):
    schema = {
        "type": "object",
        "properties": {"warm": {"type": "boolean"}, "rank": {"enum": [3, 5]}},
        "required": ["warm", "rank"],
        "additionalProperties": False,
    }
    spaces = [each for each in range(VOCAB_SIZE) if not tokenizer.decode([each]).strip()]
    fields = {
        "structured_outputs": {"json": schema},
        "logit_bias": {str(each): -100 for each in spaces},
    }
    value = json.loads(server.text(PROMPT, max_tokens=60, **fields))
    assert isinstance(value["warm"], bool)
    assert value["rank"] in (3, 5)


SCHEMA = {
    "type": "object",
    "properties": {
        "warm": {"type": "boolean"},
        "rank": {"type": "integer", "minimum": 0, "maximum": 9},
        "names": {"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 1, "maxItems": 2},
    },
    "required": ["warm", "rank", "names"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_response_format(server, tokenizer, path):
    """OpenAI's form of a grammar, streamed with others that have none."""
    spaces = [each for each in range(VOCAB_SIZE) if not tokenizer.decode([each]).strip()]
    body = {
        "model": MODEL_NAME,
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "status", "schema": SCHEMA},
        },
        "logit_bias": {str(each): -100 for each in spaces},
        "max_tokens": 80,
    }
    is_chat = "chat" in path
    asked = {"messages": [{"role": "user", "content": PROMPT}]} if is_chat else {"prompt": PROMPT}

    def ask(seed):
        answer = server.post(path, {**body, **asked, "seed": seed, "temperature": 1.0})
        assert answer.status_code == 200, answer.text
        (choice,) = answer.json()["choices"]
        assert choice["finish_reason"] == "stop"
        return choice["message"]["content"] if is_chat else choice["text"]

    with concurrent.futures.ThreadPoolExecutor(9) as pool:
        plain = pool.submit(server.text, PROMPT, max_tokens=40)
        texts = list(pool.map(ask, [*range(6), 0, 1]))
    assert plain.result() == SENTENCE
    for text in texts:
        jsonschema.validate(json.loads(text), SCHEMA)
    assert texts[6:] == texts[:2]
    assert len({*texts}) > 1


# ---------------------------------------------------------------- what is refused

REFUSED = {
    "watermarking": ({"watermarking": True}, "watermarking"),
    "thinking budget": ({"thinking_token_budget": 5}, "thinking_token_budget"),
    "routed experts": ({"routed_experts_prompt_start": 1}, "routed_experts_prompt_start"),
    "all log probabilities": ({"logprobs": -1}, "logprobs"),
    "many log probabilities": ({"logprobs": 21}, "logprobs"),
    "all prompt log probabilities": ({"prompt_logprobs": -1}, "prompt_logprobs"),
    "many named tokens": (
        {"logprobs": 1, "logprob_token_ids": list(range(200))},
        "logprob_token_ids",
    ),
    "unknown argument": ({"vllm_xargs": {"unknown": 1}}, "extra_args.unknown"),
    "unknown processor": ({"vllm_xargs": {"logits_processors": ["none"]}}, "logits_processors"),
    "processor's name": ({"vllm_xargs": {"logits_processors": [3]}}, "logits_processors"),
    "processors' names": ({"vllm_xargs": {"logits_processors": 3}}, "logits_processors"),
    "KV transfer": ({"kv_transfer_params": {"a": 1}}, "kv_transfer_params"),
    "encoder transfer": ({"ec_transfer_params": {"a": 1}}, "ec_transfer_params"),
    "embeddings": ({"prompt_embeds": "AAAA"}, "prompt_embeds"),
    "wide beam": ({"use_beam_search": True, "n": 12}, "logprobs"),
    "many stop tokens": ({"stop_token_ids": list(range(2000)), "min_tokens": 2}, "token_id"),
    "many biases": ({"logit_bias": {str(each): 1 for each in range(5000)}}, "token_id"),
    "long bad word": ({"bad_words": ["~ " * 40]}, "bad_words"),
    "many bad words": ({"bad_words": [f"a{each}" for each in range(1000)]}, "bad words"),
    "huge seed": ({"seed": 1 << 80, "temperature": 1.0}, "seed"),
    "no token allowed": ({"allowed_token_ids": []}, "allowed_token_ids"),
    "unknown token allowed": ({"allowed_token_ids": [VOCAB_SIZE]}, "allowed_token_ids"),
    "large penalty": ({"repetition_penalty": 1e9}, "repetition_penalty"),
    "small penalty": ({"repetition_penalty": 1e-9}, "repetition_penalty"),
    "huge top_k": ({"top_k": 10**12, "temperature": 1.0}, "top_k"),
    "unknown prompt token": ({"prompt": [5, 50_000]}, "50000"),
    "long prompt": ({"prompt": [5] * 1024}, "max_tokens"),
    "broken expression": ({"structured_outputs": {"regex": "[0-9"}}, "regex"),
    "broken schema": (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "a", "schema": {"type": "nothing"}},
            }
        },
        "nothing",
    ),
    "broken grammar": ({"structured_outputs": {"grammar": "root ::= nope"}}, "grammar"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_request_is_refused_and_names_the_field(alive, case):
    fields, name = REFUSED[case]
    answer = alive.try_to_complete(**{"prompt": PROMPT, "max_tokens": 4, **fields})
    assert answer.status_code == 400, answer.text
    assert name in answer.json()["error"]["message"]


def test_refusals_in_a_batch_leave_the_others_alone(server):
    """Some are refused by the front end, some only in the scheduler."""
    bad = [{"vllm_xargs": {"unknown": 1}}, {"repetition_penalty": 1e9}, {"bad_words": ["~ " * 40]}]
    asked = [{"max_tokens": 40}, *bad] * 6
    with concurrent.futures.ThreadPoolExecutor(len(asked)) as pool:
        answers = list(pool.map(lambda fields: server.try_to_complete(PROMPT, **fields), asked))
    for fields, answer in zip(asked, answers, strict=True):
        assert answer.status_code == (400 if fields in bad else 200)
        if fields not in bad:
            assert answer.json()["choices"][0]["text"] == SENTENCE


ODD_IDS = {
    "long": "x" * 300,
    "longest that is sent as it is": "y" * 240,
    "separators": "../..;{}%s\\\"'",
    "no ASCII": "\u00e4\u00ff \u00e9",
}


@pytest.mark.parametrize("case", ODD_IDS)
def test_odd_request_ids(alive, case):
    headers = {"X-Request-Id": ODD_IDS[case].encode("latin-1")}
    for _ in range(2):
        assert alive.text(PROMPT, max_tokens=40, headers=headers) == SENTENCE


@pytest.mark.parametrize("seed", [2**63 - 1, -(2**63), -2, 0])
def test_extreme_seeds(alive, seed):
    fields = {"seed": seed, "temperature": 2.0, "max_tokens": 8, "ignore_eos": True}
    assert alive.text([7, 301, 44], **fields) == alive.text([7, 301, 44], **fields)


# ---------------------------------------------------------------- operations


def test_sleep_and_wake_up(alive, daemons):
    (endpoint,) = daemons.endpoints
    awake = status_of(endpoint).memory_bytes["weights"]
    assert alive.post("/sleep?level=1").status_code == 200
    assert alive.client.get("/is_sleeping").json() == {"is_sleeping": True}
    assert status_of(endpoint).memory_bytes["weights"] < awake
    assert alive.post("/wake_up").status_code == 200
    assert alive.client.get("/is_sleeping").json() == {"is_sleeping": False}


def test_sleep_that_drops_the_weights(alive):
    assert alive.post("/sleep?level=2").status_code == 200
    assert alive.post("/wake_up?tags=weights").status_code == 200
    assert alive.post("/collective_rpc", {"method": "reload_weights"}).status_code == 200
    assert alive.post("/wake_up?tags=kv_cache").status_code == 200


def test_sleep_under_load_aborts_requests(alive):
    """vLLM ends what runs; the rows of the daemons are gone too."""
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        fields = {"max_tokens": 900, "ignore_eos": True}
        running = [pool.submit(alive.try_to_complete, [5 + n], **fields) for n in range(8)]
        next(alive.stream([3], max_tokens=2))
        assert alive.post("/sleep?level=1").status_code == 200
        reasons = {each.result().json()["choices"][0]["finish_reason"] for each in running}
    assert reasons == {"abort"}
    assert alive.post("/wake_up").status_code == 200


@pytest.mark.parametrize(
    ("body", "name"),
    [
        ({"method": "unknown"}, "unknown"),
        ({"method": "__init__"}, "__init__"),
        ({"method": "list_loras", "args": ["1"]}, "list_loras"),
        ({"method": "save_sharded_state", "args": ["/somewhere"]}, "save_root"),
    ],
)
def test_unknown_operations_are_refused(alive, body, name):
    answer = alive.post("/collective_rpc", body)
    assert answer.status_code == 500
    assert name in answer.json()["error"]["message"]


def test_weight_checksums_by_name(alive):
    answer = alive.post("/collective_rpc", {"method": "compute_weight_checksums"}).json()
    (checksums,) = answer["results"]
    assert "model.embed_tokens.weight" in checksums


def test_profile(alive, daemons):
    assert alive.post("/start_profile", {"profile_prefix": "served"}).status_code == 200
    assert alive.text(PROMPT, max_tokens=4)
    assert alive.post("/stop_profile").status_code == 200
    assert list(daemons.directory.rglob("served*.json.gz"))


# ---------------------------------------------------------------- adapters


def reference_model(root):
    """Return transformers' model."""
    path = root / "demo"
    model = transformers.LlamaForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    return Checkpoint(path, model)


def test_adapters(alive, root, tokenizer):
    """Loaded, used beside the plain model, replaced under the same name, unloaded."""
    prompt = tokenizer.encode(PROMPT).ids
    texts = []
    plain_model = reference_model(root)
    for seed in (3, 4):
        path = root / f"adapter{seed}"
        added = write_adapter(path, plain_model.model, seed)
        expected = merged(plain_model, added).greedy(prompt, 10)
        body = {"lora_name": "tuned", "lora_path": str(path)}
        assert alive.post("/v1/load_lora_adapter", body).status_code == 200
        fields = {"max_tokens": 10, "ignore_eos": True, "return_token_ids": True}
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            plain = pool.submit(alive.text, PROMPT, max_tokens=40)
            answer = alive.complete(prompt, model="tuned", **fields)
        texts.append(answer["choices"][0]["token_ids"])
        assert texts[-1] == expected
        assert plain.result() == SENTENCE
        assert alive.post("/v1/unload_lora_adapter", {"lora_name": "tuned"}).status_code == 200
        assert alive.try_to_complete(PROMPT, model="tuned").status_code == 404
    assert texts[0] != texts[1]


@pytest.mark.parametrize("place", ["outside", "missing"])
def test_adapter_in_the_wrong_place(alive, root, tmp_path, place):
    write_adapter(tmp_path / "outside", reference_model(root).model, 5)
    path = tmp_path / "outside" if place == "outside" else root / "missing"
    answer = alive.post("/v1/load_lora_adapter", {"lora_name": place, "lora_path": str(path)})
    assert answer.status_code >= 400
    message = answer.json()["error"]["message"]
    assert ("lora_root" if place == "outside" else "no such directory") in message
    assert alive.try_to_complete(PROMPT, model=place).status_code == 404


# ---------------------------------------------------------------- clients that go, processes


def test_a_client_that_goes_away_frees_its_blocks(alive, daemons):
    (endpoint,) = daemons.endpoints
    prompt = [5] * 800
    with contextlib.closing(alive.stream(prompt, max_tokens=200, ignore_eos=True)) as events:
        next(events)
        held = status_of(endpoint).num_kv_blocks_held
    assert held >= 800 // 16
    deadline = time.monotonic() + 60
    while status_of(endpoint).num_kv_blocks_held > held // 2:
        assert time.monotonic() < deadline, "the request still runs"
        alive.text(PROMPT, max_tokens=1)  # ended requests go with the next step
        time.sleep(0.1)


def test_cuda_was_not_initialized(server):
    server.text(PROMPT, max_tokens=2)
    assert not server.cuda_calls.exists(), server.cuda_calls.read_text()


def test_second_server_is_refused_in_its_last_line(alive, daemons, root):
    second = start_server(daemons.endpoints, root / "demo", root)
    second.wait_for_the_end()
    last = second.log().rstrip().splitlines()[-1]
    holder = alive.processes()[1].pid
    assert f":{holder} (driver " in last
    assert "holds the lease" in last
    assert last.endswith("""fix: stop that driver, or take the daemons from it: \
--additional-config '{"worker_daemon": {"force": true}}'""")
    second.close()


# ---------------------------------------------------------------- settings

SETTINGS = {
    "quantization_config": {"quantization": "fp8_per_block", "dtype": "bfloat16"},
    "speculative_config.num_speculative_tokens": {
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 32}
    },
    "cache_dtype": {"kv_cache_dtype": "fp8_e5m2"},
    "data_parallel_size": {"data_parallel_size": 2},
    "prefill_context_parallel_size": {"prefill_context_parallel_size": 2},
    "load_format": {"load_format": "runai_streamer"},
    "async_scheduling": {"async_scheduling": False},
    "logprobs_mode": {"logprobs_mode": "processed_logprobs"},
    "logits_processors": {"logits_processors": ["some.module:Processor"]},
    "kv_transfer_config": {
        "kv_transfer_config": {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}
    },
    "additional_config.worker_daemon": {"additional_config": {"worker_daemon": {"reloaded": True}}},
}
"""Arguments of the engine, by the field that the refusal names."""


def made_configs(root, arguments, endpoints):
    """Return the result of tests.vllm.made_configs."""
    model = str(root / "demo")
    lines = [{"model": model, "dtype": "float32", **each} for each in arguments]
    environment = vllm_environment(endpoints)
    if not endpoints:
        environment = {k: v for k, v in environment.items() if not k.startswith("WORKER_DAEMON")}
    done = subprocess.run(
        [sys.executable, "-m", "tests.vllm.made_configs"],
        input=json.dumps(lines),
        capture_output=True,
        text=True,
        timeout=300,
        env=environment,
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def refusals(root):
    """What became of each of SETTINGS, and of none, which is the last."""
    return made_configs(root, [*SETTINGS.values(), {}], [NOWHERE])


@pytest.mark.parametrize("field", SETTINGS)
def test_settings_that_are_not_served_are_refused_at_start(refusals, field):
    refusal = refusals["made"][list(SETTINGS).index(field)]
    assert f"{field} = " in refusal.get("error", "it was accepted")


def test_platform_is_ours_where_daemons_are_named(refusals):
    assert refusals["platform"].endswith(".WorkerDaemonPlatform")
    assert refusals["made"][-1]["backend"].endswith(".WorkerDaemonExecutor")


def test_vllm_without_daemons_is_left_alone(root):
    assert not made_configs(root, [], [])["platform"].startswith("worker_client")
