"""The number of prompt tokens that a step may have while other requests decode, so that the time
between two tokens of a request (inter-token latency, ITL) stays under a target.

Decodes and chunks of prompts share steps without stalls, as in Sarathi-Serve (arXiv 2403.02310).
Its token budget is static, from a profile; here the cost of a token is learned from the steps
themselves, and the budget follows it.
"""

import math
import time
from collections import deque
from collections.abc import Callable
from typing import Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from worker_client.errors import config_error

Clock: TypeAlias = Callable[[], float]
"""Function that returns seconds, monotonically."""

MIN_PROMPT_TOKENS: Final = 64
"""Prompt tokens that a step may have whatever the target: prompts progress in every step."""

NUM_DEVIATIONS: Final = 3.0
"""Mean absolute deviations by which a step is planned to be shorter than the target, as TCP keeps
4 for its timeout (RFC 6298). With normal noise, 1 % of the steps exceed the target."""
MIN_MARGIN: Final = 0.03
MAX_MARGIN: Final = 0.5
FIRST_DEVIATION: Final = 0.05
DEVIATION_GAIN: Final = 1 / 16

DRIFT: Final = 0.01
"""Relative change of the cost that is expected from one step to the next."""
MIN_SHARE: Final = 0.1
"""Least share of a step's time that tokens are assumed to cost when the drift of the per-token
coefficient is estimated. Without it, a coefficient of 0 could not rise again."""
MIN_NOISE: Final = 0.02
"""Least relative standard deviation of a step's time."""
OUTLIER: Final = 0.5
"""Relative error beyond which a time is believed only if the next one repeats it."""
NUM_FIRST: Final = 4
"""Measured steps that are believed in any case."""
GROWTH: Final = 2
"""Factor by which a step may exceed the prompt tokens of the largest recent step."""
MEMORY: Final = 0.95
"""Factor by which each step with prompt tokens reduces the size of the largest one before it."""

TOKENS: Final = 1e-3
PAIRS: Final = 1e-6
"""Scales of the model's inputs: a coefficient is seconds per thousand tokens or million pairs."""
FIRST_SCALES: Final = (0.5, 1.0, 1 / 30)
"""Ratios of the coefficients before anything is measured: the constant to a thousand tokens to a
million pairs. With 1/30, attention doubles the cost of a token at 30,000 tokens of context."""


def check_max_itl_ms(value: float) -> None:
    """Check a target.

    Raises:
        ClientConfigError: it is not a positive, finite number.
    """
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or value <= 0:
        fix = "give milliseconds above 0, as in 50, or leave it out"
        raise config_error("max_itl_ms", value, "a target must be positive and finite", fix)


class StepLoad(NamedTuple):
    """Work of a step."""

    num_prompt_tokens: int
    num_decodes: int
    """Tokens of requests that decode: one of each, and their drafts."""
    num_pairs: float
    """Pairs of a prompt token in the step and a token that it attends to."""


class StepCost:
    """Seconds of a step as a linear function of its load: constant, new tokens, pairs. A Kalman
    filter whose coefficients change slowly, so that it follows growing batches and contexts."""

    def __init__(self, scale_s: float, num_stages: int = 1) -> None:
        """scale_s: the order of magnitude of a step's time; a tenth or ten times that will do.
        num_stages: number of consecutive steps whose errors are added up for the margin. In a
        pipeline, errors of neighbors cancel out: if one result is late, the next follows soon."""
        self._scales: NDArray[np.float64] = np.array(FIRST_SCALES)
        self._weights: NDArray[np.float64] = np.zeros(3)
        self._covariance = _uncertain(10 * scale_s * self._scales)
        self._deviation = FIRST_DEVIATION
        """Mean relative error of the total time of num_stages consecutive steps."""
        self._recent: deque[tuple[float, float]] = deque(maxlen=num_stages)
        """Errors and expected times of these steps, in seconds."""
        self._num_measured = 0
        self._last_error = 0.0
        """Relative error of the last step if it was an outlier, otherwise 0."""

    @property
    def is_known(self) -> bool:
        """True once a step was measured."""
        return self._num_measured > 0

    @property
    def margin(self) -> float:
        """Share of a target to leave for noise."""
        return min(MAX_MARGIN, max(MIN_MARGIN, NUM_DEVIATIONS * self._deviation))

    def seconds(self, load: StepLoad) -> float:
        """Return the expected time of a step."""
        return float(self._weights @ _inputs(load))

    def per_token(self, begin: int) -> tuple[float, float]:
        """Return the seconds of the next prompt token after `begin` earlier ones, and by how much
        each one costs more than the one before."""
        _, token, pair = map(float, self._weights)
        return token * TOKENS + pair * PAIRS * begin, pair * PAIRS

    def learn(self, load: StepLoad, seconds: float) -> None:
        """Take the measured time of a step into account. A single outlier, such as a pause of the
        host, is ignored; a second one in a row is a change."""
        inputs = _inputs(load)
        expected = float(self._weights @ inputs)
        scale = expected if expected > 0 else seconds
        if scale <= 0:
            return
        error = (seconds - expected) / scale
        if self._num_measured >= NUM_FIRST and abs(error) > OUTLIER:
            is_repeated = error * self._last_error > 0
            self._last_error = 0.0 if is_repeated else error
            if not is_repeated:
                return
            self._covariance += _uncertain(abs(error) * self._weights)
        else:
            self._last_error = 0.0
        self._num_measured += 1
        has_prompt = load.num_prompt_tokens > 0
        self._recent.append((seconds - expected, scale))
        if has_prompt:
            errors_s, scales_s = map(sum, zip(*self._recent, strict=True))
            size = min(abs(errors_s) / scales_s, OUTLIER)
            self._deviation += (size - self._deviation) * DEVIATION_GAIN
        self._update(inputs, seconds - expected, scale, has_prompt)

    def _update(
        self, inputs: NDArray[np.float64], error_s: float, scale_s: float, has_prompt: bool
    ) -> None:
        """Correct the weights by their shares in an error. Decodes alone correct the constant only:
        their number changes too little to tell the cost of a token."""
        drift = np.array([scale_s, 0.0, 0.0])
        if has_prompt:
            token = max(float(self._weights[1]), MIN_SHARE * scale_s / float(inputs[1]))
            drift[1:] = token * self._scales[1:]
        covariance = self._covariance + _uncertain(DRIFT * drift)
        spread = covariance @ inputs
        one = self._deviation * math.sqrt(len(self._recent))
        noise = (max(MIN_NOISE, one) * scale_s) ** 2
        gain = spread / (float(inputs @ spread) + noise)
        if not has_prompt:
            gain[1:] = 0.0
        # Joseph's form, which holds for any gain and stays positive definite.
        kept = np.eye(3) - np.outer(gain, inputs)
        self._covariance = kept @ covariance @ kept.T + noise * np.outer(gain, gain)
        self._weights = np.maximum(self._weights + gain * error_s, 0.0)


def _uncertain(deviations: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the covariance of independent weights with these standard deviations."""
    return np.diag(deviations * deviations)


def _inputs(load: StepLoad) -> NDArray[np.float64]:
    num_tokens = load.num_prompt_tokens + load.num_decodes
    return np.array([1.0, num_tokens * TOKENS, load.num_pairs * PAIRS])


class PromptAllowance:
    """Prompt tokens that one step may have."""

    def __init__(self, cost: StepCost, left_s: float, floor: int, most: int) -> None:
        """left_s: seconds that decodes leave for prompts. floor: tokens that are allowed in any
        case. most: tokens that are never exceeded."""
        self._cost = cost
        self._left_s = left_s
        self._floor = floor
        self._most = most

    def num_tokens(self, begin: int) -> int:
        """Return how many tokens a prompt may add after its first `begin` tokens."""
        by_time = 0
        if self._left_s > 0:
            first_s, growth_s = self._cost.per_token(begin)
            # The root of growth / 2 * n^2 + first * n = left, without cancellation.
            divisor = first_s + math.sqrt(first_s * first_s + 2 * growth_s * self._left_s)
            by_time = int(min(2 * self._left_s / divisor, self._most)) if divisor else self._most
        return max(min(by_time, self._most), self._floor, 0)

    def take(self, begin: int, count: int) -> None:
        """Note that a prompt adds tokens after its first `begin`."""
        first_s, growth_s = self._cost.per_token(begin)
        self._left_s -= count * (first_s + growth_s * count / 2)
        self._floor -= count
        self._most -= count


class _SentStep(NamedTuple):
    load: StepLoad
    sent_s: float
    is_alone: bool
    """No other step was in flight when it was sent."""
    is_first: bool
    """It has prompt tokens, and the step before it has none."""


class StepBudget:
    """The times of steps, and the allowances that follow from them. Belongs to the scheduler.

    A step's time runs from the result before it (or from its own sending, if that was later) to its
    own result, by the driver's clock. These intervals are what clients see: in a pipeline of P
    stages a request decodes in every P-th step, so its ITL is the sum of P of them, and each may
    take a P-th of the target. The first step with prompt tokens after steps without any has no
    other long step to overlap with. Its pass through P stages and the P - 1 short steps behind it
    may all lie between two tokens of a request. So each of these 2 P - 1 stage times may take only
    a (2 P - 1)-th of the target.
    """

    def __init__(
        self, max_itl_ms: float, num_stages: int = 1, clock: Clock = time.monotonic
    ) -> None:
        """max_itl_ms: the target, in milliseconds.

        Raises:
            ClientConfigError: the target is not a positive, finite number.
        """
        check_max_itl_ms(max_itl_ms)
        self._target_s = max_itl_ms * 1e-3
        self._num_stages = num_stages
        self._clock = clock
        self._cost = StepCost(self._target_s / num_stages, num_stages)
        self._in_flight: deque[_SentStep] = deque()
        self._last_result_s = -math.inf
        self._had_prompt = False
        """The last step sent has prompt tokens."""
        self._largest = 0.0
        """Prompt tokens of the largest recent step."""

    def allowance(self, num_decodes: int) -> PromptAllowance:
        """Return the prompt tokens of a step with so many tokens of requests that decode. Before
        anything is measured, it is MIN_PROMPT_TOKENS."""
        left_s = 0.0
        if self._cost.is_known:
            decodes_s = self._cost.seconds(StepLoad(0, num_decodes, 0.0))
            num_parts = self._num_stages if self._had_prompt else 2 * self._num_stages - 1
            left_s = self._target_s / num_parts * (1 - self._cost.margin) - decodes_s
        most = max(int(GROWTH * self._largest), MIN_PROMPT_TOKENS)
        return PromptAllowance(self._cost, left_s, MIN_PROMPT_TOKENS, most)

    def sent(self, load: StepLoad) -> None:
        """Note that a step is sent."""
        is_first = load.num_prompt_tokens > 0 and not self._had_prompt
        self._had_prompt = load.num_prompt_tokens > 0
        self._in_flight.append(_SentStep(load, self._clock(), not self._in_flight, is_first))

    def done(self) -> None:
        """Note the result of the oldest step in flight, and learn from its time."""
        if not self._in_flight:
            return
        step, now_s = self._in_flight.popleft(), self._clock()
        seconds = now_s - max(step.sent_s, self._last_result_s)
        self._last_result_s = now_s
        if step.is_alone:  # it has passed all stages, one after the other
            seconds /= self._num_stages
        elif step.is_first and self._num_stages > 1:
            return  # it has passed all stages too, while others idled: not the time of one stage
        load = step.load
        if load.num_prompt_tokens or load.num_decodes:
            self._cost.learn(load, seconds)
        if load.num_prompt_tokens:
            self._largest = max(MEMORY * self._largest, load.num_prompt_tokens)

    def failed(self, num_steps: int) -> None:
        """Forget the last steps in flight: they have no result."""
        for _ in range(min(num_steps, len(self._in_flight))):
            self._in_flight.pop()
