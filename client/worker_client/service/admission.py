"""Bounds on what is unfinished: a full server refuses, rather than let clients wait without end."""

from worker_client.errors import request_error
from worker_client.service.errors import unavailable


class Admission:
    """Counts the samples that requests ask for, from the begin of a request to the end of its
    answer. Belongs to the event loop."""

    def __init__(self) -> None:
        self.most = 0
        """Bound on num_taken; 0 until the engine is ready."""
        self.num_taken = 0
        self.closed = "the model is being loaded"
        """Why nothing is taken; empty: it is."""

    def open(self, most: int) -> None:
        """Take requests from now on, with so many samples in all."""
        self.most, self.closed = most, ""

    def close(self, reason: str) -> None:
        """Refuse requests from now on; those that were taken go on."""
        self.closed = reason

    def ticket(self) -> "Ticket":
        """Return a request's share, which is empty at first."""
        return Ticket(self)


class Ticket:
    """One HTTP request's share; app.py releases it when the answer is over."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self._num = 0

    def take(self, num_samples: int) -> None:
        """Take so many samples in all.

        Raises:
            HttpError: there is no room (503).
            RequestError: there never is for so many.
        """
        admission, more = self._admission, num_samples - self._num
        if admission.closed and not self._num:
            raise unavailable(admission.closed)
        if num_samples > admission.most:
            fix = f"ask for at most {admission.most}, prompts times n"
            raise request_error("n", num_samples, "the server has no room for so many", fix)
        if more > 0:
            if admission.num_taken + more > admission.most:
                raise unavailable("too many requests are unfinished; fix: send it again later")
            admission.num_taken += more
            self._num += more

    def release(self) -> None:
        """Give all of it back. May be repeated."""
        self._admission.num_taken -= self._num
        self._num = 0
