"""The parts of a rank's blocks, as the host tier checks them and as they go to other groups."""

from itertools import groupby

from rpc_schema.kv_cache import KVCacheConfig, KVPages, LatentPages, RowState
from rpc_schema.kv_transfer import KVDraftPages, KVShard, KVShardGroup
from worker_daemon.distributed.parallel_state import ParallelState
from worker_daemon.errors import config_error
from worker_daemon.layers.cache_spec import KVLayerSpec, StateLayerSpec
from worker_daemon.models.description import DecoderConfig
from worker_daemon.runner.connectors.checksums import WORD_BYTES, BlockParts, PageSection
from worker_daemon.runner.connectors.peers import OwnShard
from worker_daemon.worker.loading import LoadedModel

_NO_WEIGHTS = bytes(32)
"""Takes the place of the name of weights, which may change later."""


def block_parts(plan: KVCacheConfig, model: LoadedModel, parallel: ParallelState) -> BlockParts:
    """Return the parts of a rank's blocks that have checksums of their own: each KV head in each
    page, if all layers have the same heads; else all of a page."""
    pages = _pages_of(model)
    own = [pages[name] for group in plan.groups for name in group.layer_names]
    block_size = plan.groups[0].block_size if plan.groups else plan.block_size
    num_pages = max((len(group.layer_names) for group in plan.groups), default=0)
    words = plan.size_bytes // plan.num_blocks // max(1, num_pages) // WORD_BYTES
    section = PageSection(num_pages, 0, 1, 1, words)
    if own and _are_alike(model.resolved.decoder):
        section = _section(own[0], block_size, model.resolved.decoder, parallel)
        section = section._replace(num_pages=num_pages)
    sections = [section] if num_pages else []
    draft = model.draft
    if draft is not None:
        drafts = (
            _section(pages[name], block_size, draft.resolved.decoder, parallel)
            for name in plan.draft_layers
        )
        sections += [form._replace(num_pages=len([*alike])) for form, alike in groupby(drafts)]
    return BlockParts(tuple(sections))


def layers_of_pages(plan: KVCacheConfig, model: LoadedModel) -> list[list[int]]:
    """Return, by KV group, the number on this rank of the layer that has each page."""
    numbers = {spec.layer_name: number for number, spec in enumerate(model.kv_cache_specs)}
    return [[numbers[name] for name in group.layer_names] for group in plan.groups]


def own_shard(
    plan: KVCacheConfig, model: LoadedModel, parallel: ParallelState, parts: BlockParts
) -> OwnShard:
    """Return what ranks of another group must know of this one.

    Raises:
        ConfigError: they cannot use its blocks: layers of the model, or of the draft model, have
            pages of different forms, or a KV head's part of a row is no whole number of words.
    """
    _check_alike("model.model", model.config.model.model, model.resolved.decoder)
    if model.draft is not None:
        draft = model.draft
        _check_alike("speculative.model", draft.config.model, draft.resolved.decoder)
    names = tuple(name for group in plan.groups for name in group.layer_names)
    pages = _pages_of(model)
    for layer, section in zip((names[0], *plan.draft_layers[:1]), parts.sections, strict=True):
        is_whole = section.rows == 1
        if is_whole and isinstance(pages[layer], KVPages) and parallel.tp_size > 1:
            problem = (
                f"{layer} has KV heads of no multiple of {WORD_BYTES} bytes, so that groups of "
                "another tensor parallel size cannot take its pages apart"
            )
            fix = "auto, or a tensor parallel size of 1"
            dtype = model.config.cache.kv_cache_dtype
            raise config_error("cache.kv_cache_dtype", dtype, problem, fix)
    first, *further = parts.sections
    drafts = None
    if further:
        (own,) = further
        drafts = KVDraftPages(
            layer_names=plan.draft_layers,
            dtype=pages[plan.draft_layers[0]].dtype,
            weights=_NO_WEIGHTS,
            **_form(own),
        )
    shard = KVShard(
        pp_rank=parallel.pp_rank,
        tp_rank=parallel.tp_rank,
        layer_names=names,
        dtype=plan.groups[0].dtype,
        weights=_NO_WEIGHTS,
        groups=tuple(
            KVShardGroup(num_layers=len(group.layer_names), sliding_window=group.sliding_window)
            for group in plan.groups
        ),
        drafts=drafts,
        **_form(first),
    )
    return OwnShard(shard, parts)


def _form(section: PageSection) -> dict[str, int]:
    return {
        "first_head": section.first_head,
        "num_heads": section.num_heads,
        "rows": section.rows,
        "words": section.words,
    }


def _pages_of(model: LoadedModel) -> dict[str, KVPages | LatentPages]:
    return {
        spec.layer_name: spec for spec in model.kv_cache_specs if not isinstance(spec, RowState)
    }


def _check_alike(field: str, name: str, decoder: DecoderConfig) -> None:
    """Raise ConfigError unless all layers have pages of one form. field, name: the model's."""
    if not _are_alike(decoder):
        problem = "layers with pages of different forms have blocks that only their own group reads"
        raise config_error(field, name, problem, "let the group that decodes compute all prompts")


def _are_alike(decoder: DecoderConfig) -> bool:
    """Return True if all layers have pages of one form."""
    specs = decoder.cache_specs(range(decoder.num_hidden_layers), tp_size=1)
    forms = {
        None if isinstance(spec, StateLayerSpec) else (spec.layout, *spec.page_shape(1))
        for spec in specs
    }
    return len(forms) == 1 and None not in forms


def _section(
    pages: KVPages | LatentPages, block_size: int, decoder: DecoderConfig, parallel: ParallelState
) -> PageSection:
    """Return the form of a layer's page. decoder: of the model that has the layer."""
    whole = PageSection(1, 0, 1, 1, block_size * pages.bytes_per_token // WORD_BYTES)
    if not isinstance(pages, KVPages):
        return whole
    row_bytes = pages.bytes_per_token // 2
    head_bytes = row_bytes // pages.num_kv_heads
    if head_bytes % WORD_BYTES:
        return whole
    of_model = decoder.cache_specs(range(decoder.num_hidden_layers), tp_size=1)
    num_heads = next(spec.num_kv_heads for spec in of_model if isinstance(spec, KVLayerSpec))
    return PageSection(
        1,
        parallel.tp_rank * num_heads // parallel.tp_size,
        pages.num_kv_heads,
        2 * block_size,
        head_bytes // WORD_BYTES,
    )
