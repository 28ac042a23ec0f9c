"""A daemon without sockets that verifies drafts, in plain Python: it follows the wire's rules of
num_drafts, checks every count against what its rows truly have, and has a KV cache of tokens. A
sampled token is a function of what the row's blocks hold, so the KV of a refused draft that
somebody reads shows as a wrong token."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from rpc_schema import codec, step
from rpc_schema.sampling import TokenLogprobs
from tests.support.fake_daemon import VOCAB_SIZE, bitmap, named_slots, next_token
from worker_client.requests import SamplingParams


@dataclass
class DraftedRow:
    """A slot. Its bounds are what the driver knows."""

    req_id: str
    tokens: list[int]
    num_computed: int
    num_tokens: int
    seed: int
    logprobs: int | None
    blocks: list[int] = field(default_factory=list)
    is_bound: bool = False
    drafts: list[int] = field(default_factory=list)
    """Those that the device has made after the row's last step."""
    poisoned: bool = False

    @property
    def num_over(self) -> int:
        """Tokens by which both bounds exceed the truth."""
        return self.num_tokens - len(self.tokens)


def pairs_of(raw: bytes) -> dict[int, int]:
    pairs = np.frombuffer(raw, "<i4").reshape(-1, 2).tolist()
    assert [slot for slot, _ in pairs] == sorted({slot for slot, _ in pairs})
    return dict(pairs)


class DraftingDaemon:
    """Applies the frames of steps in order; returns their replies."""

    def __init__(
        self,
        rng: random.Random,
        accuracy: float,
        num_speculative_tokens: int,
        *,
        block_size: int = 4,
        num_blocks: int = 1 << 20,
        max_model_len: int = 1 << 20,
        poison: frozenset[int] = frozenset(),
    ) -> None:
        """accuracy: probability with which each draft is the token that will be sampled; poison:
        tokens after which logits are not finite."""
        self.accuracy = accuracy
        self.rows: dict[int, DraftedRow] = {}
        self.kv: dict[tuple[int, int], int] = {}
        self.num_drafted = self.num_accepted = 0
        self.num_settled = self.num_steady = 0
        self.messages: list[step.ExecuteModel] = []
        self._rng = rng
        self._most = num_speculative_tokens
        self._size = block_size
        self._num_blocks = num_blocks
        self._max_len = max_model_len
        self._poison = poison

    def apply(self, frames) -> tuple[step.ModelRunnerOutput, list[bytes]]:
        message, arrays = codec.decode_step(frames[:1]), frames[1:]
        self.messages.append(message)
        for slot in np.frombuffer(message.finished, "<u2").tolist():
            del self.rows[slot]
        if message.resync is not None:
            self._resync(np.frombuffer(message.resync, "<i4").reshape(-1, 4).tolist())
        for slot, count in np.frombuffer(message.corrections, "<i4").reshape(-1, 2).tolist():
            row = self.rows[slot]
            assert row.is_bound and 1 <= count <= row.num_over, (slot, count, row)
            row.num_computed -= count
            row.num_tokens -= count
        self._admit(message.scheduled_new_reqs, arrays)
        counts = dict.fromkeys(named_slots(message.scheduled), 1)
        given = pairs_of(message.num_scheduled_tokens)
        assert given.keys() <= counts.keys()
        counts |= given
        assert sum(counts.values()) == message.total_num_scheduled_tokens
        for slot in named_slots(message.settled):
            row = self.rows[slot]
            assert slot in counts and row.is_bound and row.num_over == 0, (slot, row)
            row.is_bound = False
            self.num_settled += 1
        for slot, block in zip(
            np.frombuffer(message.new_block_slots, "<u2").tolist(),
            np.frombuffer(message.new_block_ids, "<i4").tolist(),
            strict=True,
        ):
            assert 1 <= block < self._num_blocks
            self.rows[slot].blocks.append(block)
        drafts = pairs_of(message.num_drafts)
        assert drafts.keys() <= counts.keys() and not (drafts and message.num_samples)
        brought = np.frombuffer(message.draft_token_ids, "<i4").tolist()
        assert len(brought) in (0, sum(drafts.values()))
        own = {
            slot: [brought.pop(0) for _ in range(n if brought else 0)] for slot, n in drafts.items()
        }
        gained = {
            slot: self._run(slot, n, drafts.get(slot, 0), own.get(slot, []))
            for slot, n in counts.items()
        }
        self.num_steady += not (given or drafts or message.scheduled_new_reqs)
        return self._reply(message, {slot: each for slot, each in sorted(gained.items()) if each})

    def _resync(self, rows) -> None:
        for slot, computed, tokens, blocks in rows:
            row = self.rows[slot]
            held = row.num_computed, row.num_tokens, len(row.blocks)
            assert held == (computed, tokens, blocks), (slot, row, computed, tokens, blocks)
        kept = {row[0] for row in rows}
        self.rows = {slot: row for slot, row in self.rows.items() if slot in kept}

    def _admit(self, requests, arrays) -> None:
        tokens = np.frombuffer(arrays[0], "<i4").tolist() if requests else []
        for new in requests:
            assert new.slot not in self.rows
            own, tokens = tokens[: new.num_tokens], tokens[new.num_tokens :]
            sampling = SamplingParams.of(new.extensions)
            assert len(own) == new.num_tokens > new.num_computed_tokens
            self.rows[new.slot] = DraftedRow(
                new.req_id,
                own,
                new.num_computed_tokens,
                len(own),
                sampling.seed or 0,
                sampling.logprobs,
            )

    def _run(self, slot: int, count: int, num_drafts: int, brought: Sequence[int]) -> list[int]:
        """Compute a row's tokens; return those that it gains."""
        row = self.rows[slot]
        left = row.num_tokens - row.num_computed
        assert 1 <= count <= left + num_drafts, (slot, count, row)
        end = row.num_computed + count
        assert end <= min(len(row.blocks) * self._size, self._max_len), (slot, end, row)
        start = row.num_computed - row.num_over
        if num_drafts:
            assert 1 <= num_drafts <= self._most and count == left + num_drafts
            row.is_bound = True
        assert row.is_bound or row.num_over == 0
        made = [*row.drafts, *[0] * num_drafts][:num_drafts]
        drafts = (
            [d if d >= 0 else m for d, m in zip(brought, made, strict=True)] if brought else made
        )
        fed = [*row.tokens, *drafts][start : start + count]
        for place, token in enumerate(fed, start):
            self.kv[self._at(row, place)] = token
        row.num_computed = end
        if end < row.num_tokens + num_drafts:
            return []
        row.num_tokens += num_drafts + 1
        gained: list[int] = []
        for accepted in range(num_drafts + 1):
            last = len(row.tokens)
            seen = [self.kv[self._at(row, place)] for place in range(last)]
            row.poisoned = row.poisoned or not self._poison.isdisjoint(seen)
            if row.poisoned and accepted:
                break
            token = step.NO_TOKEN if row.poisoned else next_token(seen, row.seed)
            gained.append(token)
            row.tokens.append(token)
            if accepted == num_drafts or drafts[accepted] != token:
                break
        self.num_drafted += num_drafts
        self.num_accepted += len(gained) - 1
        row.drafts = self._propose(row)
        return gained

    def _propose(self, row: DraftedRow) -> list[int]:
        """Draft as a drafter with this accuracy would."""
        tokens, rng = [max(token, 0) for token in row.tokens], self._rng
        for _ in range(self._most):
            right = next_token(tokens, row.seed)
            wrong = (right + rng.randrange(1, VOCAB_SIZE)) % VOCAB_SIZE
            tokens.append(right if rng.random() < self.accuracy else wrong)
        return tokens[len(row.tokens) :]

    def _at(self, row: DraftedRow, place: int) -> tuple[int, int]:
        return row.blocks[place // self._size], place % self._size

    def _reply(self, message, gained) -> tuple[step.ModelRunnerOutput, list[bytes]]:
        tokens = np.array([token for own in gained.values() for token in own], "<i4")
        wanted = [self.rows[slot].logprobs for slot, own in gained.items() for _ in own]
        width = max((-1 if each is None else each for each in wanted), default=-1)
        extensions, arrays = (), []
        if width >= 0:
            extensions = (TokenLogprobs(width=width),)
            ids = np.repeat(tokens[:, None], width + 1, axis=1) + np.arange(width + 1)
            logprobs = -np.arange(width + 1, dtype="<f4")[None].repeat(tokens.size, 0)
            ranks = np.ones(tokens.size, "<i4")
            arrays = [ids.astype("<i4").tobytes(), logprobs.tobytes(), ranks.tobytes()]
        several = any(len(own) > 1 for own in gained.values())
        reply = step.ModelRunnerOutput(
            epoch=message.epoch,
            seq=message.seq,
            rank=0,
            slots=bitmap(gained),
            sampled_token_ids=tokens.tobytes(),
            num_sampled=bytes(map(len, gained.values())) if several else b"",
            extensions=extensions,
        )
        return reply, arrays
