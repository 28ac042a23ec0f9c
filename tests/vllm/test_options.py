"""vLLM's options before daemons: each is served, refused by name or logged as without effect. Real
EngineArgs make the configurations; no server and no daemon is started."""

import copy
import dataclasses
import json
import logging
import shutil
from types import MappingProxyType

import pytest
from vllm import EngineArgs
from vllm.config import ModelConfig, PoolerConfig, VllmConfig

from tests.vllm.models import write_tokenizer
from worker_client.errors import (
    ClientConfigError,
)
from worker_client.vllm.configuration import draft_model, worker_config
from worker_client.vllm.hooks.defaults import defaults_of
from worker_client.vllm.hooks.executor import local_directory
from worker_client.vllm.sections import SECTIONS, check_sections
from worker_client.vllm.settings import LOGGER, settings_of

EXECUTOR = "worker_client.vllm.hooks.executor.WorkerDaemonExecutor"
FP8_BLOCKS = "blocks in FP8"
ENCODER = {"runner": "pooling", "enable_chunked_prefill": False}


@pytest.fixture(scope="module")
def configured(checkpoint):
    """(architecture, options) -> vLLM's configuration, as a server makes it."""

    def make(architecture="LlamaForCausalLM", **options):
        model = checkpoint("LlamaForCausalLM" if architecture == FP8_BLOCKS else architecture)
        path = model.path
        if architecture == FP8_BLOCKS:
            path = model.path.with_name("blocks")
            shutil.copytree(model.path, path, dirs_exist_ok=True)
            config = json.loads((path / "config.json").read_text())
            config["quantization_config"] = {
                "quant_method": "fp8",
                "activation_scheme": "dynamic",
                "weight_block_size": [128, 128],
            }
            (path / "config.json").write_text(json.dumps(config))
        write_tokenizer(path)
        given = {"dtype": "bfloat16", **options}
        return EngineArgs(model=str(path), **given).create_engine_config()

    return make


@pytest.fixture
def warnings():
    """What the platform has warned of in this test."""
    said = []

    class Keeping(logging.Handler):
        def emit(self, record):
            said.append(record.getMessage())

    logger, handler = logging.getLogger(LOGGER), Keeping()
    logger.addHandler(handler)
    yield said
    logger.removeHandler(handler)


def offloading(role="kv_both", **extra):
    """Return vLLM's kv_transfer_config for host memory."""
    name = "OffloadingConnector"
    return {"kv_connector": name, "kv_role": role, "kv_connector_extra_config": extra}


SERVED = {
    "plain": {},
    "eager": {"enforce_eager": True},
    "ranks": {"pipeline_parallel_size": 2, "tensor_parallel_size": 2},
    "cache": {
        "enable_prefix_caching": False,
        "block_size": 32,
        "gpu_memory_utilization": 0.5,
        "kv_cache_memory_bytes": 32 << 20,
        "kv_cache_dtype": "fp8",
        "num_gpu_blocks_override": 256,
        "prefix_caching_hash_algo": "sha256_cbor",
    },
    "chunks": {"enable_chunked_prefill": True, "max_num_batched_tokens": 64, "max_num_seqs": 16},
    "whole prompts": {"enable_chunked_prefill": False},
    "adapters": {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8, "max_cpu_loras": 4},
    "grammars": {"structured_outputs_config": {"backend": "guidance"}},
    "reasoning": {"reasoning_parser": "qwen3"},
    "FP8": {"quantization": "fp8"},
    "context": {"max_model_len": -1},
    "profile": {"profiler_config": {"profiler": "torch", "torch_profiler_dir": "/tmp/profiles"}},
    "sleep": {"enable_sleep_mode": True},
    "dummy": {"load_format": "dummy", "seed": 5},
    "scheduler": {
        "scheduling_policy": "priority",
        "scheduler_reserve_full_isl": False,
        "long_prefill_token_threshold": 8,
        "stream_interval": 2,
        "disable_hybrid_kv_cache_manager": True,
    },
    "KV events": {"kv_events_config": {"enable_kv_cache_events": True, "publisher": "zmq"}},
    "metrics": {"kv_cache_metrics": True, "show_hidden_metrics_for_version": "0.32"},
    "settings": {"additional_config": {"worker_daemon": {"reload": True}}, "shutdown_timeout": 10},
    "positions": {
        "hf_overrides": {"rope_parameters": {"rope_type": "linear", "factor": 2, "rope_theta": 9}}
    },
    "embedded prompts": {"enable_prompt_embeds": True},
    "embeddings": {"runner": "pooling"},
    "tokens": {"runner": "pooling", "pooler_config": {"task": "token_embed"}},
    "classes": {"runner": "pooling", "convert": "classify"},
    "drafts": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
    "lookup": {
        "speculative_config": {
            "method": "ngram_gpu",
            "num_speculative_tokens": 31,
            "prompt_lookup_min": 2,
            "prompt_lookup_max": 32,
        },
        "pipeline_parallel_size": 2,
        "per_request_spec_decode_metrics": "detailed",
    },
    "fewer drafts": {
        "speculative_config": {
            "model": "ngram",
            "num_speculative_tokens": 4,
            "num_speculative_tokens_per_batch_size": [(1, 4, 4), (5, 64, 0)],
        },
    },
    "suffixes": {
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 3},
        "additional_config": {"worker_daemon": {"suffix_lookup": True}},
    },
}
"""Options that are served without a word."""

MODELS = {
    "GptOssForCausalLM": {},  # vLLM sets options for it
    "Gemma3ForCausalLM": {},
    "MistralForCausalLM": {},
    "Qwen3MoeForCausalLM": {"enable_expert_parallel": True, "tensor_parallel_size": 2},
    "BertModel": ENCODER,
    FP8_BLOCKS: {},
}


@pytest.mark.parametrize("case", SERVED)
def test_served_options(configured, warnings, case):
    made = configured(**SERVED[case])
    assert made.parallel_config.distributed_executor_backend == EXECUTOR
    assert warnings == []


@pytest.mark.parametrize(
    "options",
    [
        {"kv_offloading_size": 1.0},
        {"kv_transfer_config": offloading(cpu_bytes_to_use=1 << 30)},
        {"kv_offloading_size": 1.0, "kv_transfer_config": {"kv_role": "kv_both"}},
    ],
    ids=["size", "connector", "both"],
)
def test_host_memory_is_divided_among_ranks(configured, warnings, options):
    made = configured(tensor_parallel_size=2, pipeline_parallel_size=2, **options)
    for config in (made, dataclasses.replace(made, shutdown_timeout=5)):
        own = worker_config(config, settings_of(config), "/here")
        assert own.cache.kv_host_memory_bytes == 1 << 28
        assert config.kv_transfer_config.kv_connector == "HostTierConnector"
        assert not config.scheduler_config.disable_hybrid_kv_cache_manager
    assert warnings == []


def test_what_becomes_of_a_block_that_does_not_match_is_no_option(configured, warnings):
    transfer = offloading(cpu_bytes_to_use=1 << 30)
    configured(kv_transfer_config={**transfer, "kv_load_failure_policy": "recompute"})
    (said,) = warnings
    assert said.startswith("kv_transfer_config.kv_load_failure_policy has no effect")


@pytest.mark.parametrize("architecture", MODELS)
def test_what_vllm_derives_for_a_model_is_no_option(configured, warnings, architecture):
    for eager in (False, True):
        configured(architecture, enforce_eager=eager, **MODELS[architecture])
    assert warnings == []


def test_configuration_can_be_copied(configured, warnings):
    """vLLM derives all again for a copy."""
    made = configured(enforce_eager=True, enable_lora=True)
    copied = dataclasses.replace(made, shutdown_timeout=5)
    assert copied.parallel_config.worker_cls == made.parallel_config.worker_cls
    assert warnings == []


def test_executor_may_be_named(configured, warnings):
    """It is checked like one that is not."""
    named = {"distributed_executor_backend": EXECUTOR}
    configured(**named)
    assert warnings == []
    with pytest.raises(ClientConfigError, match="cpu_offload_gb"):
        configured(cpu_offload_gb=1, **named)


REFUSED = {
    "offload_config.uva.cpu_offload_gb": {"cpu_offload_gb": 1},
    "offload_config.prefetch.offload_group_size": {"offload_group_size": 2},
    "attention_config.backend": {"attention_backend": "FLASH_ATTN"},
    "attention_config.flash_attn_version": {"attention_config": {"flash_attn_version": 3}},
    "optimization_level": {"optimization_level": 0},
    "performance_mode": {"performance_mode": "throughput"},
    "compilation_config.cudagraph_mode": {"compilation_config": {"cudagraph_mode": "PIECEWISE"}},
    "compilation_config.cudagraph_capture_sizes": {"cudagraph_capture_sizes": [1, 2]},
    "compilation_config.max_cudagraph_capture_size": {"max_cudagraph_capture_size": 8},
    "kernel_config.moe_backend": {"moe_backend": "triton"},
    "kernel_config.linear_backend": {"linear_backend": "triton"},
    "weight_transfer_config": {"weight_transfer_config": {"backend": "nccl"}},
    "worker_cls": {"worker_cls": "some.Worker"},
    "worker_extension_cls": {"worker_extension_cls": "some.Extension"},
    "distributed_executor_backend": {"distributed_executor_backend": "external_launcher"},
    "enable_mfu_metrics": {"enable_mfu_metrics": True},
    "cudagraph_metrics": {"cudagraph_metrics": True},
    "enable_layerwise_nvtx_tracing": {"enable_layerwise_nvtx_tracing": True},
    "collect_detailed_traces": {
        "collect_detailed_traces": ["all"],
        "otlp_traces_endpoint": "http://localhost:4317",
    },
    "kv_offloading_size": {"kv_offloading_size": 1.0, "enable_prefix_caching": False},
    "kv_offloading_backend": {"kv_offloading_size": 1.0, "kv_offloading_backend": "lmcache"},
    "kv_transfer_config.kv_connector": {
        "kv_transfer_config": {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
    },
    "kv_transfer_config.kv_role": {
        "kv_transfer_config": offloading("kv_producer", cpu_bytes_to_use=1 << 30)
    },
    "kv_transfer_config.kv_connector_extra_config.cpu_bytes_to_use": {
        "kv_transfer_config": offloading()
    },
    "kv_transfer_config.kv_connector_extra_config.spec_name": {
        "kv_transfer_config": offloading(
            cpu_bytes_to_use=1 << 30, spec_name="TieringOffloadingSpec"
        )
    },
    "kv_transfer_config.kv_port": {
        "kv_transfer_config": {**offloading(cpu_bytes_to_use=1 << 30), "kv_port": 5}
    },
    "kv_cache_dtype_skip_layers": {"kv_cache_dtype_skip_layers": ["0"]},
    "disable_sliding_window": {"disable_sliding_window": True},
    "model_impl": {"model_impl": "transformers"},
    "hf_config_path": {},
    "fully_sharded_loras": {"enable_lora": True, "fully_sharded_loras": True},
    "lora_dtype": {"enable_lora": True, "lora_dtype": "float16"},
    "hf_overrides.bos_token_id": {"hf_overrides": {"bos_token_id": 5}},
    "hf_overrides.rope_parameters": {"hf_overrides": {"rope_scaling": {"rope_type": "linear"}}},
    "numa_bind": {"numa_bind": True},
    "eplb_config.step_interval": {"eplb_config": {"step_interval": 100}},
    "eplb_config.window_size": {"eplb_config": {"window_size": 100}},
    "expert_placement_strategy": {
        "expert_placement_strategy": "round_robin",
        "enable_expert_parallel": True,
        "tensor_parallel_size": 2,
    },
    "assigned_physical_gpu_ids": {"device_ids": "0"},
    "distributed_timeout_seconds": {"distributed_timeout_seconds": 5},
    "profiler_config.delay_iterations": {
        "profiler_config": {
            "profiler": "torch",
            "torch_profiler_dir": "/tmp/profiles",
            "delay_iterations": 2,
        }
    },
    "aux_output_config.enable_return_routed_experts": {"enable_return_routed_experts": True},
    "speculative_config.method": {
        "speculative_config": {"method": "eagle", "num_speculative_tokens": 3}
    },
    "speculative_config.num_speculative_tokens": {
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 32}
    },
    "speculative_config.prompt_lookup_max": {
        "speculative_config": {
            "method": "ngram",
            "num_speculative_tokens": 3,
            "prompt_lookup_max": 33,
            "prompt_lookup_min": 2,
        }
    },
    "speculative_config.rejection_sample_method": {
        "speculative_config": {
            "method": "ngram",
            "num_speculative_tokens": 3,
            "rejection_sample_method": "block",
        }
    },
    "speculative_config": {
        "runner": "pooling",
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 3},
    },
    "additional_config.worker_daemon.suffix_lookup": {
        "additional_config": {"worker_daemon": {"suffix_lookup": True}}
    },
    "additional_config.worker_daemon.draft_model": {
        "additional_config": {"worker_daemon": {"draft_model": "/there"}},
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 3},
    },
}
"""Options that are refused, by the field that the error names."""


@pytest.mark.parametrize("field", REFUSED)
def test_options_that_are_not_served_are_refused_by_name(configured, checkpoint, field):
    options, architecture = dict(REFUSED[field]), "LlamaForCausalLM"
    if field == "hf_config_path":
        options[field] = str(checkpoint("MistralForCausalLM").path)
    if field == "speculative_config.method":
        options["speculative_config"] |= {"model": str(checkpoint("LlamaForCausalLM").path)}
    if field == "expert_placement_strategy":
        architecture = "Qwen3MoeForCausalLM"
    with pytest.raises(ClientConfigError) as caught:
        configured(architecture, **options)
    assert caught.value.field == field
    assert caught.value.fix


def test_vllm_itself_refuses_to_balance_experts(configured):
    """Its platforms that can are those whose devices it has."""
    shared = {"enable_expert_parallel": True, "tensor_parallel_size": 2}
    with pytest.raises(ValueError, match="load balancing is only supported on"):
        configured("Qwen3MoeForCausalLM", enable_eplb=True, **shared)
    with pytest.raises(ValueError, match="EPLB is not enabled"):
        configured("Qwen3MoeForCausalLM", eplb_config={"num_redundant_experts": 2}, **shared)


@pytest.fixture
def drafting(configured, checkpoint):
    """drafting(fields, **options): a configuration with a draft model."""

    def make(fields=MappingProxyType({}), **options):
        model = checkpoint("Qwen3ForCausalLM").path
        own = {"method": "draft_model", "model": str(model), "num_speculative_tokens": 3}
        return configured(speculative_config={**own, **fields}, **options)

    return make


@pytest.mark.parametrize("there", ["", "/there"])
def test_a_draft_model_is_the_daemons(drafting, checkpoint, warnings, there):
    """Its method may be left to vLLM, and its directory there be another."""
    section = {"worker_daemon": {"draft_model": there}}
    ranks = {"pipeline_parallel_size": 2, "tensor_parallel_size": 2}
    for fields in ({}, {"method": None, "draft_tensor_parallel_size": 2}):
        made = drafting(fields, additional_config=section, **ranks)
        found = local_directory(draft_model(made), None)
        own = worker_config(made, settings_of(made), "/here", found).speculative
        path = there or str(checkpoint("Qwen3ForCausalLM").path)
        assert (own.method, own.model, own.num_speculative_tokens) == ("draft_model", path, 3)
    assert warnings == []


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("draft_tensor_parallel_size", {"draft_tensor_parallel_size": 1}),
        ("max_model_len", {"max_model_len": 64}),
        ("quantization", {"quantization": "fp8"}),
        ("num_speculative_tokens", {"num_speculative_tokens": 32}),
        ("kv_cache_dtype", {"kv_cache_dtype": "fp8"}),
        ("attention_backend", {"attention_backend": "FLASH_ATTN"}),
        ("enforce_eager", {"enforce_eager": True}),
        ("use_heterogeneous_vocab", {"use_heterogeneous_vocab": True}),
        ("parallel_drafting", {"parallel_drafting": True}),
        ("draft_sample_method", {"draft_sample_method": "probabilistic"}),
        ("rejection_sample_method", {"rejection_sample_method": "block"}),
    ],
)
def test_what_a_draft_model_cannot_have_is_refused_by_name(drafting, field, fields):
    with pytest.raises(ClientConfigError) as caught:
        drafting(fields, tensor_parallel_size=2)
    assert caught.value.field == f"speculative_config.{field}"
    assert caught.value.fix


def test_suffix_is_a_setting_of_ours(configured, monkeypatch):
    """vLLM demands the library of its own lookup first."""
    monkeypatch.setattr("vllm.config.speculative.has_arctic_inference", lambda: True)
    with pytest.raises(ClientConfigError, match="suffix_lookup") as caught:
        configured(speculative_config={"method": "suffix"})
    assert caught.value.field == "speculative_config.method"


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"distributed_executor_backend": "mp"}, "distributed_executor_backend"),
        ({"compilation_config": {"mode": 0}}, "compilation_config.mode"),
        (
            {"compilation_config": {"pass_config": {"fuse_norm_quant": True}}},
            "compilation_config.pass_config",
        ),
        ({"kernel_config": {"enable_jit_warmup": False}}, "kernel_config.enable_jit_warmup"),
        ({"safetensors_load_strategy": "eager"}, "safetensors_load_strategy"),
        ({"allowed_media_domains": ["example.org"]}, "allowed_media_domains"),
    ],
)
def test_options_without_an_effect_are_logged_once(configured, warnings, options, field):
    for _ in range(2):
        configured(**options)
    (said,) = warnings
    assert said.startswith(f"{field} has no effect: ")


@pytest.mark.parametrize("revision", ["main", "b" * 40])
def test_daemons_read_the_revision_that_vllm_reads(configured, tmp_path, revision):
    repository = tmp_path / "models--someone--model"
    for commit in ("a" * 40, "b" * 40):
        (repository / "snapshots" / commit).mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("a" * 40)
    made = configured(download_dir=str(tmp_path))
    made.model_config.model, made.model_config.revision = "someone/model", revision
    commit = "a" * 40 if revision == "main" else revision
    assert local_directory(made.model_config, str(tmp_path)) == str(
        repository / "snapshots" / commit
    )


# ---------------------------------------------------------------- the table and vLLM's classes


def sections():
    """Return the classes of vLLM's sections, by name, and of the whole."""
    found = {"vllm_config": VllmConfig, "pooler_config": PoolerConfig, "model_config": ModelConfig}
    for entry in dataclasses.fields(VllmConfig):
        for kind in getattr(entry.type, "__args__", (entry.type,)):
            if dataclasses.is_dataclass(kind):
                found[entry.name] = kind
    return found


def fields_of(name):
    """Return the fields of a section that options set."""
    entries = dataclasses.fields(sections()[name])
    return [each.name for each in entries if each.init and not each.name.startswith("_")]


@pytest.mark.parametrize("name", SECTIONS)
def test_the_table_names_fields_that_vllm_has(name):
    section = SECTIONS[name]
    assert {*section.sent, *section.own, *section.derived, *section.idle} <= {*fields_of(name)}


@pytest.fixture(scope="module")
def defaults(configured):
    """vLLM's defaults, with all sections that may be absent."""
    options = {"enable_lora": True, "reasoning_parser": "qwen3"}
    events = {"kv_events_config": {"enable_kv_cache_events": True}}
    pooling = defaults_of(configured(runner="pooling"))
    drafts = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}
    made = defaults_of(configured(**options, **events, **drafts))
    made.model_config.pooler_config = pooling.model_config.pooler_config
    return made


@pytest.mark.parametrize("name", sections())
def test_fields_that_the_table_does_not_name_are_closed(defaults, name):
    """Also where they are absent by default."""
    section = SECTIONS.get(name)
    for field in fields_of(name):
        is_named = section is not None and (section.allows(field) or field in section.idle)
        if is_named or field in SECTIONS or name in SECTIONS["vllm_config"].derived:
            continue
        changed = with_value(defaults, name, field, "something else")
        with pytest.raises(ClientConfigError, match="do not serve") as caught:
            check_sections(changed, defaults)
        assert caught.value.field.split(".")[-1] in (field, name)


def with_value(defaults, name, field, value):
    """Return a configuration with another value of one field."""
    changed = copy.copy(defaults)
    if name == "vllm_config":
        return with_field(changed, field, value)
    holder = changed
    if name == "pooler_config":
        holder = changed.model_config = as_section("model_config", defaults.model_config)
    default = getattr(holder, name)
    setattr(holder, name, with_field(as_section(name, default), field, value))
    return changed


def as_section(name, default):
    """Return a section of vLLM's class with the values of a default, unchecked."""
    made = object.__new__(sections()[name])
    for entry in dataclasses.fields(made):
        made.__dict__[entry.name] = getattr(default, entry.name, None)
    return made


def with_field(section, field, value):
    section.__dict__[field] = value
    return section
