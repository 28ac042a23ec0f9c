"""The command lines end to end, each command in a separate process."""

import json
import re
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from msgspec import Struct, structs
from tokenizers import Tokenizer

from benchmarks.compare_tokens import GREEDY, generate
from tests.support.checkpoints import Checkpoint
from tests.support.command_line import (
    processes_of,
    run_client,
    short_directory,
    start_daemon,
    status_of,
    wait_for_daemons,
)
from tests.support.forked_daemons import ForkedDaemons
from tests.support.forked_processes import ForkedPopen
from tests.support.waiting import PATIENCE_S
from worker_client.cli.demo import PROMPTS as DEMO_PROMPTS
from worker_client.cli.demo_model import SENTENCES, make_demo_model
from worker_client.errors import ConfigMismatchError
from worker_client.worker_group import WorkerGroup

ROOT = Path(__file__).parents[2]
PROMPTS = ("The driver decides", "A new driver", "Nothing warm")
BENCH_KEYS = {
    *("seconds", "tokens_in", "tokens_out", "out_tok_s", "total_tok_s", "ttft_ms", "tpot_ms"),
    *("step_ms", "startup_s", "gpu_memory_bytes", "device", "versions"),
}
LOAD_PHASES = {"init_device", "load_model", "compile_or_warm_up_model"}


@pytest.fixture(scope="module")
def demo(model_root):
    """The demo checkpoint, which has a tokenizer."""
    path = model_root / "demo"
    make_demo_model(path)
    model = transformers.LlamaForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    return Checkpoint(path, model)


@pytest.fixture(scope="module")
def tokenizer(demo):
    return Tokenizer.from_file(str(demo.path / "tokenizer.json"))


@pytest.fixture
def directory():
    path = short_directory()
    yield path
    for process in processes_of(path):
        process.kill()
    shutil.rmtree(path)


@pytest.fixture
def model_options(demo):
    model = ("--model", str(demo.path), "--device", "cpu")
    return (*model, "--num-gpu-blocks", "128", "--max-num-batched-tokens", "256")


@pytest.fixture(scope="module")
def served(model_root):
    """Two daemons started by hand: one by its command line, one by environment and file."""
    path = short_directory()
    endpoints = [f"ipc://{path}/a", f"ipc://{path}/b"]
    file = path / "daemon.toml"
    file.write_text(f'device = "cpu"\nmodel-root = ["{model_root}"]\nendpoint = "ipc:///wrong/x"\n')
    processes = [
        start_daemon(
            path, *("--endpoint", endpoints[0], "--device", "cpu", "--model-root", str(model_root))
        ),
        start_daemon(
            path,
            *("--config", str(file)),
            WORKER_DAEMON_ENDPOINT=endpoints[1],
        ),
    ]
    wait_for_daemons(endpoints, processes)
    yield endpoints
    for process in processes:
        process.kill()
        process.wait()
    shutil.rmtree(path)


def write_lines(path, *lines):
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("".join(text + "\n" for text in texts))
    return str(path)


def read_lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_generate_prints_the_texts_of_prompts(directory, model_options, demo, tokenizer):
    prompts = [word for prompt in PROMPTS for word in ("--prompt", prompt)]
    done = run_client(
        directory,
        *("generate", *model_options, *prompts, "--max-tokens", "8"),
        *("--pipeline-parallel-size", "2"),
    )
    lines = [
        f"{index}: {tokenizer.decode(greedy(demo, tokenizer.encode(prompt).ids, 8))}"
        for index, prompt in enumerate(PROMPTS)
    ]
    assert done.stdout.splitlines() == lines
    assert not list(directory.iterdir())


def test_first_prompt_of_the_readme_is_answered_by_a_sentence(demo, tokenizer):
    prompts = re.findall(r'--prompt "(.*?)"', (ROOT / "README.md").read_text())
    assert prompts
    for prompt in [*prompts, *DEMO_PROMPTS]:
        answer = greedy(demo, tokenizer.encode(prompt).ids, 40)
        assert answer[-1] == demo.model.config.eos_token_id
        assert prompt + tokenizer.decode(answer) in SENTENCES.splitlines()


@pytest.mark.exhaustive
def test_runs_whose_tokens_are_compared_begin_with_nothing_cached(demo, model_root, tmp_path):
    """Of several types on one daemon, too."""
    file = tmp_path / "requests.jsonl"
    prompt = np.random.default_rng(3).integers(1, 400, 300).tolist()
    line = {"id": "0", "prompt_token_ids": prompt, **GREEDY, "max_tokens": 4, "ignore_eos": True}
    write_lines(file, line)
    with ForkedDaemons(["cpu"], model_root) as daemons:
        runs = [
            generate(ROOT, daemons, demo.path, file, dtype)
            for dtype in ("float32", "float32", "bfloat16")
        ]
    assert runs[0] == runs[1]
    assert runs[0] != runs[2]


def test_generate_keeps_the_order_of_a_file_and_survives_wrong_lines(
    served, directory, tmp_path, model_options, demo, tokenizer
):
    ids = [tokenizer.encode(prompt).ids for prompt in PROMPTS]
    source = write_lines(
        tmp_path / "in.jsonl",
        {"id": "long", "prompt": PROMPTS[0], "max_tokens": 20, "ignore_eos": True, "logprobs": 3},
        {"id": "short", "prompt_token_ids": ids[1], "max_tokens": 2, "ignore_eos": True},
        "{this is not JSON",
        {"id": "hot", "prompt": PROMPTS[2], "temperature": -1},
        "",
        {"id": "odd", "prompt": PROMPTS[2], "best_of": 2},
        {"id": "both", "prompt": PROMPTS[2], "prompt_token_ids": [1]},
        {"id": "token", "prompt_token_ids": [10**6]},
        {"id": "endless", "prompt_token_ids": [1] * 2000},
        {"id": "short", "prompt": PROMPTS[2]},
        {"prompt": PROMPTS[2], "max_tokens": 3, "ignore_eos": True},
    )
    target = tmp_path / "out.jsonl"
    done = run_client(
        directory,
        *("generate", *model_options, "--input", source, "--output", str(target)),
        *("--endpoints", served[0], "--reload"),
    )
    results = read_lines(target)
    assert [result["id"] for result in results] == [
        *("long", "short", "line 3", "line 4", "line 6", "line 7", "token", "endless"),
        *("line 10", "10"),
    ]
    by_id = {result["id"]: result for result in results}
    wrong = {
        "line 3": "not JSON",
        "line 4": "temperature = -1",
        "line 6": "best_of",
        "line 7": "prompt",
        "token": "1000000",
        "endless": "max_model_len",
        "line 10": "the id occurs twice",
    }
    for req_id, words in wrong.items():
        assert by_id[req_id].keys() == {"id", "error"}
        assert words in by_id[req_id]["error"]
        assert "fix: " in by_id[req_id]["error"]
        assert words in done.stderr
    for req_id, prompt, count in (("long", ids[0], 20), ("short", ids[1], 2), ("10", ids[2], 3)):
        result = by_id[req_id]
        assert result["token_ids"] == greedy(demo, prompt, count, ignore_eos=True)
        assert result["text"] == tokenizer.decode(result["token_ids"])
        assert result["finish_reason"] == "length"
        assert ("logprobs" in result) == (req_id == "long")
    check_logprobs(by_id["long"], ids[0], demo)


def greedy(demo, prompt, count, *, ignore_eos=False):
    """The demo model has exact ties, by equal rows of its head: the first of them counts."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(demo.logprobs(tokens)[-1].argmax()))
        if tokens[-1] == demo.model.config.eos_token_id and not ignore_eos:
            break
    return tokens[len(prompt) :]


def check_logprobs(result, prompt, demo):
    """Against transformers, to 1e-4."""
    tokens = [*prompt, *result["token_ids"]]
    rows = demo.logprobs(tokens)[len(prompt) - 1 : -1]
    assert len(result["logprobs"]) == len(result["token_ids"])
    for row, token, entry in zip(rows, result["token_ids"], result["logprobs"], strict=True):
        best = row.topk(3)
        assert (entry["token_id"], entry["rank"]) == (token, 1)
        np.testing.assert_allclose(entry["logprob"], row[token], atol=1e-4)
        np.testing.assert_allclose(entry["top_logprobs"], best.values, atol=1e-4)
        np.testing.assert_allclose(row[entry["top_token_ids"]], best.values, atol=1e-4)


def test_generate_gives_the_same_tokens_under_a_target_for_latency(
    served, directory, tmp_path, model_options
):
    """One that cannot be met: prompts come in the smallest chunks beside decodes."""
    text = " ".join(SENTENCES.splitlines())
    prompts = [f"{text} {prompt}" if index % 2 else prompt for index, prompt in enumerate(PROMPTS)]
    lines = ({"prompt": each, "max_tokens": 24, "ignore_eos": True} for each in prompts * 2)
    source = write_lines(tmp_path / "in.jsonl", *lines)
    (tmp_path / "target.toml").write_text("max_itl_ms = 0.1\n")
    found = []
    for name, more in (("plain", ()), ("paced", ("--config", str(tmp_path / "target.toml")))):
        target = tmp_path / f"{name}.jsonl"
        run_client(
            directory,
            *("generate", *model_options, "--input", source, "--output", str(target)),
            *("--endpoints", served[0], "--reload", *more),
        )
        found.append([line["token_ids"] for line in read_lines(target)])
    assert found[0] == found[1]
    assert [len(tokens) for tokens in found[0]] == [24] * 6


def test_generate_fails_where_no_line_can_be_served(served, directory, tmp_path, model_options):
    source = write_lines(tmp_path / "in.jsonl", "[]", {"prompt": 3})
    target = tmp_path / "out.jsonl"
    done = run_client(
        directory,
        *("generate", *model_options, "--input", source, "--output", str(target)),
        *("--endpoints", served[0], "--reload"),
        check=False,
    )
    assert done.returncode == 1
    assert [set(line) for line in read_lines(target)] == [{"id", "error"}] * 2


def test_second_bench_finds_the_model_loaded(served, directory, tmp_path, model_options, demo):
    ids = [[7 * i % 400 + 1, 5, 9] for i in range(6)]
    source = write_lines(
        tmp_path / "in.jsonl",
        *({"prompt_token_ids": prompt, "max_tokens": 12, "ignore_eos": True} for prompt in ids),
    )
    words = (
        *("bench", "--endpoints", ",".join(served), "--input", source, "--json"),
        *(*model_options, "--pipeline-parallel-size", "2", "--max-num-seqs", "16"),
    )
    first = json.loads(run_client(directory, *words, "--reload").stdout)
    weights = [status_of(endpoint).memory_bytes["weights"] for endpoint in served]
    second = json.loads(run_client(directory, *words).stdout)

    assert set(first["startup_s"]) >= LOAD_PHASES
    assert not LOAD_PHASES & set(second["startup_s"])
    for figures in (first, second):
        check_bench_object(figures, num_requests=6, tokens_in=18, tokens_out=72)
        assert figures["gpu_memory_bytes"]["weights"] == sum(weights)
    assert sum(weights) == sum(p.numel() * 4 for p in demo.model.parameters())


def check_bench_object(figures, num_requests, tokens_in, tokens_out, num_replicas=1):
    assert set(figures) >= BENCH_KEYS
    assert (figures["requests"], figures["failed"]) == (num_requests, 0)
    assert (figures["tokens_in"], figures["tokens_out"]) == (tokens_in, tokens_out)
    seconds = figures["seconds"]
    assert seconds > 0
    assert figures["out_tok_s"] == pytest.approx(tokens_out / seconds)
    assert figures["total_tok_s"] == pytest.approx((tokens_in + tokens_out) / seconds)
    for name in ("ttft_ms", "tpot_ms"):
        assert 0 < figures[name]["p50"] <= figures[name]["p99"] <= seconds * 1e3
    assert {"prefill", "decode"} & set(figures["step_ms"])
    for times in figures["step_ms"].values():
        assert times["count"] > 0
        assert 0 < times["p50"] <= times["p99"] <= seconds * 1e3
    startup = dict(figures["startup_s"])
    total = startup.pop("total")
    # Replicas load at the same time, and a phase's time is the longest of theirs.
    assert 0 < sum(startup.values()) <= num_replicas * total * 1.01
    assert {"weights", "kv_cache", "activations_peak"} <= set(figures["gpu_memory_bytes"])
    assert figures["gpu_memory_bytes"]["kv_cache"] > 0
    assert figures["device"]
    assert {"worker-daemon", "protocol", "python"} <= set(figures["versions"])


def test_bench_on_replicas_shares_the_requests_out(
    served, directory, tmp_path, model_options, demo
):
    """By the environment, as other options."""
    ids = [[7 * i % 400 + 1, 5, 9] for i in range(5)]
    source = write_lines(
        tmp_path / "in.jsonl",
        *({"prompt_token_ids": prompt, "max_tokens": 12, "ignore_eos": True} for prompt in ids),
    )
    target = tmp_path / "out.jsonl"
    done = run_client(
        directory,
        *("bench", "--endpoints", ",".join(served), "--input", source, "--json", "--reload"),
        *(*model_options, "--output", str(target)),
        WORKER_CLIENT_DATA_PARALLEL_SIZE="2",
    )
    check_bench_object(json.loads(done.stdout), 5, tokens_in=15, tokens_out=60, num_replicas=2)
    results = read_lines(target)
    assert [result["id"] for result in results] == [str(number) for number in range(5)]
    for prompt, result in zip(ids, results, strict=True):
        assert result["token_ids"] == greedy(demo, prompt, 12, ignore_eos=True)
    statuses = [status_of(endpoint) for endpoint in served]
    assert [status.rank for status in statuses] == [0, 1]
    assert all(status.config.parallel.data_parallel_size == 2 for status in statuses)
    assert all(status.last_seq > 12 for status in statuses)


def test_another_configuration_is_refused_by_name_or_loaded_anew(served, directory, model_options):
    words = (
        *("generate", "--endpoints", ",".join(served), *model_options, "--prompt", PROMPTS[0]),
        *("--pipeline-parallel-size", "2", "--max-tokens", "3"),
    )
    run_client(directory, *words, "--max-num-seqs", "16", "--reload")
    refused = run_client(
        directory, *words, "--max-num-seqs", "8", "--max-model-len", "64", check=False
    )
    assert refused.returncode == 2
    assert "ConfigMismatchError" in refused.stderr
    assert "scheduler.max_num_seqs: 8 != 16" in refused.stderr
    assert "model.max_model_len: 64 != None" in refused.stderr
    assert "--reload" in refused.stderr
    assert "Traceback" not in refused.stderr
    run_client(directory, *words, "--max-num-seqs", "16")
    run_client(directory, *words, "--max-num-seqs", "8", "--max-model-len", "64", "--reload")
    status = status_of(served[0])
    assert status.kv_cache_advice.request_bytes > 0
    assert {"graphs", "activations", "context", "others"} <= status.memory_bytes.keys()
    assert status.config.scheduler.max_num_seqs == 8
    assert status.config.model.max_model_len == 64


def test_paths_of_a_model_from_its_root_and_from_slash_name_the_same_model(
    served, directory, demo, model_options
):
    words = ("generate", "--endpoints", served[0], *model_options, "--prompt", PROMPTS[0])
    run_client(directory, *words, "--reload")
    config = status_of(served[0]).config

    def prepared(name, **options):
        named = structs.replace(config, model=structs.replace(config.model, model=name))
        with WorkerGroup(served[:1], config.parallel) as group:
            group.attach()
            return group.prepare(named, num_gpu_blocks=128, **options).was_loaded

    assert config.model.model == str(demo.path)
    for name in (demo.path.name, f"{demo.path}/", f"./{demo.path.name}"):
        assert prepared(name)
    with pytest.raises(ConfigMismatchError, match=f"model.model: 'mode' != '{demo.path}'"):
        prepared("mode")
    assert not prepared(demo.path.name, reload=True)
    assert status_of(served[0]).config.model.model == demo.path.name
    run_client(directory, *words)


def test_options_come_from_command_line_then_environment_then_file(
    served, directory, tmp_path, demo
):
    file = tmp_path / "options.toml"
    file.write_text(
        f'model = "{demo.path}"\nendpoints = "{served[0]}"\nnum_gpu_blocks = 300\n'
        "max_num_seqs = 3\nmax_num_batched_tokens = 100\nblock_size = 8\nreload = true\n"
    )
    run_client(
        directory,
        *("generate", "--config", str(file), "--prompt", PROMPTS[0], "--block-size", "4"),
        WORKER_CLIENT_BLOCK_SIZE="32",
        WORKER_CLIENT_MAX_NUM_BATCHED_TOKENS="90",
    )
    config = status_of(served[0]).config
    assert config.scheduler.max_num_seqs == 3
    assert config.scheduler.max_num_batched_tokens == 90
    assert config.cache.block_size == 4
    file.write_text("max_num_sequences = 3\n")
    done = run_client(directory, "generate", "--config", str(file), check=False)
    assert done.returncode == 2
    assert "max_num_sequences" in done.stderr


def test_status_shows_every_daemon(served, directory, demo, model_options):
    run_client(
        directory,
        *("generate", "--endpoints", ",".join(served), *model_options, "--prompt", PROMPTS[0]),
        *("--pipeline-parallel-size", "2", "--reload"),
    )
    listed = run_client(directory, "status", "--endpoints", ",".join(served), "--json")
    statuses = json.loads(listed.stdout)
    assert [status["endpoint"] for status in statuses] == served
    for rank, status in enumerate(statuses):
        assert (status["load"], status["serving"], status["rank"]) == ("READY", "SERVING", rank)
        assert status["model"] == str(demo.path)
        assert status["num_blocks"] == 128
        known = status_of(served[rank])
        weights = structs.asdict(known.weights)
        identity = structs.asdict(weights.pop("identity"))
        hashes = {name: value.hex() for name, value in identity.items()}
        assert status["weights"].pop("identity") == hashes
        assert status["weights"] == json.loads(json.dumps(weights))
        for name in status.keys() - {"config"}:
            has_fields = isinstance(getattr(known, name, None), Struct | dict)
            assert isinstance(status[name], dict) == has_fields, name
    shown = run_client(directory, "status", "--endpoints", ",".join(served)).stdout
    for rank, block in enumerate(shown.split("\n\n")):
        assert block.startswith(f"daemon     {served[rank]}, pid ")
        assert f"model      {demo.path}\n" in block
    assert rank == len(served) - 1


def test_status_of_nobody_is_an_error_in_one_line(directory):
    endpoint = f"ipc://{directory}/nobody"
    done = run_client(directory, "status", "--endpoints", endpoint, check=False)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert endpoint in done.stderr


def test_shutdown_ends_daemons_in_order(directory, demo, model_options):
    endpoints = [f"ipc://{directory}/run/{name}" for name in "ab"]
    processes = [
        start_daemon(
            directory,
            *("--endpoint", endpoint, "--device", "cpu", "--model-root", str(demo.path.parent)),
            *("--state-dir", str(directory / "state")),
            start=ForkedPopen,
        )
        for endpoint in endpoints
    ]
    wait_for_daemons(endpoints, processes)
    named = ("--endpoints", ",".join(endpoints))
    pp = ("--pipeline-parallel-size", "2")
    run_client(directory, "generate", *named, *model_options, *pp, "--prompt", PROMPTS[0])
    run_client(directory, "shutdown", *named)
    assert [process.wait(PATIENCE_S) for process in processes] == [0, 0]
    log = (directory / "daemon.log").read_text()
    assert log.count(f"loaded {demo.path}: ") == log.count(" has attached (pid ") == 2
    assert log.count("Shutdown asked for by pid ") == 2
    left = {str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file()}
    assert {path for path in left if not path.startswith("state/")} == {"daemon.log"}
    assert not list(directory.glob("run/*"))


@pytest.mark.exhaustive
def test_sigterm_ends_a_loaded_daemon_in_order(directory, demo, model_options):
    endpoint = f"ipc://{directory}/w"
    process = start_daemon(
        directory,
        *("--endpoint", endpoint, "--device", "cpu", "--model-root", str(demo.path.parent)),
    )
    wait_for_daemons([endpoint], [process])
    words = ("--endpoints", endpoint, *model_options, "--prompt", PROMPTS[0])
    run_client(directory, "generate", *words)
    process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENCE_S) == 0
    assert {path.suffix for path in directory.iterdir()} == {".epoch", ".log"}
