"""Decides which files of the daemon's directory have the KV blocks of a loaded model."""

import torch

from rpc_schema.config import CacheConfig
from rpc_schema.kv_cache import KVCacheConfig
from worker_daemon.distributed.parallel_state import ParallelState
from worker_daemon.errors import config_error
from worker_daemon.runner.connectors.file_traffic import FileTraffic
from worker_daemon.runner.connectors.filed_blocks import FiledBlocks
from worker_daemon.worker.host_memory import block_bytes_of
from worker_daemon.worker.loading import LoadedModel
from worker_daemon.worker.naming_blocks import block_identity

_FIELD = "cache.kv_files"


def check_kv_files(cache: CacheConfig, traffic: FileTraffic | None) -> None:
    """Check that the daemon has a directory for files of KV blocks, if it is to keep any.

    Raises:
        ConfigError: it has none.
    """
    if cache.kv_files and traffic is None:
        problem = "the daemon has no directory for files of KV blocks"
        raise config_error(_FIELD, True, problem, "start it with --kv-file-dir, or False")


def open_filed_blocks(
    plan: KVCacheConfig,
    model: LoadedModel,
    parallel: ParallelState,
    device: torch.device,
    traffic: FileTraffic | None,
) -> FiledBlocks | None:
    """Return the files of a plan's blocks; None if it keeps none.

    Raises:
        ConfigError: a page is no whole number of words.
    """
    if not model.config.cache.kv_files or traffic is None:
        return None
    return FiledBlocks(
        traffic,
        block_identity(plan, model, parallel),
        block_bytes_of(plan, _FIELD, True),
        page_locks=device.type == "cuda",
    )
