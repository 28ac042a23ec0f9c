"""Treatment of running requests when weights change."""

from typing import Literal, TypeAlias

from rpc_schema.weight_transfer import RunningRows

RunningRequests: TypeAlias = RunningRows | Literal["abort"]
"""See GroupWeights.start_update."""
