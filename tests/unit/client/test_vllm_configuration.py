"""vLLM's configuration as ours, and what of it is refused."""

import json
from types import SimpleNamespace

import pytest

from rpc_schema.config import (
    CacheConfig,
    GraphConfig,
    LoraConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    WorkerConfig,
)
from rpc_schema.pooling import PooledTask, PoolingSupport
from tests.support.vllm_shapes import eplb_config, pooling_config, section_of, vllm_config
from worker_client.errors import ClientConfigError
from worker_client.group.loading import check_config as check_ours
from worker_client.vllm.configuration import (
    check_config,
    check_drafts,
    check_keeps_state,
    check_loaded,
    fits_max_model_len,
    worker_config,
)
from worker_client.vllm.sections import check_sections
from worker_client.vllm.settings import Settings


def check(theirs, defaults):
    """Check a configuration as the platform does."""
    check_sections(theirs, defaults)
    check_config(theirs)


def test_every_field_is_translated():
    theirs = vllm_config(
        parallel_config__pipeline_parallel_size=2,
        parallel_config__tensor_parallel_size=4,
        model_config__dtype="torch.bfloat16",
        model_config__enable_sleep_mode=True,
        model_config__enforce_eager=True,
        cache_config__kv_cache_memory_bytes=1 << 30,
        cache_config__gpu_memory_utilization=0.5,
        load_config__load_format="tensorizer",
        lora_config=section_of(
            {
                "max_loras": 3,
                "max_lora_rank": 32,
                "max_cpu_loras": 5,
                "lora_dtype": "torch.bfloat16",
            },
            {},
        ),
    )
    settings = Settings(logits_processors=("a",), step_deadline_ms=9000)
    check_config(theirs)
    ours = worker_config(theirs, settings, "/resolved")
    check_ours(ours)
    assert ours == WorkerConfig(
        parallel=ParallelConfig(pipeline_parallel_size=2, tensor_parallel_size=4),
        model=ModelConfig(
            model="/resolved",
            dtype="bfloat16",
            load_format="tensorizer",
            max_model_len=512,
            seed=3,
            enable_sleep_mode=True,
        ),
        scheduler=SchedulerConfig(
            max_num_seqs=8,
            max_num_batched_tokens=64,
            logits_processors=("a",),
            step_deadline_ms=9000,
        ),
        cache=CacheConfig(block_size=16, gpu_memory_utilization=0.5, kv_cache_memory_bytes=1 << 30),
        graph=GraphConfig(enforce_eager=True),
        lora=LoraConfig(max_loras=3, max_lora_rank=32, max_cpu_loras=5),
    )


def test_settings_name_the_directory_on_the_daemons_hosts():
    ours = worker_config(vllm_config(), Settings(model="/there"), "/here")
    assert ours.model.model == "/there"
    assert ours.cache.prompt_attention_dtype == "auto"
    assert ours.scheduler.step_deadline_ms == SchedulerConfig().step_deadline_ms
    assert ours.lora == LoraConfig()


def test_context_may_be_as_long_as_the_cache_allows():
    theirs = vllm_config(model_config__original_max_model_len=-1)
    assert fits_max_model_len(theirs)
    assert worker_config(theirs, Settings(), "/m").model.max_model_len is None
    assert not fits_max_model_len(vllm_config())


@pytest.mark.parametrize(
    ("method", "config", "ours"),
    [
        (None, None, "auto"),
        ("fp8", None, "fp8"),
        ("fp8", {"quant_method": "fp8"}, "auto"),
        ("compressed-tensors", {"quant_method": "compressed-tensors"}, "auto"),
        ("awq", {"quant_method": "awq"}, "auto"),
        ("awq_marlin", {"quant_method": "awq"}, "auto"),
        ("gptq", {"quant_method": "gptq"}, "auto"),
        ("gptq_marlin", {"quant_method": "gptq"}, "auto"),
        ("mxfp4", {"quant_method": "mxfp4"}, "auto"),
        ("gpt_oss_mxfp4", {"quant_method": "mxfp4"}, "auto"),
    ],
)
def test_quantized_weights(method, config, ours):
    hf_config = SimpleNamespace() if config is None else SimpleNamespace(quantization_config=config)
    theirs = vllm_config(
        model_config__quantization=method,
        model_config__hf_config=hf_config,
        quant_config=None if method is None else object(),
    )
    check_config(theirs)
    assert worker_config(theirs, Settings(), "/m").model.quantization == ours


@pytest.mark.parametrize(
    ("theirs", "ours"), [("auto", "auto"), ("fp8", "fp8"), ("fp8_e4m3", "fp8")]
)
def test_cache_in_fp8(theirs, ours):
    config = vllm_config(cache_config__cache_dtype=theirs)
    check_config(config)
    settings = Settings(prompt_attention_dtype="fp8")
    cache = worker_config(config, settings, "/m").cache
    assert (cache.kv_cache_dtype, cache.prompt_attention_dtype) == (ours, "fp8")


@pytest.mark.parametrize("load_format", ["auto", "safetensors", "dummy", "sharded_state"])
def test_load_formats_that_daemons_have(load_format):
    theirs = vllm_config(load_config__load_format=load_format)
    check_config(theirs)
    check_ours(worker_config(theirs, Settings(), "/m"))


def test_experts_are_divided_where_vllm_divides_them():
    for divided in (False, True):
        theirs = vllm_config(parallel_config__enable_expert_parallel=divided)
        check_config(theirs)
        ours = worker_config(theirs, Settings(), "/m")
        assert ours.model.enable_expert_parallel == divided


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"speculative_config": object()}, "speculative_config"),
        ({"kv_transfer_config": object()}, "kv_transfer_config"),
        ({"ec_transfer_config": object()}, "ec_transfer_config"),
        ({"watermark_config": object()}, "watermark_config"),
        ({"diffusion_config": object()}, "diffusion_config"),
        ({"engram_config": object()}, "engram_config"),
        ({"parallel_config__data_parallel_size": 2}, "data_parallel_size"),
        ({"parallel_config__nnodes": 2}, "nnodes"),
        ({"parallel_config__enable_eplb": True}, "enable_eplb"),
        (
            {"parallel_config__eplb_config": eplb_config(num_redundant_experts=2)},
            "eplb_config.num_redundant_experts",
        ),
        (
            {"parallel_config__eplb_config": eplb_config(step_interval=100)},
            "eplb_config.step_interval",
        ),
        ({"parallel_config__decode_context_parallel_size": 2}, "decode_context_parallel_size"),
        ({"parallel_config__prefill_context_parallel_size": 2}, "prefill_context_parallel_size"),
        ({"model_config__quantization": "compressed-tensors"}, "quantization"),
        ({"model_config__quantization": "awq"}, "quantization"),
        ({"model_config__quantization": "fp8_per_block"}, "quantization"),
        (
            {
                "model_config__quantization": "bitsandbytes",
                "model_config__hf_config": SimpleNamespace(quantization_config={}),
            },
            "quantization",
        ),
        ({"model_config__is_encoder_decoder": True}, "model"),
        (
            {
                "model_config__is_multimodal_model": True,
                "model_config__multimodal_config": SimpleNamespace(language_model_only=False),
            },
            "model",
        ),
        ({"model_config__logits_processors": ["a.B"]}, "logits_processors"),
        ({"model_config__enable_return_routed_experts": True}, "enable_return_routed_experts"),
        ({"model_config__max_logprobs": 21}, "max_logprobs"),
        ({"model_config__max_logprobs": -1}, "max_logprobs"),
        ({"model_config__logprobs_mode": "processed_logits"}, "logprobs_mode"),
        ({"load_config__load_format": "gguf"}, "load_format"),
        ({"cache_config__cache_dtype": "fp8_e5m2"}, "cache_dtype"),
        ({"scheduler_config__async_scheduling": False}, "async_scheduling"),
        # what a later vLLM may add
        ({"later_config": section_of({"size": 1}, {})}, "later_config"),
        ({"lazy": True}, "lazy"),
        ({"later_config": 0}, "later_config"),
    ],
)
def test_what_is_not_served_is_refused_by_name(changes, field):
    with pytest.raises(ClientConfigError, match="do not serve") as caught:
        check(vllm_config(**changes), vllm_config())
    assert caught.value.field == field
    assert caught.value.fix


YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 96,
    "rope_theta": 10000.0,
}


def with_overrides(given, rope=YARN, longest=384):
    text = SimpleNamespace(rope_parameters=rope, max_position_embeddings=longest)
    return vllm_config(model_config__hf_overrides=given, model_config__hf_text_config=text)


@pytest.mark.parametrize(
    ("given", "sent"),
    [
        ({}, None),
        ({"rope_parameters": {}}, {"rope_parameters": YARN}),
        ({"rope_scaling": {}}, {"rope_parameters": YARN}),
        ({"max_position_embeddings": 5}, {"max_position_embeddings": 384}),
        (
            {"text_config": {"rope_parameters": {}, "max_position_embeddings": 5}},
            {"rope_parameters": YARN, "max_position_embeddings": 384},
        ),
    ],
)
def test_overrides_are_sent_as_vllm_has_them(given, sent):
    theirs = with_overrides(given)
    check_config(theirs)
    text = worker_config(theirs, Settings(), "/m").model.hf_overrides
    assert (json.loads(text) if text else None) == sent


@pytest.mark.parametrize(
    ("given", "rope", "field"),
    [
        ({"architectures": ["LlamaModel"]}, YARN, "hf_overrides.architectures"),
        ({"rope_theta": 5.0}, YARN, "hf_overrides.rope_theta"),
        ({"text_config": {"hidden_size": 5}}, YARN, "hf_overrides.hidden_size"),
        ({"text_config": 5}, YARN, "hf_overrides.text_config"),
        (print, YARN, "hf_overrides"),
        ({"rope_scaling": {}}, {"rope_type": "yarn"}, "hf_overrides.rope_parameters"),
        ({"rope_scaling": {}}, {"rope_theta": 1e4}, "hf_overrides.rope_parameters"),
        (
            {"rope_parameters": {}},
            {"full_attention": YARN, "sliding_attention": {"rope_type": "default"}},
            "hf_overrides.rope_parameters",
        ),
    ],
)
def test_other_overrides_are_refused(given, rope, field):
    with pytest.raises(ClientConfigError, match="do not serve") as caught:
        check_config(with_overrides(given, rope))
    assert caught.value.field == field


def test_adapters_of_another_dtype_are_refused():
    lora = section_of({"lora_dtype": "torch.float16"}, {})
    with pytest.raises(ClientConfigError, match="do not serve") as caught:
        check_config(vllm_config(lora_config=lora))
    assert caught.value.field == "lora_dtype"


def test_one_error_names_all_that_is_not_served():
    theirs = vllm_config(parallel_config__nnodes=2, model_config__logprobs_mode="processed_logits")
    with pytest.raises(ClientConfigError, match="do not serve this setting, nor nnodes"):
        check(theirs, vllm_config())


def part_of(name, value):
    """Return a part of a section."""
    return section_of({name: value}, {})


@pytest.mark.parametrize(
    ("section", "made", "usual", "field"),
    [
        ("offload_config", part_of("uva", part_of("gb", 4)), part_of("gb", 0), "uva.gb"),
        ("later_config", part_of("deep", part_of("er", 4)), part_of("er", 0), "deep.er"),
    ],
)
def test_parts_of_sections_are_closed_too(section, made, usual, field):
    default = part_of(field.partition(".")[0], usual)
    with pytest.raises(ClientConfigError, match="do not serve") as caught:
        check_sections(part_of(section, made), part_of(section, default))
    assert (caught.value.field, caught.value.value) == (f"{section}.{field}", 4)


@pytest.mark.parametrize("value", [False, 0, 2])
def test_what_is_on_by_default_is_refused_where_it_is_off(value):
    default = part_of("kernel_config", part_of("cute", True))
    with pytest.raises(ClientConfigError) as caught:
        check_sections(part_of("kernel_config", part_of("cute", value)), default)
    assert caught.value.field == "kernel_config.cute"


@pytest.mark.parametrize(("value", "usual"), [(None, False), (False, None), (4.0, 4), ([], [])])
def test_equal_values_are_no_difference(value, usual):
    made, default = (part_of("later_config", part_of("x", each)) for each in (value, usual))
    assert check_sections(made, default) == {}


def test_fields_without_an_effect_are_returned_with_the_reason():
    changed = vllm_config(parallel_config__nnodes=1)
    changed.parallel_config = section_of({"distributed_executor_backend": "mp"}, {})
    default = vllm_config()
    default.parallel_config = section_of({"distributed_executor_backend": "uni"}, {})
    assert check_sections(changed, default) == {
        "distributed_executor_backend": "daemons are processes"
    }
    changed.parallel_config.distributed_executor_backend = "ray"
    with pytest.raises(ClientConfigError, match="the daemons are the workers"):
        check_sections(changed, default)


def test_text_part_of_a_multimodal_model_is_served():
    check_config(
        vllm_config(
            model_config__is_multimodal_model=True,
            model_config__multimodal_config=SimpleNamespace(language_model_only=True),
        )
    )


def test_configuration_without_a_model_is_checked_as_far_as_it_goes():
    theirs = vllm_config()
    theirs.model_config = None
    check_config(theirs)


# ---------------------------------------------------------------- pooling

EMBEDS = PoolingSupport(
    tasks=(
        PooledTask(task="embed", width=8, states="mean"),
        PooledTask(task="token_embed", width=8, states="each"),
    )
)
CLASSIFIES = PoolingSupport(
    tasks=(PooledTask(task="classify", width=3, states="first"),), whole_prompts=True
)


def described(pooling=None, generates=False):
    """Return the fields of a model's description that are looked at."""
    return SimpleNamespace(generates=generates, pooling=pooling)


SIGMOID = "torch.nn.modules.activation.Sigmoid"


def checkpoint_of(activation, num_labels=1, problem_type=None):
    """Return the fields of a reranker's config.json."""
    return SimpleNamespace(
        num_labels=num_labels,
        problem_type=problem_type,
        sentence_transformers={"version": "5.0", "activation_fn": activation},
    )


@pytest.mark.parametrize(
    "checkpoint",
    [
        checkpoint_of(SIGMOID),
        checkpoint_of(SIGMOID, num_labels=2),
        checkpoint_of(None),
        checkpoint_of("torch.nn.Identity"),
        checkpoint_of("torch.nn.Identity", problem_type="regression"),
        SimpleNamespace(num_labels=1, sbert_ce_default_activation_function="torch.nn.Identity"),
    ],
)
def test_rerankers_whose_scores_are_made_as_vllm_makes_them(checkpoint):
    check_config(pooling_config(model_config__hf_config=checkpoint))


@pytest.mark.parametrize("is_async", [True, False])
def test_servers_that_pool_may_wait_for_each_step(is_async):
    check_config(
        pooling_config(pooler__use_activation=True, scheduler_config__async_scheduling=is_async)
    )


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"pooler__logit_mean": 0.5}, "logit_mean"),
        ({"pooler__step_tag_id": 3}, "step_tag_id"),
        ({"pooler__tok_pooling_type": "STEP"}, "pooler_config.tok_pooling_type"),
        ({"scheduler_config__long_prefill_token_threshold": 8}, "long_prefill_token_threshold"),
        (
            {"scheduler_config__long_prefill_token_threshold_adaptive": True},
            "long_prefill_token_threshold_adaptive",
        ),
        (
            {"model_config__hf_config": checkpoint_of(SIGMOID, problem_type="regression")},
            "hf_config.sentence_transformers.activation_fn",
        ),
        (
            {
                "model_config__hf_config": SimpleNamespace(
                    num_labels=2,
                    problem_type="multi_label_classification",
                    sbert_ce_default_activation_function="torch.nn.Identity",
                )
            },
            "hf_config.sbert_ce_default_activation_function",
        ),
    ],
)
def test_pooling_that_is_not_served_is_refused_by_name(changes, field):
    with pytest.raises(ClientConfigError, match="do not serve") as caught:
        check(pooling_config(**changes), pooling_config())
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("config", "model"),
    [
        (vllm_config(), described(EMBEDS, generates=True)),
        (pooling_config(pooler__seq_pooling_type="MEAN"), described(EMBEDS)),
        (
            pooling_config(
                pooler__seq_pooling_type="CLS",
                model_config__convert_type="classify",
                scheduler_config__enable_chunked_prefill=False,
            ),
            described(CLASSIFIES),
        ),
        (pooling_config(pooler__seq_pooling_type="MEAN"), described(EMBEDS, generates=True)),
    ],
)
def test_models_that_do_what_vllm_expects(config, model):
    check_loaded(config, model)


@pytest.mark.parametrize(
    ("config", "model", "field"),
    [
        (vllm_config(), described(EMBEDS), "runner"),
        (pooling_config(), described(EMBEDS), "pooler_config.pooling_type"),
        (
            pooling_config(pooler__seq_pooling_type="MEAN", model_config__convert_type="classify"),
            described(EMBEDS),
            "convert",
        ),
        (
            pooling_config(pooler__seq_pooling_type="CLS", model_config__convert_type="classify"),
            described(CLASSIFIES),
            "enable_chunked_prefill",
        ),
    ],
)
def test_models_that_do_something_else_are_refused(config, model, field):
    with pytest.raises(ClientConfigError, match="do not serve") as caught:
        check_loaded(config, model)
    assert caught.value.field == field


def test_models_that_keep_states_share_no_prefixes_and_have_no_drafts():
    sharing = vllm_config(cache_config__enable_prefix_caching=True)
    alone = vllm_config(cache_config__enable_prefix_caching=False)
    check_keeps_state(alone)
    with pytest.raises(ClientConfigError, match="--no-enable-prefix-caching"):
        check_keeps_state(sharing)
    alone.speculative_config = drafts()
    with pytest.raises(ClientConfigError, match="leave it out") as caught:
        check_keeps_state(alone)
    assert caught.value.field == "speculative_config"


def drafts(**changes):
    """Return vLLM's speculative_config."""
    fields = {
        "method": "ngram",
        "num_speculative_tokens": 5,
        "prompt_lookup_max": 7,
        "prompt_lookup_min": 3,
    }
    return section_of(fields, changes)


@pytest.mark.parametrize("method", ["ngram", "ngram_gpu"])
@pytest.mark.parametrize("suffix_lookup", [False, True])
def test_drafts_are_looked_up_on_the_daemons(method, suffix_lookup):
    theirs = vllm_config(speculative_config=drafts(method=method))
    settings = Settings(suffix_lookup=suffix_lookup)
    check_drafts(theirs, settings)
    ours = worker_config(theirs, settings, "/m")
    check_ours(ours)
    assert ours.speculative == SpeculativeConfig(
        method="suffix" if suffix_lookup else "ngram",
        num_speculative_tokens=5,
        prompt_lookup_max=7,
        prompt_lookup_min=3,
    )
    assert worker_config(vllm_config(), Settings(), "/m").speculative == SpeculativeConfig()


@pytest.mark.parametrize(
    ("config", "settings", "field", "fix"),
    [
        (vllm_config(speculative_config=drafts(method="eagle3")), {}, "method", "ngram"),
        (vllm_config(speculative_config=drafts(method="mtp")), {}, "method", "ngram"),
        (vllm_config(speculative_config=drafts(method="suffix")), {}, "method", "suffix_lookup"),
        (
            vllm_config(speculative_config=drafts(num_speculative_tokens=32)),
            {},
            "num_speculative_tokens",
            "at most 31",
        ),
        (
            vllm_config(speculative_config=drafts(prompt_lookup_max=33)),
            {},
            "prompt_lookup_max",
            "at most 32",
        ),
        (pooling_config(speculative_config=drafts()), {}, "speculative_config", "leave it out"),
        (vllm_config(), {"suffix_lookup": True}, "suffix_lookup", "speculative-config"),
    ],
)
def test_drafts_that_are_not_served_are_refused_by_name(config, settings, field, fix):
    with pytest.raises(ClientConfigError, match="do not serve") as caught:
        check_drafts(config, Settings(**settings))
    assert caught.value.field.split(".")[-1] == field
    assert fix in caught.value.fix
