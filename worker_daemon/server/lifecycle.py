"""Which request is legal in which state, and what it makes of the state: a table and a cursor in
it. No torch, no sockets, no event loop, no clock.

The state is a product of axes. An operation names what it needs of each axis; a new axis is a field
of State and a column of Rule.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final

from rpc_schema import lifecycle as lc
from rpc_schema import step
from rpc_schema import weight_transfer as wt
from rpc_schema.adoption import AdoptRequests
from rpc_schema.codec import StepMessage
from rpc_schema.lease import LeaseState
from rpc_schema.lifecycle import LinkState, LoadState, ServingState, TagState
from rpc_schema.plain_text import one_line
from worker_daemon.errors import StateError
from worker_daemon.memory_tags import ALL_AWAKE, MemoryTags

LOAD_CHAIN: Final[tuple[LoadState, ...]] = (
    "CREATED",
    "DEVICE_READY",
    "MODEL_LOADED",
    "KV_READY",
    "READY",
)
LINK_STATES: Final[tuple[LinkState, ...]] = ("none", "up", "broken")
SERVING_STATES: Final[tuple[ServingState, ...]] = ("SERVING", "DRAINING", "CLOSED", "FAILED")
HISTORY: Final = 20
MAX_CAUSE_BYTES: Final = 1024
"""A driver may have written it; a status has HISTORY of them."""
TOLD: Final = 3
"""Changes that a refusal names."""

_SERVING_MOVES: Final[Mapping[ServingState, frozenset[ServingState]]] = MappingProxyType(
    {
        "SERVING": frozenset(("DRAINING", "CLOSED", "FAILED")),
        "DRAINING": frozenset(("SERVING", "CLOSED", "FAILED")),
        "CLOSED": frozenset(),
        "FAILED": frozenset(("CLOSED",)),
    }
)


@dataclass(frozen=True, slots=True)
class State:
    """Where a daemon stands: one value an axis. `lease` is of no concern to the rules: the gate
    (sequence.py) refuses all requests but the holder's before they are asked."""

    load: LoadState = "CREATED"
    link: LinkState = "none"
    serving: ServingState = "SERVING"
    memory: MemoryTags = ALL_AWAKE
    lease: LeaseState = "free"

    def __str__(self) -> str:
        asleep = f"/{self.memory}" if self.memory != ALL_AWAKE else ""
        leased = f"/{self.lease}" if self.lease != "free" else ""
        return f"{self.load}/link {self.link}/{self.serving}{asleep}{leased}"


_ANY_TAG: Final[frozenset[TagState]] = frozenset(("awake", "asleep", "discarded", "lost"))
_AWAKE: Final[frozenset[TagState]] = frozenset(("awake",))
_THERE: Final[frozenset[TagState]] = frozenset(("awake", "lost"))


@dataclass(frozen=True, slots=True)
class Rule:
    """What an operation needs of each axis, and what its success makes of them (None:
    unchanged)."""

    load: frozenset[LoadState]
    link: frozenset[LinkState]
    load_after: LoadState | None = None
    link_after: LinkState | None = None
    weights: frozenset[TagState] = _ANY_TAG
    kv_cache: frozenset[TagState] = _ANY_TAG
    fills_weights: bool = False
    """Its success has written every weight."""

    def allows(self, state: State) -> bool:
        """Whether the operation is legal in `state`. Every operation needs SERVING."""
        return (
            state.serving == "SERVING"
            and state.load in self.load
            and state.link in self.link
            and state.memory.weights in self.weights
            and state.memory.kv_cache in self.kv_cache
        )


def _only(*states: LoadState) -> frozenset[LoadState]:
    return frozenset(states)


def _from(lowest: LoadState) -> frozenset[LoadState]:
    return frozenset(LOAD_CHAIN[LOAD_CHAIN.index(lowest) :])


_ANY: Final = frozenset(LINK_STATES)
_UP: Final[frozenset[LinkState]] = frozenset(("up",))
_DOWN: Final[frozenset[LinkState]] = frozenset(("none", "broken"))
_MADE: Final[frozenset[LinkState]] = frozenset(("up", "broken"))

RULES: Final[Mapping[type[StepMessage], Rule]] = MappingProxyType(
    {
        lc.InitDevice: Rule(_only("CREATED"), _DOWN, "DEVICE_READY", "up"),
        # May capture graphs anew, which run on weights and KV cache.
        lc.Relink: Rule(_from("DEVICE_READY"), _MADE, None, "up", weights=_THERE, kv_cache=_AWAKE),
        lc.Reset: Rule(_from("CREATED"), _ANY),
        lc.LoadModel: Rule(_only("DEVICE_READY"), _ANY, "MODEL_LOADED"),
        lc.GetKVCacheSpec: Rule(_from("MODEL_LOADED"), _ANY),
        lc.DetermineAvailableMemory: Rule(_only("MODEL_LOADED"), _UP, weights=_AWAKE),
        lc.UpdateMaxModelLen: Rule(_only("MODEL_LOADED", "KV_READY"), _ANY),
        lc.InitializeFromConfig: Rule(_only("MODEL_LOADED"), _ANY, "KV_READY", kv_cache=_AWAKE),
        lc.InitializeCache: Rule(_only("KV_READY"), _ANY),
        # In READY for the sake of another rank that is new; what the weights hold is no matter.
        lc.CompileOrWarmUpModel: Rule(
            _only("KV_READY", "READY"), _UP, "READY", weights=_THERE, kv_cache=_AWAKE
        ),
        lc.GetSupportedTasks: Rule(_from("MODEL_LOADED"), _ANY),
        lc.GetModelMetadata: Rule(_from("MODEL_LOADED"), _ANY),
        lc.SaveShardedState: Rule(_from("MODEL_LOADED"), _ANY, weights=_AWAKE),
        lc.FinishShardedState: Rule(_from("MODEL_LOADED"), _ANY),
        lc.SaveTensorizedModel: Rule(_from("MODEL_LOADED"), _ANY, weights=_AWAKE),
        lc.ComputeWeightChecksums: Rule(_from("MODEL_LOADED"), _ANY, weights=_AWAKE),
        lc.Profile: Rule(_from("DEVICE_READY"), _ANY),
        lc.Sleep: Rule(_from("MODEL_LOADED"), _ANY),
        lc.WakeUp: Rule(_from("MODEL_LOADED"), _ANY),
        lc.Discard: Rule(_from("MODEL_LOADED"), _ANY),
        wt.InitWeightTransferEngine: Rule(_from("DEVICE_READY"), _ANY),
        wt.StartWeightUpdate: Rule(_from("MODEL_LOADED"), _ANY, weights=_THERE),
        wt.UpdateWeights: Rule(_from("MODEL_LOADED"), _ANY, weights=_THERE),
        wt.FinishWeightUpdate: Rule(
            _from("MODEL_LOADED"), _ANY, weights=_THERE, fills_weights=True
        ),
        wt.ReloadWeights: Rule(_from("MODEL_LOADED"), _ANY, weights=_THERE, fills_weights=True),
        wt.UpdateConfig: Rule(_from("MODEL_LOADED"), _ANY),
        AdoptRequests: Rule(_only("READY"), _ANY),
        step.ExecuteModel: Rule(_only("READY"), _UP, weights=_AWAKE, kv_cache=_AWAKE),
        step.SampleTokens: Rule(_only("READY"), _UP, weights=_AWAKE, kv_cache=_AWAKE),
        step.ExecuteDummyBatch: Rule(_only("READY"), _UP, weights=_AWAKE, kv_cache=_AWAKE),
    }
)
"""Every step message, once. Reset also needs a target that is not above the present state."""


def legal(state: State) -> frozenset[type[StepMessage]]:
    """Return the operations that `state` allows."""
    return frozenset(kind for kind, rule in RULES.items() if rule.allows(state))


def reset_targets(state: State) -> tuple[LoadState, ...]:
    """Return what Reset may go back to from `state`."""
    reached = LOAD_CHAIN[: LOAD_CHAIN.index(state.load) + 1]
    return tuple(
        target for target in reached if target in ("CREATED", "DEVICE_READY", "MODEL_LOADED")
    )


def after(state: State, message: StepMessage) -> State:
    """Return the state that the success of `message` makes of `state`."""
    if isinstance(message, lc.Reset):
        return _after_reset(state, message)
    rule = RULES[type(message)]
    return replace(
        state,
        load=rule.load_after or state.load,
        link=rule.link_after or state.link,
        memory=_memory_after(state.memory, message, rule),
    )


def _after_reset(state: State, message: lc.Reset) -> State:
    """Memory that goes with the model or the KV cache sleeps no more."""
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
    """The cursor: the state, what it allows, and how it came about. Owned by the step thread."""

    __slots__ = ("_history", "_legal", "state")

    def __init__(self) -> None:
        self.state = State()
        self._legal = legal(self.state)
        self._history: deque[str] = deque(maxlen=HISTORY)

    @property
    def transitions(self) -> tuple[str, ...]:
        """The last HISTORY changes, oldest first, each `before -> after (cause)`."""
        return tuple(self._history)

    def check(self, message: StepMessage) -> None:
        """Raise StateError unless `message` is legal now."""
        if type(message) not in self._legal:
            self._refuse(message)
        if type(message) is lc.Reset and message.to not in reset_targets(self.state):
            self._refuse(message)

    def succeeded(self, message: StepMessage) -> bool:
        """Apply what `message` makes of the state; tell whether that changed it."""
        return self._move(after(self.state, message), type(message).__name__)

    def link_broke(self, cause: str) -> bool:
        """A communicator failed: steps are illegal until a Relink. Tell whether that is news."""
        if self.state.link != "up":
            return False
        return self._move(replace(self.state, link="broken"), cause)

    def serve(self, to: ServingState, cause: str) -> bool:
        """Go on to DRAINING, CLOSED or FAILED, or back from DRAINING; a move that the axis lacks is
        ignored."""
        if to not in _SERVING_MOVES[self.state.serving]:
            return False
        return self._move(replace(self.state, serving=to), cause)

    def leased(self, to: LeaseState, cause: str) -> bool:
        """The lease was granted, given back or has expired. Tell whether that is news."""
        return self._move(replace(self.state, lease=to), cause)

    def _move(self, to: State, cause: str) -> bool:
        if to == self.state:
            return False
        self._history.append(f"{self.state} -> {to} ({one_line(cause, MAX_CAUSE_BYTES)})")
        self.state = to
        self._legal = legal(to)
        return True

    def _refuse(self, message: StepMessage) -> None:
        names = ", ".join(sorted(kind.__name__ for kind in self._legal)) or "none"
        told = list(self._history)[-TOLD:]  # a status has all
        wanted = type(message).__name__
        if isinstance(message, lc.Reset):
            wanted += f"(to={message.to})"
            names += f"; Reset to {', '.join(reset_targets(self.state))}"
        raise StateError(
            f"{wanted} is not legal in {self.state}; legal are: {names}; "
            f"last transitions: {' | '.join(told) or 'none'}",
            fix=_way_to_wake(self.state, message),
        )


def _way_to_wake(state: State, message: StepMessage) -> str | None:
    """What makes `message` legal, if it is sleep that forbids it."""
    if not RULES[type(message)].allows(replace(state, memory=ALL_AWAKE)):
        return None
    steps = []
    away = [tag for tag, held in state.memory.states.items() if held not in _THERE]
    if away:
        steps.append(f"wake_up({away})")
    if state.memory.weights in ("discarded", "lost"):
        steps.append("load the weights again: their content is gone")
    return ", then ".join(steps) or None
