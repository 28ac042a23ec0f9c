"""Division of a decoder over stages and ranks. Pure functions."""

from collections.abc import Iterator, Sequence

from rpc_schema.errors import ConfigError
from worker_daemon.errors import config_error
from worker_daemon.models.description import DecoderConfig


def check_partition(config: DecoderConfig, pp_size: int, tp_size: int, dp_size: int = 1) -> None:
    """Raise ConfigError unless pp_size stages of tp_size ranks can share the model. dp_size: number
    of replicas that share its experts."""
    _require_positive("pipeline_parallel_size", pp_size)
    _require_positive("tensor_parallel_size", tp_size)
    _check_stage_count(config.num_hidden_layers, pp_size)
    split = (size for mixer in config.mixers for size in mixer.split_sizes.items())
    for name, count in (*split, *_inner_sizes(config)):
        if count % tp_size:
            raise _tp_error(tp_size, f"does not divide {name} {count}")
    for experts in filter(None, config.layer_experts if config.expert_parallel else ()):
        if experts.num_experts < tp_size:
            problem = f"is more than the {experts.num_experts} experts that are to be divided"
            raise _tp_error(tp_size, problem, "use fewer ranks, or no expert parallelism")
        if experts.num_experts < tp_size * dp_size:
            problem = (
                f"{dp_size} replicas of {tp_size} ranks are more than the {experts.num_experts} "
                "experts that are to be divided"
            )
            fix = "use fewer replicas or ranks, or no expert parallelism"
            raise config_error("data_parallel_size", dp_size, problem, fix)
        if config.num_redundant_experts is not None:
            _check_slots(experts.num_experts, config.num_redundant_experts, tp_size * dp_size)
    kv_heads = tp_size if config.heads is None else config.heads.num_key_value_heads
    if kv_heads % tp_size and tp_size % kv_heads:
        raise _tp_error(
            tp_size, f"neither divides num_key_value_heads {kv_heads} nor is a multiple of it"
        )


def _check_slots(num_experts: int, num_redundant: int, num_ranks: int) -> None:
    """Raise ConfigError unless ranks can have equally many slots, without an expert twice."""
    if num_ranks == 1:
        problem, fix = "one rank has all experts", "leave it out, or use more ranks"
        raise config_error("enable_eplb", True, problem, fix)
    least, most = -num_experts % num_ranks, num_experts * (num_ranks - 1)
    if (num_experts + num_redundant) % num_ranks or num_redundant > most:
        problem = (
            f"{num_ranks} ranks cannot have equally many of {num_experts} experts and these, each "
            "rank an expert once"
        )
        fix = f"use {least}, or a multiple of {num_ranks} more, at most {most}"
        raise config_error("num_redundant_experts", num_redundant, problem, fix)


def _inner_sizes(config: DecoderConfig) -> Iterator[tuple[str, int]]:
    if config.intermediate_size is not None:
        yield "intermediate_size", config.intermediate_size
    for experts in set(config.layer_experts):
        if experts is not None:
            if not config.expert_parallel:
                yield "the experts' intermediate_size", experts.intermediate_size
            if experts.shared is not None:
                yield "the shared expert's intermediate_size", experts.shared.intermediate_size


def partition_layers(
    num_layers: int, pp_size: int, explicit: Sequence[int] | None = None
) -> tuple[range, ...]:
    """Return the layers of each stage, in order.

    Without an explicit list of layer counts the split is even. Remaining layers go to the middle
    stages, then to the first, because the first stage also has the embedding, and the last has the
    LM head and the sampler. Raises ConfigError for more stages than layers and for a list that does
    not fit.
    """
    _require_positive("pipeline_parallel_size", pp_size)
    _check_stage_count(num_layers, pp_size)
    counts = _even_counts(num_layers, pp_size) if explicit is None else list(explicit)
    if len(counts) != pp_size or min(counts) < 1 or sum(counts) != num_layers:
        raise config_error(
            "parallel.layer_partition",
            counts,
            f"the partition must give each of {pp_size} stages at least one of {num_layers} layers",
            f"list {pp_size} positive counts with the sum {num_layers}",
        )
    ends = [sum(counts[: stage + 1]) for stage in range(pp_size)]
    return tuple(range(end - count, end) for end, count in zip(ends, counts, strict=True))


def _even_counts(num_layers: int, pp_size: int) -> list[int]:
    base, left_over = divmod(num_layers, pp_size)
    middle_then_first = [*range(1, pp_size - 1), 0]
    extra = set(middle_then_first[:left_over])
    return [base + (stage in extra) for stage in range(pp_size)]


def _check_stage_count(num_layers: int, pp_size: int) -> None:
    if pp_size > num_layers:
        problem = "there are more pipeline stages than layers"
        raise config_error("pipeline_parallel_size", pp_size, problem, f"use at most {num_layers}")


def _require_positive(field: str, value: int) -> None:
    if value < 1:
        raise config_error(field, value, f"{field} must be at least 1", "use 1")


def _tp_error(
    tp_size: int,
    problem: str,
    fix: str = "use a size that divides the model's heads and intermediate size",
) -> ConfigError:
    return config_error("tensor_parallel_size", tp_size, f"tensor_parallel_size {problem}", fix)
