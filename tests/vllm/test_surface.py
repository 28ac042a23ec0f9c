"""vLLM's interfaces that we use, compared with a golden file: a new version may not differ unseen.

After a look at what has changed: `python -m tests.vllm.test_surface > tests/vllm/surface.json`.
"""

import ast
import dataclasses
import inspect
import json
from pathlib import Path

import msgspec
import vllm
from vllm.config import KVTransferConfig, PoolerConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, SupportsHMA
from vllm.platforms.interface import Platform
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import SamplingParams
from vllm.v1.core.block_pool import BlockHashToBlockMap
from vllm.v1.core.kv_cache_metrics import KVCacheMetricsCollector
from vllm.v1.core.kv_cache_utils import KVCacheBlock, make_block_hash_with_group_id
from vllm.v1.core.sched import output as sched
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.executor.abstract import Executor
from vllm.v1.outputs import LogprobsLists, LogprobsTensors, ModelRunnerOutput
from vllm.v1.request import Request

from worker_client.vllm.hooks.platform import WorkerDaemonPlatform

GOLDEN = Path(__file__).with_name("surface.json")
SCHEDULER = (
    "__init__",
    "_handle_blocked_waiting_request",
    "_preempt_request",
    "add_request",
    "finish_requests",
    "reset_prefix_cache",
    "schedule",
    "update_from_output",
)
STRUCTS = (SamplingParams, PoolingParams, EngineCoreOutput)
DATACLASSES = (
    sched.SchedulerOutput,
    sched.NewRequestData,
    sched.CachedRequestData,
    sched.GrammarOutput,
    ModelRunnerOutput,
    VllmConfig,
    KVTransferConfig,
    PoolerConfig,
)


def methods(owner, names):
    """Return the signatures of methods."""
    return {name: str(inspect.signature(getattr(owner, name))) for name in sorted(names)}


def public(owner):
    """Return the names of a class's own functions, private ones left out."""
    own = {name: value for name, value in vars(owner).items() if not name.startswith("__")}
    return [n for n, v in own.items() if callable(getattr(v, "__func__", v)) and n[0] != "_"]


def called_by_name():
    """Return the operations that vLLM calls by name on its workers."""
    found = set()
    for path in (Path(vllm.__file__).parent / "v1").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "collective_rpc":
                found |= {a.value for a in node.args[:1] if isinstance(a, ast.Constant)}
    return sorted(found)


def surface():
    """Return what we use of vLLM, as JSON."""
    overridden = [name for name in public(WorkerDaemonPlatform) if hasattr(Platform, name)]
    return {
        "version": ".".join(vllm.__version__.split(".")[:2]),
        "executor": methods(Executor, public(Executor)),
        "platform": methods(Platform, (n for n in overridden if callable(getattr(Platform, n)))),
        "scheduler": methods(Scheduler, SCHEDULER) | methods(AsyncScheduler, ["__init__"]),
        "request": methods(Request, ["__init__", "update_block_hashes"]),
        "blocks": methods(KVCacheBlock, ["set_block_hash"])
        | methods(BlockHashToBlockMap, ["insert"]),
        "connector": methods(KVConnectorBase_V1, public(KVConnectorBase_V1))
        | methods(SupportsHMA, public(SupportsHMA)),
        "evictions": methods(KVCacheMetricsCollector, public(KVCacheMetricsCollector))
        | {"name": str(inspect.signature(make_block_hash_with_group_id))},
        "tuples": {each.__name__: each._fields for each in (LogprobsLists, LogprobsTensors)},
        "structs": {s.__name__: [f.name for f in msgspec.structs.fields(s)] for s in STRUCTS},
        "dataclasses": {d.__name__: [f.name for f in dataclasses.fields(d)] for d in DATACLASSES},
        "collective_rpc": called_by_name(),
    }


def test_surface_is_that_of_the_golden_file():
    """If this fails: see the module's first lines."""
    assert json.loads(json.dumps(surface())) == json.loads(GOLDEN.read_text())


if __name__ == "__main__":
    print(json.dumps(surface(), indent=1))
