"""The group that computes prompts for the one that a server drives, on running daemons."""

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from worker_client.driven_group import DrivenGroup
from worker_client.driver import Driver
from worker_client.errors import ClientError
from worker_client.replicas.opening import open_replicas
from worker_client.replicas.prefill_group import DEFAULT_TIMEOUT_S, PrefillThread
from worker_client.scheduler import Scheduler
from worker_client.service.settings import PrefillSettings
from worker_client.worker_group import RankProgress

REOPEN_S: Final = 1.0
REPLACE_WITHIN_S: Final = 5.0
"""Time for the successor of a dead daemon, after which the group is opened again."""


@contextlib.contextmanager
def opening_prefill(settings: PrefillSettings) -> Iterator[PrefillThread]:
    """Begin to open the group on a thread: PrefillThread.wait_opened tells when it is. A group that
    ends later, as its daemons stay dead, is opened again until they are back; its requests are
    computed by the other group meanwhile. The daemons keep the model at the end."""
    opener, wait_s = _Opener(settings.group), settings.timeout_s
    wait_s = DEFAULT_TIMEOUT_S if wait_s is None else wait_s
    with PrefillThread(
        opener.open, host=settings.host, timeout_s=wait_s, reopen_s=REOPEN_S
    ) as prefill:
        opener.prefill = prefill
        yield prefill


class _Opener:
    """Opens the group and its driver. Belongs to the thread of the group."""

    def __init__(self, plan: DrivenGroup) -> None:
        self.prefill: PrefillThread | None = None
        self._plan = plan

    @contextlib.contextmanager
    def open(self) -> Iterator[Driver]:
        """Raises what open_replicas raises, and ClientError: the server ends."""
        plan = replace(self._plan, replace_within_s=REPLACE_WITHIN_S)
        with open_replicas(plan, self._check) as opened:
            # Later openings must not take daemons from others, nor wait: the thread tries again.
            self._plan = replace(self._plan, wait_s=0.0, reload=False, force=False)
            (own,) = opened.replicas
            yield Driver(own.group, Scheduler(own.limits), recover=own.recover)

    def _check(self, _: RankProgress) -> None:
        if self.prefill is not None and self.prefill.is_stopping:
            raise ClientError("the server ends while its prefill group is being opened")
