"""worker-client against fake daemons, and the examples of README and of the
scheduler's cookbook."""

import contextlib
import dataclasses
import json
import re
import sys
from pathlib import Path

import msgspec
import pytest

from rpc_schema.config import (
    CacheConfig,
    GraphConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    WorkerConfig,
)
from rpc_schema.errors import ConfigError
from tests.support.fake_daemon import next_token
from tests.unit.client.conftest import options
from worker_client.cli.report import draft_figures, output_line
from worker_client.cli.run_options import build_run_options
from worker_client.errors import ClientConfigError
from worker_client.group.loading import check_config
from worker_client.launcher import LocalDaemons
from worker_client.requests import RequestOutput
from worker_daemon.worker.resolve import check_speculative, resolve_config
from worker_host.draft_counts import DraftCounts

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("command", ["generate", "bench"])
def test_max_tokens_beyond_the_model_is_told(fakes, directory, run, command):
    source, target = directory / "in.jsonl", directory / "out.jsonl"
    source.write_text(
        "".join(
            f'{{"prompt_token_ids": [1, 2, 3], "max_tokens": {count}, "ignore_eos": true}}\n'
            for count in (29, 30, 5, 1000)
        )
    )
    words = ("--max-model-len", 32, "--input", source, "--output", target)
    code, _, errors = run(command, *options(fakes(1), directory), *words)
    assert code == 0
    assert (
        "line 2, request 1: max_tokens = 30 is cut to 29, which max_model_len = 32 leaves after "
        "the prompt; requests cut in all: 2\n" in errors
    )
    lines = [json.loads(line) for line in target.read_text().splitlines()]
    assert [len(line["token_ids"]) for line in lines] == [29, 29, 5, 29]


def test_generate_writes_lines_in_input_order(fakes, directory, run):
    daemons = fakes(2)
    source, target = directory / "in.jsonl", directory / "out.jsonl"
    source.write_text(
        '{"id": "a", "prompt_token_ids": [1, 2, 3], "max_tokens": 9, "ignore_eos": true}\n'
        '{"id": "b", "prompt": "text"}\n'
        '{"id": "c", "prompt_token_ids": [5], "max_tokens": 2, "ignore_eos": true, "logprobs": 1}\n'
        f'{{"id": "d", "prompt_token_ids": {[1] * 600}}}\n'
    )
    code, _, errors = run(
        "generate", *options(daemons, directory), "--seed", 3, "--input", source, "--output", target
    )
    assert code == 0
    lines = [json.loads(line) for line in target.read_text().splitlines()]
    assert [line["id"] for line in lines] == ["a", "line 2", "c", "d"]
    assert len(lines[0]["token_ids"]) == 9 and lines[0]["finish_reason"] == "length"
    assert "tokenizer.json" in lines[1]["error"] and "line 2" in errors
    assert [entry["token_id"] for entry in lines[2]["logprobs"]] == lines[2]["token_ids"]
    assert "max_model_len" in lines[3]["error"]
    assert daemons.daemons[0].operations[-1] == "Detach"


def test_bench_prints_one_object(fakes, directory, run):
    source = directory / "in.jsonl"
    source.write_text('{"prompt_token_ids": [1, 2], "max_tokens": 8, "ignore_eos": true}\n' * 4)
    code, out, _ = run("bench", *options(fakes(1), directory), "--input", source, "--json")
    result = json.loads(out)
    assert code == 0
    assert (result["tokens_in"], result["tokens_out"]) == (8, 32)
    assert {
        "seconds", "out_tok_s", "total_tok_s", "ttft_ms", "tpot_ms", "step_ms", "startup_s",
        "gpu_memory_bytes", "device", "versions", "providers",
    } <= result.keys()  # fmt: skip
    assert (result["providers"], result["input_wait_share"]) == ({"attention": "none"}, [0.25])
    assert result["reply_delay"] == [{"num_replies": 7, "p50_us": 20.5, "p99_us": 80.0}]
    assert result["step_ms"]["decode"]["count"] >= 7
    assert result["ttft_ms"]["p50"] <= result["ttft_ms"]["p99"]
    startup = result["startup_s"]
    total = startup.pop("total")
    assert {"client", "attach", "load_model", "first_token"} <= startup.keys()
    assert min(startup.values()) >= 0 and startup["first_token"] > 0
    assert total - 5 < sum(startup.values()) <= total


def test_bench_scrapes_every_daemon_when_asked_to(fakes, directory, run, monkeypatch):
    monkeypatch.setattr("worker_client.cli.daemons.SCRAPE_TIMEOUT_S", 30.0)
    daemons = fakes(2)
    words = ["bench", *options(daemons, directory), "--input", directory / "in.jsonl", "--json"]
    (directory / "in.jsonl").write_text('{"prompt_token_ids": [1, 2], "max_tokens": 8}\n')

    def statuses_asked_for(*more):
        before = [daemon.operations.count("GetStatus") for daemon in daemons.daemons]
        code, out, errors = run(*words, *more)
        assert code == 0, errors
        asked = [
            daemon.operations.count("GetStatus") - number
            for daemon, number in zip(daemons.daemons, before, strict=True)
        ]
        return asked, json.loads(out)["statuses_scraped"]

    statuses_asked_for()  # which loads the model
    without, none = statuses_asked_for()
    asked, scraped = statuses_asked_for("--scrape")
    assert none == 0
    each = scraped // 2
    assert scraped == 2 * each >= 2
    assert asked[0] >= each  # a command that ends asks ranks that owe no reply until they are done
    assert asked[1] == without[1] + each


def test_options_come_from_line_environment_and_file(fakes, directory, run, monkeypatch):
    daemons = fakes(1)
    source, settings = directory / "in.jsonl", directory / "settings.toml"
    source.write_text('{"prompt_token_ids": [1]}\n')
    settings.write_text("max_num_seqs = 3\nblock_size = 8\nmax_num_batched_tokens = 40\n")
    monkeypatch.setenv("WORKER_CLIENT_BLOCK_SIZE", "4")
    monkeypatch.setenv("WORKER_CLIENT_MAX_NUM_SEQS", "5")
    code, _, errors = run(
        "generate", "--endpoints", daemons.endpoints[0], "--model", directory, "--config", settings,
        "--max-num-seqs", 6, "--input", source,
    )  # fmt: skip
    assert code == 0, errors
    config = daemons.daemons[0].config
    assert config.scheduler.max_num_seqs == 6
    assert config.cache.block_size == 4
    assert config.scheduler.max_num_batched_tokens == 40
    settings.write_text("block_sise = 8\n")
    code, _, errors = run("generate", "--model", directory, "--config", settings, "--prompt", "a")
    assert code == 2 and "block_sise" in errors


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["generate", "--model", "/nonexistent", "--prompt", "a"], "field model"),
        (["generate", "--model", "/tmp"], "field input"),
        (["generate", "--model", "/tmp", "--prompt", "a", "--dtype", "int7"], "field dtype"),
        (
            ["generate", "--model", "/tmp", "--prompt", "a", "--quantization", "int4"],
            "field quantization",
        ),
        (
            ["generate", "--model", "/tmp", "--prompt", "a", "--kv-cache-dtype", "fp4"],
            "field kv_cache_dtype",
        ),
        (
            ["generate", "--model", "/tmp", "--prompt", "a", "--prompt-attention-dtype", "fp4"],
            "field prompt_attention_dtype",
        ),
        (["generate", "--model", "/tmp", "--prompt", "a", "--endpoints", "tcp://h:1"], "keys"),
        (
            ["generate", "--model", "/tmp", "--prompt", "a", "--endpoints", "ipc:///a,ipc:///b"],
            "fix",
        ),
        (["status", "--endpoints", ""], "field endpoints"),
        *(
            (["generate", "--model", "/tmp", "--prompt", "a", f"--{option}", ""], f"field {field}")
            for option, field in (
                ("endpoints", "endpoints"),
                ("layer-partition", "layer_partition"),
            )
        ),
        (["status", "--endpoints", "ipc:///a", "--key-file", ""], "field key_file"),
        (
            ["status", "--endpoints", "ipc:///a", "--key-file", "", "--known-daemons", "/none"],
            "field key_file",
        ),
        *(
            (
                [command, "--model", "/tmp", "--prompt", "a", "--max-itl-ms", value],
                f"max_itl_ms = {shown};",
            )
            for command in ("generate", "bench")
            for value, shown in (("0", "0.0"), ("nan", "nan"), ("inf", "inf"), ("-5", "-5.0"))
        ),
    ],
)
def test_mistakes_are_one_line(run, words, message):
    code, _, errors = run(*words)
    assert code == 2
    assert message in errors and len(errors.strip().splitlines()) == 1


def test_status_and_shutdown(fakes, run):
    daemons = fakes(2)
    endpoints = ",".join(daemons.endpoints)
    code, out, _ = run("status", "--endpoints", endpoints, "--json")
    assert code == 0
    entries = json.loads(out)
    assert [entry["load"] for entry in entries] == ["CREATED", "CREATED"]
    assert entries[1]["reply_delay"] == {"num_replies": 7, "p50_us": 20.5, "p99_us": 80.0}
    assert entries[1]["kv_cache_advice"] == {"request_bytes": 123456, "card_bytes": 234567}
    shown = run("status", "--endpoints", endpoints)[1]
    assert all(f"daemon     {endpoint}, pid " in shown for endpoint in daemons.endpoints)
    assert "CREATED" in shown and "80 us (p99)" in shown
    assert "kv_cache 0 MiB" in shown
    assert "--kv-cache-memory-bytes 123456 would fit the request, 234567 would" in shown
    assert run("shutdown", "--endpoints", endpoints)[0] == 0
    assert [daemon.operations[-1] for daemon in daemons.daemons] == ["Shutdown"] * 2


def test_the_readmes_example_runs(fakes, monkeypatch, capsys):
    daemons = fakes(2)
    (source,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    started = contextlib.nullcontext(daemons)
    monkeypatch.setattr("worker_client.launcher.LocalDaemons", lambda *_: started)
    exec(compile(source, "README.md", "exec"), {})  # noqa: S102
    tokens = [1, 2, 3]
    for _ in range(8):
        tokens.append(next_token(tokens))
    assert capsys.readouterr().out == f"[{tokens[3:]}]\n"


def test_a_configuration_needs_two_parts_only():
    needed = [field.name for field in msgspec.structs.fields(WorkerConfig) if field.required]
    assert needed == ["parallel", "model"]
    short = WorkerConfig(parallel=ParallelConfig(), model=ModelConfig(model="m"))
    parts = {"scheduler": SchedulerConfig(), "cache": CacheConfig(), "graph": GraphConfig()}
    long = msgspec.structs.replace(short, **parts)
    assert short == long and short.fingerprint() == long.fingerprint()


def test_the_documented_example_runs(fakes, capsys):
    daemons = fakes(1)
    text = (ROOT / "docs" / "scheduler-cookbook.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    (source,) = (block for block in blocks if "ENDPOINTS" in block)
    source = source.replace('f"ipc://{Path.home()}/.cache/wd/w0"', repr(daemons.endpoints[0]))
    exec(compile(source, "docs/scheduler-cookbook.md", "exec"), {})  # noqa: S102
    tokens = [1, 2, 3, 4, 5]
    for _ in range(10):
        tokens.append(next_token(tokens))
    printed = [f"{{'hello': {token}}}" for token in tokens[5:]]
    assert capsys.readouterr().out.splitlines() == printed


def test_only_running_daemons_have_requests_to_adopt(directory, run):
    for words in ((), ("--endpoints", "ipc:///nowhere/w", "--reload")):
        code, _, errors = run("generate", "--model", directory, "--adopt", *words)
        assert code == 2
        assert "--endpoints" in errors and "--reload" in errors


DYING = """
import sys
from tests.support.fake_daemon import FakeDaemon, Fault
daemon = FakeDaemon(sys.argv[1])
daemon.faults = [Fault(0, "die")]
print("its last words", flush=True)
daemon.start()
daemon._thread.join()
"""


def test_a_local_daemon_that_dies_leaves_its_last_words(directory, run, monkeypatch):
    def start(devices, model_root, **_):
        return LocalDaemons(devices, model_root, command=lambda *words: (*command, words[0]))

    command = (sys.executable, "-c", DYING)
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("worker_client.driven_group.LocalDaemons", start)
    source = directory / "in.jsonl"
    source.write_text('{"prompt_token_ids": [1, 2, 3]}\n')
    code, _, errors = run("generate", "--model", directory, "--input", source)
    assert code == 2
    assert "WorkerDied: rank 0" in errors and errors.endswith("its last words\n")


def test_a_layer_partition_is_a_list_of_counts(tmp_path):
    options = build_run_options(
        model=tmp_path, pipeline_parallel_size=2, layer_partition="17,15", device=None
    )
    assert options.plan.config.parallel.layer_partition == (17, 15)
    for text in ("17,", "17,x", "0,32", "-1,33", "16;16"):
        with pytest.raises(ClientConfigError) as caught:
            build_run_options(model=tmp_path, layer_partition=text)
        assert (caught.value.field, caught.value.value) == ("layer_partition", text)


def test_sleep_mode_is_asked_for_by_name(directory):
    asleep, awake = (
        build_run_options(model=directory, enable_sleep_mode=wanted).plan.config.model
        for wanted in (True, False)
    )
    assert (asleep.enable_sleep_mode, awake.enable_sleep_mode) == (True, False)


def test_overrides_reach_the_configuration(directory):
    text = '{"max_position_embeddings": 64}'
    assert (
        build_run_options(model=directory, hf_overrides=text).plan.config.model.hf_overrides == text
    )


def test_quantization_while_loading_is_asked_for_by_name(directory):
    assert build_run_options(model=directory).plan.config.model.quantization == "auto"
    options = build_run_options(model=directory, quantization="fp8")
    assert options.plan.config.model.quantization == "fp8"


def test_advised_size_of_the_kv_cache_is_an_option(fakes, directory, run):
    daemons = fakes(1)
    (directory / "in.jsonl").write_text('{"prompt_token_ids": [1]}\n')
    words = [*options(daemons, directory), "--input", directory / "in.jsonl"]
    code, _, errors = run("generate", *words, "--kv-cache-memory-bytes", 1 << 33)
    assert code == 0, errors
    assert daemons.daemons[0].config.cache.kv_cache_memory_bytes == 1 << 33
    assert build_run_options(model=directory).plan.config.cache.kv_cache_memory_bytes is None


def test_options_of_drafts_are_those_of_the_configuration(tmp_path):
    options = build_run_options(
        model=tmp_path,
        speculative_method="suffix",
        num_speculative_tokens=3,
        prompt_lookup_max=6,
        prompt_lookup_min=1,
    )
    assert options.plan.config.speculative == SpeculativeConfig(
        method="suffix", num_speculative_tokens=3, prompt_lookup_max=6, prompt_lookup_min=1
    )
    assert build_run_options(model=tmp_path).plan.config.speculative == SpeculativeConfig()
    (tmp_path / "small").mkdir()
    (tmp_path / "draft").mkdir()
    options = build_run_options(
        model=str(tmp_path),
        speculative_method="draft_model",
        num_speculative_tokens=2,
        speculative_model=f"{tmp_path}/small/../draft",
    )
    assert options.plan.config.speculative.model == str(tmp_path / "draft")


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"num_speculative_tokens": 2}, "num_speculative_tokens"),
        ({"method": "ngram"}, "num_speculative_tokens"),
        (
            {"method": "suffix", "num_speculative_tokens": 2, "prompt_lookup_min": 5},
            "prompt_lookup_min",
        ),
        ({"method": "draft_model", "num_speculative_tokens": 2}, "model"),
        ({"method": "ngram", "num_speculative_tokens": 2, "model": "d"}, "model"),
    ],
)
def test_settings_of_drafts_that_mean_nothing_together_are_refused(tmp_path, fields, field):
    """By the options, by a group before it loads, and by a daemon."""
    config = SpeculativeConfig(**fields)
    given = {"speculative_method": fields.get("method", "none")} | {
        name: value for name, value in fields.items() if name not in ("method", "model")
    }
    if "model" in fields:
        given["speculative_model"] = str(tmp_path / fields["model"])
    with pytest.raises(ClientConfigError) as refused:
        build_run_options(model=tmp_path, **given)
    assert refused.value.field == f"speculative.{field}"
    with pytest.raises(ClientConfigError) as refused:
        parallel, model = ParallelConfig(), ModelConfig(model="a")
        check_config(WorkerConfig(parallel=parallel, model=model, speculative=config))
    assert (refused.value.field, refused.value.value) == (
        f"speculative.{field}",
        getattr(config, field),
    )
    with pytest.raises(ConfigError, match=f"speculative.{field}"):
        check_speculative(config)


BALANCED = {"enable_expert_parallel": True, "enable_eplb": True}
"""Options of a model whose experts move."""


@pytest.mark.parametrize(
    ("given", "copies", "interval"),
    [
        ({}, 0, None),
        (BALANCED, 0, 3000),
        ({**BALANCED, "num_redundant_experts": 3, "eplb_step_interval": 7}, 3, 7),
    ],
)
def test_options_of_experts_that_move_reach_the_configuration(directory, given, copies, interval):
    plan = build_run_options(model=directory, **given).plan
    assert plan.config.model.enable_eplb is bool(given)
    assert plan.config.model.num_redundant_experts == copies
    assert plan.eplb_step_interval == interval


@pytest.mark.parametrize(
    ("field", "given"),
    [
        ("enable_eplb", {"enable_eplb": True}),
        ("num_redundant_experts", {"enable_expert_parallel": True, "num_redundant_experts": 2}),
        ("eplb_step_interval", {"enable_expert_parallel": True, "eplb_step_interval": 2}),
    ],
)
def test_options_of_experts_that_mean_nothing_together_are_refused(directory, field, given):
    """By the options, and those of a model by a group before it loads, and by a daemon."""
    with pytest.raises(ClientConfigError) as refused:
        build_run_options(model=directory, **given)
    assert (refused.value.field, refused.value.value) == (field, given[field])
    if field == "eplb_step_interval":
        return
    model = ModelConfig(model=str(directory), **given)
    with pytest.raises(ClientConfigError) as refused:
        check_config(WorkerConfig(parallel=ParallelConfig(), model=model))
    assert refused.value.field == field
    with pytest.raises(ConfigError, match=f"field {field} = "):
        resolve_config(model, [directory])


def test_a_method_that_does_not_exist_is_refused(tmp_path):
    with pytest.raises(ClientConfigError) as refused:
        build_run_options(model=tmp_path, speculative_method="magic")
    assert refused.value.field == "speculative_method"


def test_results_say_how_many_drafts_were_accepted():
    drafted = RequestOutput("a", [1, 2, 3], "length", 2, 0, 0, None, num_drafted=4, num_accepted=1)
    line = output_line("a", drafted, None)
    assert (line["num_drafted"], line["num_accepted"]) == (4, 1)
    plain = output_line("a", dataclasses.replace(drafted, num_drafted=0, num_accepted=0), None)
    assert not {"num_drafted", "num_accepted"} & plain.keys()


def test_bench_says_how_many_drafts_were_accepted_at_each_place():
    """Of all replicas together, each with its own most drafts."""
    one, two = DraftCounts(), DraftCounts()
    for drafted, accepted in ((4, 4), (4, 1), (2, 0)):
        one.add(drafted, accepted)
    two.add(1, 1)
    two.include(one)
    assert draft_figures(two)["drafts"] == {
        "drafted": 11,
        "accepted": 6,
        "acceptance": 6 / 11,
        "mean_length": 2.5,
        "acceptance_by_place": [0.75, 0.25, 0.25, 0.25],
    }
    assert draft_figures(DraftCounts()) == {}
