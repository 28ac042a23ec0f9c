"""A scheduler that lets the device rest from drafting again and again, for tests of a drafter that
catches up."""

from worker_client.scheduler import Scheduler


class RestingScheduler(Scheduler):
    """Of 10 steps that decode, 6 in a row have no drafts, and the device makes none."""

    def __init__(self, limits):
        super().__init__(limits, clock=lambda: 0.0)
        self.num_rests = 0
        lengths = self._draft_lengths
        self._choose, self._rest = lengths.choose, lengths._rest
        lengths.choose = self._choose_or_rest  # several parts have this object
        self._num_chosen = 0

    def schedule(self):
        output = super().schedule()
        self.num_rests += output is not None and output.skip_drafts
        return output

    def _choose_or_rest(self, requests, group=0):
        """Choose drafts; with a clock that stands still, those of all steps that do not rest
        pay."""
        self._num_chosen += bool(requests)
        if self._num_chosen % 10 < 6:
            self._rest.plan(is_used=False, must_rest=True)
            return {}
        return self._choose(requests, group)
