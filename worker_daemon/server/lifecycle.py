"""The lifecycle: the legal requests of each state and the transitions, by the rules of
rpc_schema/operations.py. Pure: no torch, no sockets, no event loop, no clock.

The state has several axes. An operation states its requirement on each axis; a new axis is a field
of DaemonState and a column of Rule.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final

from rpc_schema import lifecycle as lc
from rpc_schema.errors import ShuttingDownError, StateError
from rpc_schema.health import LoadState, ServingState
from rpc_schema.lease import LeaseState
from rpc_schema.lifecycle import LinkState
from rpc_schema.operations import LOAD_CHAIN, STEP_OPERATIONS, THERE, Rule, StepMessage
from worker_daemon.worker.memory_tags import ALL_AWAKE, MemoryTags
from worker_host.plain_text import one_line

SERVING_STATES: Final[tuple[ServingState, ...]] = ("SERVING", "DRAINING", "CLOSED", "FAILED")
HISTORY: Final = 20
MAX_CAUSE_BYTES: Final = 1024
"""Limit on the length of a cause, which a driver may have written; a status has HISTORY of them."""
NUM_RECENT: Final = 3
"""Transitions that a refusal lists."""

_SERVING_MOVES: Final[Mapping[ServingState, frozenset[ServingState]]] = MappingProxyType(
    {
        "SERVING": frozenset(("DRAINING", "CLOSED", "FAILED")),
        "DRAINING": frozenset(("SERVING", "CLOSED", "FAILED")),
        "CLOSED": frozenset(),
        "FAILED": frozenset(("CLOSED",)),
    }
)


@dataclass(frozen=True, slots=True)
class DaemonState:
    """The state of a daemon: one value per axis. The rules ignore `lease`, because the gate
    (sequence.py) refuses all requests except the holder's."""

    load: LoadState = "CREATED"
    link: LinkState = "none"
    serving: ServingState = "SERVING"
    memory: MemoryTags = ALL_AWAKE
    lease: LeaseState = "free"

    def __str__(self) -> str:
        asleep = f"/{self.memory}" if self.memory != ALL_AWAKE else ""
        leased = f"/{self.lease}" if self.lease != "free" else ""
        return f"{self.load}/link {self.link}/{self.serving}{asleep}{leased}"


def allows(rule: Rule, state: DaemonState) -> bool:
    """Return True if an operation with this rule is legal in `state`. Every operation needs
    SERVING."""
    return (
        state.serving == "SERVING"
        and state.load in rule.load
        and state.link in rule.link
        and state.memory.weights in rule.weights
        and state.memory.kv_cache in rule.kv_cache
    )


def legal(state: DaemonState) -> frozenset[type[StepMessage]]:
    """Return the operations that `state` allows."""
    return frozenset(kind for kind, row in STEP_OPERATIONS.items() if allows(row.rule, state))


def reset_targets(state: DaemonState) -> tuple[LoadState, ...]:
    """Return the load states that Reset may go back to from `state`."""
    reached = LOAD_CHAIN[: LOAD_CHAIN.index(state.load) + 1]
    return tuple(
        target for target in reached if target in ("CREATED", "DEVICE_READY", "MODEL_LOADED")
    )


def after(state: DaemonState, message: StepMessage) -> DaemonState:
    """Return the state after the success of `message` in `state`."""
    if isinstance(message, lc.Reset):
        return _after_reset(state, message)
    rule = STEP_OPERATIONS[type(message)].rule
    return replace(
        state,
        load=rule.load_after or state.load,
        link=rule.link_after or state.link,
        memory=_memory_after(state.memory, message, rule),
    )


def _after_reset(state: DaemonState, message: lc.Reset) -> DaemonState:
    """Return the state after a Reset: freed memory no longer sleeps."""
    memory = state.memory.after_dropping_kv_cache()
    return replace(
        state,
        load=message.to,
        link="none" if message.to == "CREATED" else state.link,
        memory=memory if message.to == "MODEL_LOADED" else ALL_AWAKE,
    )


def _memory_after(memory: MemoryTags, message: StepMessage, rule: Rule) -> MemoryTags:
    match message:
        case lc.Sleep():
            return memory.after_sleep(message.level)
        case lc.WakeUp():
            return memory.after_wake_up(message.tags)
        case lc.Discard():
            return memory.after_discard(message.tags)
    return memory.after_filling() if rule.fills_weights else memory


class Lifecycle:
    """The current state, its legal requests, and its last transitions. Owned by the step thread."""

    __slots__ = ("_history", "legal", "state")

    def __init__(self) -> None:
        self.state = DaemonState()
        self.legal = legal(self.state)
        """Operations that the state allows."""
        self._history: deque[str] = deque(maxlen=HISTORY)

    @property
    def transitions(self) -> tuple[str, ...]:
        """The last HISTORY changes, oldest first, each `before -> after (cause)`."""
        return tuple(self._history)

    def check(self, message: StepMessage) -> None:
        """Raise StateError unless `message` is legal now, ShuttingDownError if nothing is any more:
        what an operator's drain refuses does not come here."""
        if type(message) not in self.legal:
            self._refuse(message)
        if type(message) is lc.Reset and message.to not in reset_targets(self.state):
            self._refuse(message)

    def succeeded(self, message: StepMessage) -> bool:
        """Apply the transition of `message`; return True if the state changed."""
        return self._move(after(self.state, message), type(message).__name__)

    def link_broke(self, cause: str) -> bool:
        """Record a broken link: steps are illegal until a Relink. Return True if the state
        changed."""
        if self.state.link != "up":
            return False
        return self._move(replace(self.state, link="broken"), cause)

    def serve(self, to: ServingState, cause: str) -> bool:
        """Move to DRAINING, CLOSED or FAILED, or back from DRAINING; return True if the state
        changed. Transitions that do not exist are ignored."""
        if to not in _SERVING_MOVES[self.state.serving]:
            return False
        return self._move(replace(self.state, serving=to), cause)

    def leased(self, to: LeaseState, cause: str) -> bool:
        """Record that the lease was granted, released or has expired. Return True if the state
        changed."""
        return self._move(replace(self.state, lease=to), cause)

    def _move(self, to: DaemonState, cause: str) -> bool:
        if to == self.state:
            return False
        self._history.append(f"{self.state} -> {to} ({one_line(cause, MAX_CAUSE_BYTES)})")
        self.state = to
        self.legal = legal(to)
        return True

    def _refuse(self, message: StepMessage) -> None:
        if self.state.serving != "SERVING":
            last = self._history[-1] if self._history else "started"
            raise shutting_down(f"{type(message).__name__} is refused; last transition: {last}")
        names = ", ".join(sorted(kind.__name__ for kind in self.legal)) or "none"
        recent = list(self._history)[-NUM_RECENT:]  # the status has all of them
        wanted = type(message).__name__
        if isinstance(message, lc.Reset):
            wanted += f"(to={message.to})"
            names += f"; Reset to {', '.join(reset_targets(self.state))}"
        raise StateError(
            f"{wanted} is not legal in {self.state}; legal are: {names}; "
            f"last transitions: {' | '.join(recent) or 'none'}",
            fix=_way_to_wake(self.state, message),
        )


def shutting_down(detail: str = "") -> ShuttingDownError:
    """Return the error for any request to a daemon that ends."""
    problem = "the daemon is shutting down" + (f": {detail}" if detail else "")
    return ShuttingDownError(problem, fix="use its successor, or another daemon")


def _way_to_wake(state: DaemonState, message: StepMessage) -> str | None:
    """Return the fix that makes `message` legal, if sleep is the only obstacle."""
    rule = STEP_OPERATIONS[type(message)].rule
    if not allows(rule, replace(state, memory=ALL_AWAKE)):
        return None
    steps = []
    away = [tag for tag, held in state.memory.states.items() if held not in THERE]
    if away:
        steps.append(f"wake_up({away})")
    if state.memory.weights in ("discarded", "lost"):
        steps.append("load the weights again: their content is lost")
    return ", then ".join(steps) or None
