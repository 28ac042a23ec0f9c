"""Which link each rank of a group stands in, and how long ranks may take to meet on the next. Knows
no socket."""

from worker_client.outcomes import DEFAULT_STEP_DEADLINE_S

LINK_SLACK_S = 30.0


def link_timeout_s(step_deadline_s: float) -> float:
    """Return how long ranks may take to leave one link and meet on the next.

    They wait for each other for up to twice the communicators' own timeout (the step deadline and a
    second) and 5 s; their verdict is to come before ours.
    """
    return 2 * (step_deadline_s + 1.0) + 5.0 + LINK_SLACK_S


class Links:
    """One group's. Owned by its channel."""

    def __init__(self, num_ranks: int) -> None:
        self.numbers = [0] * num_ranks
        """By rank; 0 for none."""
        self.step_deadline_s = DEFAULT_STEP_DEADLINE_S
        """The longest that a rank's present link may have been built with."""

    @property
    def timeout_s(self) -> float:
        """How long ranks may take to leave these, and meet anew."""
        return link_timeout_s(self.step_deadline_s)

    def allow(self, step_deadline_s: float) -> None:
        """A link may be built with this deadline from now on."""
        self.step_deadline_s = max(self.step_deadline_s, step_deadline_s)
