"""The features of a driver, in the order in which they are asked, and their options."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final, TypeAlias

from worker_client.driver_parts.context import DriverContext
from worker_client.driver_parts.driver_parts import DriverParts
from worker_client.driver_parts.experts import expert_parts
from worker_client.driver_parts.host_tier import host_tier_parts
from worker_client.driver_parts.interface import DriverPart
from worker_client.driver_parts.kept_prefixes import KeptPrefixesPart
from worker_client.driver_parts.kv_files import kv_files_parts
from worker_client.driver_parts.remote_prefill import PrefillGroup, remote_prefill_parts
from worker_client.driver_parts.request_uploads import UploadsPart
from worker_client.driver_parts.weights import WeightsPart
from worker_client.structured.driver_parts import structured_parts
from worker_client.structured.masked_steps import CompiledGrammars


@dataclass(frozen=True, slots=True)
class DriverOptions:
    """Options of a driver's features."""

    grammars: CompiledGrammars | None = None
    """worker_client.structured.grammars.Grammars: serves requests with structured output, which
    jump forward if the scheduler can (JumpingScheduler). It stays the caller's. None: such requests
    are refused."""
    keeps_prefixes: bool = True
    """Begin with the cached prefixes of earlier drivers, and keep one's own for later ones, if the
    scheduler can (worker_client.driver_parts.kept_prefixes.RestoringScheduler); likewise with what
    they have left in the ranks' host memory (host_tier.TieredScheduler)."""
    eplb_step_interval: int | None = None
    """Steps from one rebalance of the group's experts to the next, for a group that was loaded with
    enable_eplb. None: the caller rebalances, or nobody."""
    prefill: PrefillGroup | None = None
    """Another group, which computes the prompts of requests (replicas/prefill_group.py). It stays
    the caller's. None: this group computes them."""


MakeParts: TypeAlias = Callable[[DriverContext, DriverOptions], Iterable[DriverPart]]
"""Returns the parts of a feature, which may be none."""

DRIVER_PARTS: Final[tuple[MakeParts, ...]] = (
    lambda context, options: (UploadsPart(context),),
    lambda context, options: structured_parts(context, options.grammars),
    lambda context, options: (WeightsPart(context),),
    lambda context, options: (KeptPrefixesPart(context),) if options.keeps_prefixes else (),
    lambda context, options: expert_parts(context, options.eplb_step_interval),
    lambda context, options: host_tier_parts(context, restores=options.keeps_prefixes),
    lambda context, options: kv_files_parts(context),
    lambda context, options: remote_prefill_parts(context, options.prefill),
)


def make_driver_parts(context: DriverContext, options: DriverOptions) -> DriverParts:
    """Return the parts of a driver."""
    return DriverParts([part for make in DRIVER_PARTS for part in make(context, options)])
