"""Checked tokens need nothing of a rank but to be known: steps ask for the samples."""

from rpc_schema.checked_tokens import CheckedTokens

from rpc_schema.step import NewRequestData
from worker_daemon.runner.parts.interface import StepPart
from worker_daemon.runner.scheduled_step import StepLimits, invalid


class CheckedTokensPart(StepPart):
    """Refuses requests that would take more samples than there is memory for."""

    request_extension = CheckedTokens
    in_sampling = False

    def check(self, extension: CheckedTokens, request: NewRequestData, limits: StepLimits) -> None:
        most = limits.max_samples_per_seq - 1
        if extension.count > most:
            field = f"scheduled_new_reqs[{request.req_id}].checked_tokens"
            raise invalid(field, extension.count, f"at most {most}, or raise max_samples_per_seq")
