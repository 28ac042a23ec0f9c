"""vLLM's own defaults, from its classes: what a configuration would be without any option that
concerns the workers."""

import copy
import dataclasses
from types import SimpleNamespace
from typing import Any

from vllm.config import CompilationMode, CUDAGraphMode, ParallelConfig, PoolerConfig
from vllm.model_executor.models.config import MODELS_CONFIG_MAP

from worker_client.vllm.sections import OPTIONAL

_FP8_OPS = ["+quant_fp8"]
"""Value of custom_ops for checkpoints with a scale for each block."""


def defaults_of(vllm_config: Any) -> Any:
    """Return a configuration whose sections have vLLM's defaults, where it is about to derive the
    rest (Platform.apply_config_platform_defaults): with what it has derived by then from the model
    and from the sizes of the group. It is only to be read."""
    defaults = copy.copy(vllm_config)  # without __post_init__
    for entry in dataclasses.fields(vllm_config):
        value, usual = getattr(vllm_config, entry.name), _default(entry)
        if usual is None and value is not None and entry.name in OPTIONAL:
            usual = SimpleNamespace(**_defaults_of_class(type(value)))
        if entry.name != "model_config":
            setattr(defaults, entry.name, usual)
    theirs = vllm_config.parallel_config
    defaults.parallel_config = ParallelConfig(
        pipeline_parallel_size=theirs.pipeline_parallel_size,
        tensor_parallel_size=theirs.tensor_parallel_size,
    )
    defaults.parallel_config.set_dcp_defaults()
    model = vllm_config.model_config
    if model is not None:
        _derive(defaults, vllm_config)
        fields = _defaults_of_class(type(model))
        fields["pooler_config"] = None if model.pooler_config is None else PoolerConfig()
        defaults.model_config = SimpleNamespace(**fields)
    return defaults


def _derive(defaults: Any, vllm_config: Any) -> None:
    """Set what vLLM derives from the model."""
    model, compilation = vllm_config.model_config, defaults.compilation_config
    own = MODELS_CONFIG_MAP.get(model.architecture)
    if own is not None:
        own.verify_and_update_config(defaults)
    if model.enforce_eager:
        compilation.mode = CompilationMode.NONE
        compilation.cudagraph_mode = CUDAGraphMode.NONE
        defaults.kernel_config.enable_jit_warmup = False
    if vllm_config.quant_config is not None:
        asked = vllm_config.compilation_config.custom_ops
        compilation.custom_ops = _FP8_OPS if asked == _FP8_OPS else []


def _defaults_of_class(section: Any) -> dict[str, Any]:
    """Return the defaults of a section that cannot be made without options."""
    return {entry.name: _default(entry) for entry in dataclasses.fields(section)}


def _default(entry: "dataclasses.Field[Any]") -> Any:
    """Return the default of a field of a dataclass of pydantic."""
    default: Any = entry.default
    if hasattr(default, "get_default"):  # its FieldInfo
        return default.get_default(call_default_factory=True)
    if entry.default_factory is not dataclasses.MISSING:
        return entry.default_factory()
    return default
