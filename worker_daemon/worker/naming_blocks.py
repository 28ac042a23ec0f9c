"""Names the KV blocks of a loaded model, for connectors that keep them outside of the process."""

from hashlib import blake2b

import msgspec

from rpc_schema.kv_cache import KVCacheConfig
from worker_daemon.distributed.parallel_state import ParallelState
from worker_daemon.runner.connectors.block_identity import BlockIdentity
from worker_daemon.worker.loading import LoadedModel


def block_identity(
    plan: KVCacheConfig, model: LoadedModel, parallel: ParallelState, *further: object
) -> BlockIdentity:
    """Return what decides the bytes of a rank's blocks but tokens. further: values that do so too,
    which JSON can express. More than that, such as the model's place, only means that fewer blocks
    are found."""
    config = model.config
    known = (
        config.model,
        config.speculative,
        config.cache.kv_cache_dtype,
        config.cache.prompt_attention_dtype,
        str(model.resolved.dtype),
        plan.block_size,
        plan.groups,
        plan.draft_layers,
        model.kv_cache_specs,
        (parallel.pp_size, parallel.pp_rank, parallel.tp_size, parallel.tp_rank),
        *further,
    )
    states = (model.weights, *(() if model.draft_weights is None else (model.draft_weights,)))
    return BlockIdentity(states, blake2b(msgspec.json.encode(known), digest_size=32).digest())
