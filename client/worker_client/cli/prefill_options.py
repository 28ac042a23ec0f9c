"""The options of `serve` for the daemons of a group that computes the prompts of the other."""

import socket
from dataclasses import dataclass, replace
from typing import Annotated, Final

import typer
from msgspec import structs

from rpc_schema.config import LoraConfig, ParallelConfig
from worker_client.driven_group import DrivenGroup
from worker_client.errors import config_error
from worker_client.service.settings import PrefillSettings
from worker_client.wire.endpoint import split_endpoints
from worker_client.worker_group import parse_endpoints

LOOPBACK: Final = "127.0.0.1"
_NEEDS_DAEMONS: Final = (
    "prefill_pipeline_parallel_size",
    "prefill_tensor_parallel_size",
    "prefill_host",
    "prefill_timeout",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillOptions:
    """The daemons that compute prompts, and their group's sizes."""

    prefill_endpoints: Annotated[
        str | None,
        typer.Option(
            envvar="WORKER_CLIENT_PREFILL_ENDPOINTS",
            help="Running daemons that compute prompts for the others, in rank order: EP,EP,...",
        ),
    ] = None
    prefill_pipeline_parallel_size: Annotated[
        int | None, typer.Option(min=1, help="Their pipeline stages; default: 1.")
    ] = None
    prefill_tensor_parallel_size: Annotated[
        int | None,
        typer.Option(min=1, help="Ranks of a stage of theirs; default: by their number."),
    ] = None
    prefill_host: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            help="Address of this host at which daemons of both groups meet; default: 127.0.0.1.",
        ),
    ] = None
    prefill_timeout: Annotated[
        float | None,
        typer.Option(
            min=0.1,
            metavar="SECONDS",
            help="Time after which a request's prompt is computed here; default: 30.",
        ),
    ] = None

    def settings(self, plan: DrivenGroup) -> PrefillSettings | None:
        """Return the checked settings of the group that computes prompts for that of `plan`; None
        without one. Raises ClientConfigError."""
        if self.prefill_endpoints is None:
            for name in _NEEDS_DAEMONS:
                if (value := getattr(self, name)) is not None:
                    fix = "name its daemons: --prefill-endpoints EP,EP,..."
                    raise config_error(name, value, "there is no such group", fix)
            return None
        if plan.config.parallel.data_parallel_size > 1:
            problem = "prompts are computed apart for one replica"
            size = plan.config.parallel.data_parallel_size
            raise config_error("data_parallel_size", size, problem, "use 1, or no other group")
        endpoints = split_endpoints(self.prefill_endpoints)
        if not endpoints:
            fix = "give EP,EP,..., or leave the option out"
            raise config_error(
                "prefill_endpoints", self.prefill_endpoints, "it names no daemon", fix
            )
        parallel = self._parallel(len(endpoints))
        parse_endpoints(endpoints, parallel, plan.keys, 1, "prefill_endpoints")
        for both in {*endpoints} & {*plan.endpoints}:
            fix = "give each group daemons of its own"
            raise config_error("prefill_endpoints", both, "it is among --endpoints too", fix)
        if not plan.config.cache.kv_host_memory_bytes:
            problem = "blocks of the other group come to host memory"
            fix = "give --kv-host-memory-bytes: each rank keeps the blocks of some prompts there"
            raise config_error("kv_host_memory_bytes", 0, problem, fix)
        model = structs.replace(plan.config.model, enable_eplb=False, num_redundant_experts=0)
        config = structs.replace(plan.config, parallel=parallel, model=model, lora=LoraConfig())
        group = replace(
            plan,
            config=config,
            endpoints=endpoints,
            devices=(),
            max_itl_ms=None,
            eplb_step_interval=None,
        )
        return PrefillSettings(
            group=group,
            host=self._host((*endpoints, *plan.endpoints)),
            timeout_s=self.prefill_timeout,
        )

    def _parallel(self, num_daemons: int) -> ParallelConfig:
        stages = self.prefill_pipeline_parallel_size or 1
        ranks = self.prefill_tensor_parallel_size or max(1, num_daemons // stages)
        return ParallelConfig(pipeline_parallel_size=stages, tensor_parallel_size=ranks)

    def _host(self, endpoints: tuple[str, ...]) -> str:
        """Return the address at which daemons meet, of which one can be listened at."""
        host = self.prefill_host or LOOPBACK
        away = [each for each in endpoints if each.startswith("tcp://") and not _is_here(each)]
        if away and self.prefill_host is None:
            problem = f"{away[0]} may be on another host, which cannot reach {LOOPBACK}"
            fix = "give the address of this host that the daemons of both groups reach"
            raise config_error("prefill_host", None, problem, fix)
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            socket.create_server((host, 0), family=family).close()
        except OSError as error:
            problem = f"nothing can listen there: {error.strerror}"
            raise config_error("prefill_host", host, problem, "an address of this host") from None
        return host


def _is_here(endpoint: str) -> bool:
    host = endpoint.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    return host in (LOOPBACK, "::1", "localhost")
