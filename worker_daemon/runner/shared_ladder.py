"""Chooses the size of steps of replicas that share experts: one for all of them, since their graphs
hold the exchanges of their tokens. Pure."""

from bisect import bisect_left
from collections.abc import Sequence

from worker_daemon.runner.scheduled_step import ScheduledStep, TokensOfReplicas
from worker_daemon.runner.step_layout import ExactShapes, StepPlan


class SharedLadder(ExactShapes):
    """All replicas pad a step to the same number of tokens, which follows from its counts alone. A
    replica without a plan of that size for its own part runs eagerly, and exchanges as much."""

    pads = True

    def __init__(self, plans: Sequence[StepPlan], most_tokens: int) -> None:
        """plans: those of a StepLadder. most_tokens: of a step whose exchanges graphs can hold."""
        plans = [plan for plan in plans if plan.shape.num_tokens <= most_tokens]
        decodes = {plan.shape.num_tokens for plan in plans if plan.max_query_len == 1}
        mixed = {
            plan.shape.num_tokens
            for plan in plans
            if plan.max_query_len > 1 and not plan.shape.num_corrected
        }
        self._may_have_drafts = any(plan.shape.num_corrected for plan in plans)
        # With drafts, few steps of all replicas are mere decodes.
        self._decode_sizes = [] if self._may_have_drafts else sorted(decodes)
        self._mixed_sizes = sorted(mixed)
        sizes = {*self._decode_sizes, *self._mixed_sizes}
        self.plans = [plan for plan in plans if plan.shape.num_tokens in sizes]
        """All padded plans, each kind's largest first."""
        self._by_size: dict[int, list[StepPlan]] = {}
        """The plans of each size, the fastest first."""
        for plan in sorted(self.plans, key=lambda plan: (plan.max_query_len, plan.max_seq_len)):
            self._by_size.setdefault(plan.shape.num_tokens, []).append(plan)

    def size_of_all(self, tokens: TokensOfReplicas) -> int:
        """See ExactShapes: the next size that the graphs of all replicas have, if there is one."""
        most = super().size_of_all(tokens)
        first = 0 if tokens.are_decodes else 1
        for sizes in (self._decode_sizes, self._mixed_sizes)[first:]:
            if most and sizes and most <= sizes[-1]:
                return sizes[bisect_left(sizes, most)]
        return most

    def fit(self, step: ScheduledStep) -> StepPlan:
        """See StepLadder.fit. The step says the size of all replicas."""
        most_queries = int(step.num_tokens.max(initial=0))
        num_samples = int(step.num_samples.sum())
        has_bounds = self._may_have_drafts and step.corrections is not None
        for plan in self._by_size.get(step.shared_size, ()):
            if plan.max_query_len == 1 and (step.new_requests or has_bounds):
                continue
            if plan.shape.num_corrected and step.corrections is None:
                continue
            if (
                most_queries <= plan.max_query_len
                and step.slots.size <= plan.shape.num_seqs
                and num_samples <= plan.shape.num_samples
                and step.longest <= plan.max_seq_len
            ):
                return plan
        return super().fit(step)
