"""The parts of a step with drafts: each sample is that of a row whose tokens end with the drafts
before it, and rows go on from the samples that they gain."""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import torch

from rpc_schema.extensions import extension_of
from rpc_schema.prompt_embeds import EmbeddedRange, PromptEmbeds
from rpc_schema.sampling import (
    FullLogprobs,
    GivenLogprobs,
    GrammarMasks,
    LogprobTokens,
    PromptLogprobsWanted,
    TokenLogprobs,
)
from rpc_schema.step import NO_TOKEN, NewRequestData
from tests.support.sample_rows import sample_rows
from tests.support.token_rules import NUM_COMMON, RuleProcessor, random_params
from worker_client.requests import SamplingParams
from worker_daemon.runner.parts.interface import Chosen, PartContext
from worker_daemon.runner.parts.prompt_embeds import PromptEmbedsPart
from worker_daemon.runner.parts.registry import PARTS
from worker_daemon.runner.parts.step_parts import StepParts
from worker_daemon.runner.sample_rows import SampleRows, group_samples, replayed_rows
from worker_daemon.runner.scheduled_step import (
    NO_STEP_VALUES,
    NO_UPDATES,
    ScheduledStep,
    StepLimits,
)
from worker_daemon.sample.sampler import TorchSampling

CPU = torch.device("cpu")
VOCAB = 40
MOST = 4
"""Drafts of a row."""
NUM_ROWS = 6
STEPS = 50


def wave(vocab_size, device):
    """A logits processor that depends on positions."""
    tokens = torch.arange(vocab_size, device=device)
    return lambda logits, positions: logits + torch.sin(positions.unsqueeze(1) * (1 + tokens))


@dataclass
class Row:
    tokens: list[int]
    num_prompt: int
    params: SamplingParams


@dataclass
class Seen:
    """What the parts have made of one sample."""

    scores: torch.Tensor
    token: int
    reports: dict[type, tuple[torch.Tensor, ...]] = field(default_factory=dict)


class Runner:
    """All parts, with a request in some slots."""

    def __init__(self, num_rows):
        names = ("wave",)
        self.limits = StepLimits(
            num_rows, 64, 512, VOCAB, 4, 64, logits_processors=names, max_drafts=MOST
        )
        context = PartContext(
            self.limits, CPU, True, True, TorchSampling(), processors={"wave": wave}
        )
        self.members = [part(context) for part in PARTS if part.serves(context)]
        self.parts = StepParts(self.members, self.members[-1], context)
        self.requests: dict[int, NewRequestData] = {}

    def begin(self, slot, row):
        request = NewRequestData(
            slot=slot,
            req_id=f"r{slot}",
            num_tokens=len(row.tokens),
            num_prompt_tokens=row.num_prompt,
            num_computed_tokens=0,
            extensions=row.params.extensions(),
        )
        self.parts.check(request, self.limits)
        self.parts.admit([request], [np.array(row.tokens, np.int32)])
        self.requests[slot] = request

    def sample(self, logits, rows, masks=None):
        """Returns what the parts that the rows use make of each sample: as StepParts.sample does,
        but for what rows gain."""
        step_values = NO_STEP_VALUES
        if masks is not None:
            extension, words = masks
            step_values = self.parts.check_step((extension,), [words], self.limits)
        before, scores, reporting = logits.clone(), logits, []
        for part in self.acting(rows):
            values = None
            if part.step_extension is GrammarMasks:
                values = step_values.data[0][1] if step_values.data else None
            scores = part.adjust_logits(scores, rows, values)
            reporting.append((part, scores))
        tokens = self.parts.chooser.choose(scores, rows)
        chosen = Chosen(tokens, scores, self.parts.chooser)
        reports = [part.report(left, chosen, rows) for part, left in reporting]
        assert torch.equal(logits.nan_to_num(), before.nan_to_num())
        return [
            Seen(
                scores[index],
                token,
                {type(r.extension): tuple(c[index] for c in r.columns) for r in reports if r},
            )
            for index, token in enumerate(tokens.tolist())
        ]

    def gain(self, token_ids, rows):
        for part in self.acting(rows):
            if part.follows_tokens:
                part.gain(token_ids, rows)

    def acting(self, rows):
        extensions = [e for slot in set(rows.slots_np.tolist()) for e in self.extensions(slot)]
        kinds = {GrammarMasks, *map(type, extensions)}
        own = (part.request_extension for part in self.members)
        return [
            part
            for part, kind in zip(self.members, own, strict=True)
            if kind in kinds or part.step_extension in kinds
        ]

    def extensions(self, slot):
        return self.requests[slot].extensions


def drafted_rows(slots, positions, inputs, slack) -> SampleRows:
    """Rows of a step with drafts. slack: by which the host's positions are too high."""
    rows = sample_rows(slots, positions)
    bounds = rows.positions_np + np.asarray(slack, np.int32)
    rows = rows._replace(
        positions_np=bounds,
        are_bounds=bool(np.any(slack)),
        has_drafts=True,
        groups=group_samples(rows.slots_np, CPU),
    )
    return rows.following(torch.tensor(inputs))


def new_row(rng) -> Row:
    """A request with some of all options, of which some tokens may have been generated."""
    tokens = rng.integers(0, NUM_COMMON, rng.integers(1, 20)).tolist()
    stops = tuple(rng.integers(0, NUM_COMMON, 3).tolist())
    words = [tuple(rng.integers(0, NUM_COMMON, rng.integers(2, 4)).tolist()) for _ in range(60)]
    options = {
        "temperature": (float(rng.uniform(0.2, 1.5)), 0.5),
        "top_k": (int(rng.integers(1, 20)), 0.3),
        "top_p": (float(rng.uniform(0.3, 1)), 0.3),
        "min_p": (float(rng.uniform(0, 0.2)), 0.3),
        "seed": (int(rng.integers(1 << 62)), 1),
        "logprobs": (int(rng.integers(0, 5)), 0.4),
        "logprob_token_ids": (tuple(rng.permutation(VOCAB)[:3].tolist()), 0.3),
        "full_logprobs": (True, 0.4),
        "stop_token_ids": (stops, 0.7),
        "min_tokens": (int(rng.integers(1, 40)), 0.3),
        "bad_words": (tuple(words), 0.3),
        "logits_processors": (("wave",), 0.2),
    }
    chosen = {name: value for name, (value, share) in options.items() if rng.random() < share}
    params = msgspec.structs.replace(random_params(rng, VOCAB), **chosen)
    return Row(tokens, int(rng.integers(1, len(tokens) + 1)), params)


def grammar_masks(slots, allowed):
    """One mask for each entry of slots: bool [M, VOCAB]."""
    words = np.packbits(allowed, axis=1, bitorder="little")
    padded = np.zeros((len(slots), -(-VOCAB // 32) * 4), np.uint8)
    padded[:, : words.shape[1]] = words
    indices = np.arange(len(slots), dtype="<u2").tobytes()
    return GrammarMasks(slots=np.array(slots, "<u2").tobytes(), indices=indices), padded.tobytes()


class Step:
    """A step of random rows with random drafts, and what each sample must be: that of a request
    that begins with the row's tokens and the drafts before the sample."""

    def __init__(self, rng, rows, most):
        slots = sorted(rng.permutation(NUM_ROWS)[: rng.integers(1, NUM_ROWS + 1)].tolist())
        self.counts = {slot: int(rng.integers(0, most + 1)) for slot in slots}
        self.drafts: dict[int, list[int]] = {slot: [] for slot in slots}
        self.expected: dict[int, list[Seen]] = {slot: [] for slot in slots}
        self.logits: dict[int, torch.Tensor] = {}
        self.allowed: dict[int, np.ndarray] = {}
        for slot, count in self.counts.items():
            logits = torch.from_numpy(rng.standard_normal((count + 1, VOCAB))).float() * 2
            logits[:, :NUM_COMMON] += 1.5
            if rng.random() < 0.05:
                logits[rng.integers(count + 1)] = torch.nan
            self.logits[slot] = logits
            if rng.random() < 0.3:
                masks = rng.random((rng.integers(1, count + 2), VOCAB)) < 0.6
                masks[:, rng.integers(0, VOCAB, 6)] = True
                self.allowed[slot] = masks
        for place in range(most + 1):
            self.expect(rng, rows, place)

    def expect(self, rng, rows, place):
        own = [slot for slot, count in self.counts.items() if count >= place]
        if not own:
            return
        alone = Runner(NUM_ROWS)
        for slot in own:
            row = rows[slot]
            tokens = row.tokens + self.drafts[slot]
            alone.begin(slot, Row(tokens, row.num_prompt, row.params))
        positions = [len(rows[slot].tokens) + place for slot in own]
        logits = torch.stack([self.logits[slot][place] for slot in own])
        masks = {slot: self.mask(slot, place) for slot in own}
        masks = {slot: mask for slot, mask in masks.items() if mask is not None}
        given = grammar_masks([*masks], np.stack([*masks.values()])) if masks else None
        seen = alone.sample(logits, sample_rows(own, positions), given)
        for slot, each in zip(own, seen, strict=True):
            self.expected[slot].append(each)
            if self.counts[slot] > place:
                is_right = each.token != NO_TOKEN and rng.random() < 0.75
                draft = each.token if is_right else int(rng.integers(0, NUM_COMMON))
                self.drafts[slot].append(draft)

    def mask(self, slot, place):
        """A row's masks are those of its newest samples."""
        masks = self.allowed.get(slot)
        index = place - self.counts[slot] - 1
        return None if masks is None or len(masks) < -index else masks[index]

    def run(self, rng, runner, rows):
        """Returns what the samples of each slot are in one step, and tells the parts what rows
        gain."""
        slots, positions, inputs, slack = [], [], [], []
        for slot, count in self.counts.items():
            tokens, bound = rows[slot].tokens, int(rng.integers(0, 30))
            slots += [slot] * (count + 1)
            positions += range(len(tokens), len(tokens) + count + 1)
            inputs += [tokens[-1], *self.drafts[slot]]
            slack += [bound] * (count + 1)
        sampled = drafted_rows(slots, positions, inputs, np.array(slack) * (rng.random() < 0.6))
        if not any(self.counts.values()) and rng.random() < 0.8:
            sampled = sample_rows(slots, positions)
        masked = [slot for slot, masks in self.allowed.items() for _ in masks]
        given = None
        if masked:
            given = grammar_masks(masked, np.concatenate([*self.allowed.values()]))
        seen = iter(runner.sample(torch.cat([*self.logits.values()]), sampled, given))
        found = {slot: [next(seen) for _ in range(n + 1)] for slot, n in self.counts.items()}
        gained = {slot: self.gained(slot) for slot in self.counts}
        column = [
            t
            for slot, own in gained.items()
            for t in own + [NO_TOKEN] * (self.counts[slot] + 1 - len(own))
        ]
        runner.gain(torch.tensor(column), sampled)
        return found, {slot: [t for t in own if t != NO_TOKEN] for slot, own in gained.items()}

    def gained(self, slot):
        """The samples up to the first that is not the draft after it, or has no sample after."""
        tokens = [seen.token for seen in self.expected[slot]]
        kept = 0
        while kept < self.counts[slot] and tokens[kept] == self.drafts[slot][kept]:
            if tokens[kept + 1] == NO_TOKEN:
                break
            kept += 1
        return tokens[: kept + 1]


def same(found: torch.Tensor, expected: torch.Tensor, what: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True, msg=str(what))


def check_reports(params, found: Seen, expected: Seen, what) -> None:
    """A row's reports are as wide as those of the batch."""
    extensions = params.extensions()
    if params.logprobs is not None:
        for ours, theirs in zip(
            found.reports[TokenLogprobs], expected.reports[TokenLogprobs], strict=True
        ):
            width = params.logprobs + 1  # ranks are no columns
            same(ours.flatten()[:width], theirs.flatten()[:width], what)
    if params.full_logprobs:
        both = found.reports[FullLogprobs], expected.reports[FullLogprobs]
        for ours, theirs in zip(*both, strict=True):
            same(ours, theirs, what)
    if (named := extension_of(extensions, LogprobTokens)) is not None:
        width = len(named.token_ids) // 4
        (ours,), (theirs,) = (each.reports[GivenLogprobs] for each in (found, expected))
        same(ours[:width], theirs[:width], what)


def test_samples_are_those_of_rows_whose_tokens_end_with_the_drafts():
    """In steps with and without drafts, of rows that come and go, all parts mixed; exactly, and
    where a row has token rules alone also by transformers' processors."""
    seed = int(np.random.default_rng().integers(1 << 30))
    rng = np.random.default_rng(seed)
    runner, rows, accepted, judged = Runner(NUM_ROWS), {}, 0, 0
    for number in range(STEPS):
        for slot in range(NUM_ROWS):
            if slot not in rows or rng.random() < 0.05:
                rows[slot] = new_row(rng)
                runner.begin(slot, rows[slot])
        step = Step(rng, rows, MOST if rng.random() < 0.8 else 0)
        found, gained = step.run(rng, runner, rows)
        for slot, seen in found.items():
            row = rows[slot]
            what = seed, number, slot, row, step.drafts[slot]
            for place, (ours, expected) in enumerate(zip(seen, step.expected[slot], strict=True)):
                same(ours.scores, expected.scores, (*what, place))
                assert ours.token == expected.token, (*what, place)
                if ours.token != NO_TOKEN:
                    check_reports(row.params, ours, expected, (*what, place))
                if (
                    step.mask(slot, place) is None
                    and not row.params.min_tokens
                    and not row.params.logits_processors
                ):
                    judged += place > 0
                    tokens = torch.tensor([row.tokens + step.drafts[slot][:place]])
                    rules = RuleProcessor(row.params, row.num_prompt)
                    scores = rules(tokens, step.logits[slot][place : place + 1])[0]
                    torch.testing.assert_close(
                        ours.scores.float(), scores, rtol=1e-5, atol=1e-4, equal_nan=True
                    )
            accepted += len(gained[slot]) - 1
            row.tokens += gained[slot]
    assert accepted > 40
    assert judged > 5


def test_a_draft_counts_in_every_sample_behind_it():
    """Token 3 is in the prompt, and twice among the drafts; 3, 5 are a bad word from the known
    token on, and 3, 3, 4 from a draft on."""
    runner = Runner(NUM_ROWS)
    params = SamplingParams(
        presence_penalty=1.0,
        frequency_penalty=0.5,
        repetition_penalty=2.0,
        bad_words=((3, 5), (3, 3, 4)),
    )
    runner.begin(2, Row([3], 1, params))
    rows = drafted_rows([2, 2, 2, 2], [1, 2, 3, 4], [3, 5, 3, 3], 0)
    seen = runner.sample(torch.full((4, VOCAB), 8.0), rows)
    of_three = [4.0, 4.0, 4 - 1.5, 4 - 2.0]
    assert [each.scores[3].item() for each in seen] == of_three
    banned = [(each.scores == -torch.inf).nonzero().flatten().tolist() for each in seen]
    assert banned == [[5], [], [5], [4, 5]]
    runner.gain(torch.tensor([5, 3, NO_TOKEN, NO_TOKEN]), rows)
    (after,) = runner.sample(torch.full((1, VOCAB), 8.0), sample_rows([2], [3]))
    assert [after.scores[token].item() for token in (3, 4, 5)] == [2.5, 8.0, -torch.inf]


def test_equal_tokens_that_a_row_gains_are_counted_each():
    runner = Runner(NUM_ROWS)
    for slot in (0, 1):
        runner.begin(slot, Row([9], 1, SamplingParams(frequency_penalty=1.0)))
    rows = drafted_rows([0, 0, 0, 1, 1], [1, 2, 3, 1, 2], [9, 7, 7, 9, 0], 0)
    runner.gain(torch.tensor([7, 7, 7, 0, NO_TOKEN]), rows)
    after = runner.sample(torch.zeros(2, VOCAB), sample_rows([0, 1], [4, 2]))
    assert [each.scores[[0, 7]].tolist() for each in after] == [[0, -3], [-1, 0]]


def step_of(slots, starts, counts) -> ScheduledStep:
    """A step that computes so many tokens of each slot, drafts included."""
    starts, counts = np.array(starts, np.int32), np.array(counts, np.int32)
    return ScheduledStep(
        seq=1,
        slots=np.array(slots),
        num_tokens=counts,
        starts=starts,
        ends=starts + counts,
        total_num_tokens=int(counts.sum()),
        longest=int((starts + counts).max()),
        num_samples=np.ones_like(counts),
        new_requests=(),
        block_updates=NO_UPDATES,
        deferred=None,
        step_values=NO_STEP_VALUES,
    )


def test_replayed_samples_are_those_of_rows_that_end_before_them():
    """In the places of all tokens that a row has: exactly."""
    seed = int(np.random.default_rng().integers(1 << 30))
    print("seed", seed)
    rng, compared = np.random.default_rng(seed), 0
    for number in range(30):
        row, slot = new_row(rng), number % NUM_ROWS
        runner = Runner(NUM_ROWS)
        runner.begin(slot, row)
        first = row.num_prompt
        given, count = np.array(row.tokens, np.int32), len(row.tokens) - first
        logits = torch.from_numpy(rng.standard_normal((count, VOCAB))).float()
        rows = replayed_rows(slot, first, count, given, CPU)
        targets = torch.from_numpy(given[first:].astype(np.int64))
        found = runner.parts.replay(logits, targets, rows)
        for place in range(count):
            alone, tokens = Runner(NUM_ROWS), row.tokens[: first + place]
            alone.begin(slot, Row(tokens, row.num_prompt, row.params))
            (seen,) = alone.sample(logits[place : place + 1], sample_rows([slot], [len(tokens)]))
            same(found.logits[place].float(), seen.scores.float(), (row, place))
            compared += 1
    assert compared > 40


def test_drafts_are_no_tokens_of_a_prompt():
    """Slot 1 computes the last 4 tokens of its prompt and 3 drafts; slot 0 decodes with drafts, at
    a position that is an upper bound; slot 2 computes a part of its prompt."""
    runner = Runner(NUM_ROWS)
    prompts = {0: [5, 6, 7], 1: [*range(10, 20)], 2: [*range(20, 32)]}
    for slot, tokens in prompts.items():
        params = SamplingParams(prompt_logprobs=1)
        runner.begin(slot, Row(tokens, len(tokens), params))
    (part,) = (m for m in runner.members if m.request_extension is PromptLogprobsWanted)
    hidden = torch.randn(64, VOCAB)
    positions = SimpleNamespace(compute=lambda states: states)
    report = part.report_forward(hidden, step_of([0, 1, 2], [30, 6, 2], [3, 7, 5]), positions)
    spans = np.frombuffer(report.extension.spans, "<i4").reshape(-1, 2).tolist()
    assert report.extension.req_ids == ("r1", "r2")
    assert spans == [[7, 3], [3, 5]]
    token_ids, logprobs, _ = report.columns
    targets = [*range(17, 20), *range(23, 28)]
    assert token_ids[:, 0].tolist() == targets
    states = hidden[[3, 4, 5, 10, 11, 12, 13, 14]].log_softmax(-1)
    torch.testing.assert_close(logprobs[:, 0], states[torch.arange(8), targets])


def test_drafts_have_no_embeddings_of_a_prompt():
    """The last embedded position is the prompt's last; drafts follow in the same step."""
    rows = np.arange(8, dtype=np.float32).reshape(2, 4)
    uploaded = SimpleNamespace(dtype="float32", array=rows)
    limits = StepLimits(2, 64, 512, VOCAB, 4, 64, hidden_size=4, max_drafts=MOST)
    part = PromptEmbedsPart(
        PartContext(limits, CPU, True, True, TorchSampling(), find_upload=lambda _: uploaded)
    )
    embeds = PromptEmbeds(
        content_hash=bytes(32),
        dtype="float32",
        width=4,
        ranges=(EmbeddedRange(start=3, length=2),),
    )
    request = NewRequestData(
        slot=1, req_id="r1", num_tokens=5, num_prompt_tokens=5, num_computed_tokens=0
    )
    part.admit([request], [embeds])
    step = step_of([0, 1], [9, 4], [2, 4])
    assert part.uses_step(step)
    part.fill([], step, None)
    hidden = part.before_forward(torch.full((6, 4), -1.0), [])
    assert hidden.tolist() == [[-1] * 4] * 2 + [[4, 5, 6, 7]] + [[-1] * 4] * 3
    assert not part.uses_step(step_of([1], [9], [4]))
