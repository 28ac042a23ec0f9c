"""Descriptions of a worker's device, model and runner, for other threads."""

from functools import partial

import torch

from rpc_schema.kv_cache import KVCacheConfig
from worker_daemon.distributed.bubbles import InputWaits
from worker_daemon.models.weight_state import WeightReport, WeightState
from worker_daemon.runner.connectors.filed_blocks import FiledBlocks
from worker_daemon.runner.connectors.host_tier import TierCounts
from worker_daemon.worker.description import KVPeers, WorkerDescription
from worker_daemon.worker.expert_moves import moves_on_wire, placements_on_wire
from worker_daemon.worker.loading import LoadedModel
from worker_daemon.worker.memory_ledger import Kind
from worker_daemon.worker.rank_device import RankDevice
from worker_daemon.worker.serving import Serving


def describe(
    device: RankDevice,
    model: LoadedModel | None,
    serving: Serving | None,
    peers: KVPeers | None = None,
) -> WorkerDescription:
    """Describe what is loaded on a device, and its memory by use. None: not there yet. peers: what
    moves blocks to other groups."""
    opened = device.opened_or_none
    connectors = serving.runner.connectors if serving else None
    counts = () if connectors is None else connectors.counts
    tier = next((own for own in counts if isinstance(own, TierCounts)), None)
    slots = model.stage.expert_slots if model else None
    return WorkerDescription(
        device=device.name,
        config=model.config if model else None,
        model_names=model.resolved.names if model else (),
        kv_cache=serving.plan if serving else None,
        memory_bytes=memory_by_kind(device, model, serving),
        kv_cache_advice=opened.ledger.advice if opened else None,
        providers=_providers(device, model, serving),
        memory_tags=model.memory.states if model else {},
        weights=partial(_weights_report, model.weights if model else None),
        draft_weights=partial(_weights_report, model.draft_weights if model else None),
        # The description outlives a reset: it must hold no device memory.
        num_requests=serving.runner.state.num_requests if serving else int,
        num_kv_blocks_held=serving.runner.state.num_held_blocks if serving else int,
        draft_counts=serving.draft_counts if serving else None,
        uploads_in_use=serving.runner.state.uploads_in_use if serving else frozenset,
        input_wait_share=partial(_waiting_share, serving.runner.waits if serving else None),
        expert_loads=model.stage.expert_loads.known.get if model else dict,
        expert_placements=partial(placements_on_wire, slots.known) if slots else tuple,
        expert_moves=partial(moves_on_wire, slots.known) if slots else lambda: None,
        block_contents=serving.runner.state.contents if serving else None,
        host_contents=serving.runner.state.host_contents if serving else None,
        host_tier=(lambda: None) if tier is None else tier.status,
        filed=next((own for own in counts if isinstance(own, FiledBlocks)), None),
        peers=peers,
    )


def memory_by_kind(
    device: RankDevice, model: LoadedModel | None, serving: Serving | None
) -> dict[str, int]:
    """Return the bytes in use on a device, by kind."""
    opened = device.opened_or_none
    if opened is None:
        return {}
    held = dict(model.memory.bytes_by_kind()) if model else {}
    weights = model.weights_bytes if model else 0
    kv_cache = _cache_bytes(serving.plan) if serving else 0
    sizes: dict[Kind, int] = {
        "weights": held.pop("weights", weights),
        "kv_cache": held.pop("kv_cache", kv_cache),
    }
    if model is not None and model.adapters is not None:
        sizes["adapters"] = held.pop("adapters", model.adapters.slots.size_bytes)
    return opened.ledger.by_kind(sizes) | held


def _providers(
    device: RankDevice, model: LoadedModel | None, serving: Serving | None
) -> dict[str, str]:
    if model is None:
        return {}
    place = device.opened.place
    experts = place.sharing_experts(model.resolved.decoder)
    threads = {"threads": str(torch.get_num_threads())} if place.device.type == "cpu" else {}
    measured = model.attention.long_chunks
    return {
        "attention": model.attention.name,
        **({"long_chunks": measured} if measured else {}),
        "layers": model.stage.ops_name,
        "all_reduce": place.tp.all_reduce_name,
        **({} if experts is None else {"experts": experts.name}),
        "graphs": str(serving.num_graphs if serving else 0),
        **threads,
    }


def _cache_bytes(plan: KVCacheConfig) -> int:
    return plan.size_bytes + plan.draft_bytes


def _weights_report(weights: WeightState | None) -> WeightReport | None:
    return weights.report if weights is not None else None


def _waiting_share(waits: InputWaits | None) -> float:
    return waits.bubbles.waiting_share if waits is not None else 0.0
