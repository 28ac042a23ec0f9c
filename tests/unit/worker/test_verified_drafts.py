"""Steps that verify drafts: whatever is drafted, rows gain the tokens that they would gain without,
in whole prompts and decodes, beside rows without drafts, greedy and random, from the message and
from the device."""

import sys

import msgspec
import numpy as np
import pytest
from worker_driver import (
    GREEDY,
    SCHEDULER,
    WorkerDriver,
    bitmap,
    int32s,
    pack_masks,
    uint16s,
)

from rpc_schema.adoption import AdoptRequests
from rpc_schema.config import SpeculativeConfig
from rpc_schema.drafts import RowDrafts, TakeDraftTokenIds
from rpc_schema.errors import BadFrameError, InvalidStepError, PrecededByError
from rpc_schema.sampling import GrammarMasks
from rpc_schema.step import NO_TOKEN
from tests.support.text_checks import continued
from worker_client.group.drafts import read_drafts
from worker_client.requests import SamplingParams
from worker_daemon.runner.model_runner import ModelRunner
from worker_daemon.worker.worker import Worker

MOST = 4
VOCAB = 151
NOISY = SamplingParams(temperature=1.3, top_k=60, top_p=0.97, seed=2**61 + 5)
PARAMS = {
    "greedy": GREEDY,
    "random": NOISY,
    "reported": SamplingParams(temperature=0.7, seed=3, logprobs=2),
    "biased": SamplingParams(logit_bias={7: 3.0}, allowed_token_ids=tuple(range(0, VOCAB, 3))),
    "penalized": SamplingParams(
        # Of few tokens, most are often penalized or banned.
        allowed_token_ids=(5, 60, 70, 80, 90),
        frequency_penalty=0.3,
        repetition_penalty=1.2,
        bad_words=((5, 60), (60, 70, 5), (70, 70), (90, 80)),
    ),
    "long": SamplingParams(
        temperature=0.9, seed=6, min_tokens=12, stop_token_ids=tuple(range(0, VOCAB, 2))
    ),
}


def make_worker(model_root, method):
    worker = Worker("cpu", [model_root], lambda phase, seconds, done=0.0: None)
    drafted = SpeculativeConfig(method=method, num_speculative_tokens=MOST)
    driver = WorkerDriver(worker, speculative=drafted)
    driver.init_device()
    driver.serve("llama")
    return worker


@pytest.fixture(scope="module")
def brought(model_root, llama):
    worker = make_worker(model_root, "driver")
    yield worker
    worker.close()


@pytest.fixture(scope="module")
def looked_up(model_root, llama):
    worker = make_worker(model_root, "ngram")
    yield worker
    worker.close()


class Rows:
    """Requests that decode with drafts, and what they would gain without."""

    def __init__(self, worker, texts, params, count):
        worker.on_attach()
        self.driver = WorkerDriver(worker)
        self.texts, self.params = texts, params
        self.alone = {}
        for slot, text in texts.items():
            self.alone[slot] = self.driver.generate(slot, text, count, params)
        self.gained = {slot: [] for slot in texts}
        self.reports = {slot: [] for slot in texts}
        self.refused = {}

    def begin(self):
        new = [(slot, text, self.params) for slot, text in self.texts.items()]
        self.take({slot: len(text) for slot, text in self.texts.items()}, new=new)

    def take(self, scheduled, drafts=None, **fields):
        pairs = [v for slot, count in sorted(self.refused.items()) for v in (slot, count)]
        for slot, count in self.refused.items():
            self.driver.computed[slot] -= count
        fields["corrections"] = np.array(pairs, "<i4").tobytes()
        found = self.driver.execute(scheduled, drafts=drafts, **fields)
        self.refused = {}
        for slot, newest in found.items():
            own = [*newest.earlier, newest]
            self.gained[slot] += [each.token for each in own]
            self.reports[slot] += [each.logprobs for each in own]
            missing = 1 + len((drafts or {}).get(slot, ())) - len(own)
            if missing:
                self.refused[slot] = missing
        return found

    def check(self):
        for slot, tokens in self.gained.items():
            assert tokens == self.alone[slot][: len(tokens)]


def texts_of(prompts, seed, lengths=(9, 12, 7, 1, 11)):
    return dict(zip((0, 1, 3, 4, 6), prompts(lengths, seed=seed), strict=True))


@pytest.mark.parametrize("name", PARAMS)
def test_rows_gain_what_they_would_without_drafts(brought, prompts, name):
    """Drafts are right with a probability for each row, and their number changes by step."""
    rng = np.random.default_rng(len(name))
    rows = Rows(brought, texts_of(prompts, 51), PARAMS[name], 30)
    rows.begin()
    accepted = dict.fromkeys(rows.texts, 0)
    while min(map(len, rows.gained.values())) < 20:
        drafts = {}
        for slot, right in zip(rows.texts, (1.0, 0.8, 0.5, 0.0, 0.9), strict=True):
            have = len(rows.gained[slot])
            own = rows.alone[slot][have : have + int(rng.integers(0, MOST + 1))]
            wrong = rng.random(len(own)) >= right
            own = [(t + 1) % VOCAB if w else t for t, w in zip(own, wrong, strict=True)]
            if own and len(rows.gained[slot]) < 24:
                drafts[slot] = own
        scheduled = {
            slot: 1 + len(drafts.get(slot, ()))
            for slot in rows.texts
            if len(rows.gained[slot]) < 25
        }
        found = rows.take(scheduled, drafts)
        for slot in drafts:
            accepted[slot] += len(found[slot].earlier)
    rows.check()
    assert accepted[0] > 5 and accepted[4] == 0
    if name == "reported":
        for slot, text in rows.texts.items():
            driver = rows.driver
            driver.execute({}, finished=[slot])
            alone = [driver.execute({slot: len(text)}, [(slot, text, PARAMS[name])])[slot]]
            alone += [driver.execute({slot: 1})[slot] for _ in range(10)]
            for own, other in zip(rows.reports[slot], alone, strict=False):
                assert own == [(token, pytest.approx(p, abs=1e-4)) for token, p in other.logprobs]


def test_prompts_bring_drafts_of_their_first_tokens(brought, prompts):
    rows = Rows(brought, texts_of(prompts, 53), NOISY, 8)
    drafts = {slot: own[:MOST] for slot, own in rows.alone.items()}
    drafts[1] = [*drafts[1][:2], 0, 0]
    new = [(slot, text, NOISY) for slot, text in rows.texts.items()]
    rows.take({slot: len(text) + MOST for slot, text in rows.texts.items()}, drafts, new=new)
    assert [len(own) for own in rows.gained.values()] == [5, 3, 5, 5, 5]
    rows.check()


def test_the_next_step_is_sent_before_an_outcome_is_known(looked_up, prompts):
    """The device drafts from the rows' own texts: random ones are hardly ever right, and repeated
    ones often are. Corrections are a step late; then rows settle and decode on."""
    head = prompts([6], seed=55)[0]
    texts = texts_of(prompts, 57) | {1: head * 4}
    for params in (GREEDY, NOISY):
        rows = Rows(looked_up, texts, params, 40)
        rows.begin()
        drafts = dict.fromkeys(texts, [-1] * MOST)
        scheduled = dict.fromkeys(texts, 1 + MOST)
        waiting = {}
        for _ in range(4):
            late, rows.refused = rows.refused, waiting
            waiting = late
            rows.take(scheduled, drafts)
        rows.refused = {
            slot: rows.refused.get(slot, 0) + waiting.get(slot, 0)
            for slot in texts
            if slot in rows.refused or slot in waiting
        }
        rows.take(dict.fromkeys(texts, 1), settled=bytes([sum(1 << slot for slot in texts)]))
        for _ in range(3):
            rows.take(dict.fromkeys(texts, 1))
        rows.check()


def test_a_lookup_accelerates_a_text_that_repeats_itself(looked_up, prompts, llama):
    """A greedy row with few tokens to choose from soon repeats itself."""
    few = SamplingParams(allowed_token_ids=(5, 60, 70))
    rows = Rows(looked_up, {2: prompts([9], seed=59)[0]}, few, 110)
    rows.begin()
    steps = 0
    while len(rows.gained[2]) < 100:
        rows.take({2: 1 + MOST}, {2: [-1] * MOST})
        steps += 1
    rows.check()
    assert steps < 60


def test_a_row_gains_nothing_behind_a_draft_where_nothing_may_be_sampled(brought, prompts):
    """It samples there again in its next step, and fails if nothing may be sampled then either."""
    rows = Rows(brought, {2: prompts([9], seed=60)[0]}, NOISY, 12)
    rows.begin()
    driver = rows.driver
    for first in (1, 3, 0):
        have, fields = len(rows.gained[2]), {}
        if 2 in rows.refused:
            missing = rows.refused.pop(2)
            driver.computed[2] -= missing
            fields = {"corrections": int32s([2, missing])}
        own = rows.alone[2][have : have + MOST]
        fields |= {"num_drafts": int32s([2, MOST]), "draft_token_ids": int32s(own)}
        message, _ = driver.step({2: 1 + MOST}, defer=[2])
        driver.read(brought.execute_model(msgspec.structs.replace(message, **fields), []))
        masks = np.ones((1 + MOST, VOCAB), np.bool_)
        masks[first] = False
        found = driver.sample(message.seq, {2: masks})[2]
        assert len(found.earlier) == max(0, first - 1)
        rows.gained[2] += [each.token for each in [*found.earlier, found]]
        rows.refused[2] = MOST - len(found.earlier)
    assert rows.gained[2].pop() == NO_TOKEN
    rows.check()
    assert len(rows.gained[2]) == 1 + 1 + 3


def figures(counts):
    return np.array([counts.num_verified, counts.num_drafted, counts.num_accepted])


def test_outcomes_that_are_taken_during_a_new_rank_s_warm_up_count(brought, prompts, monkeypatch):
    """What the warm-up verifies does not."""
    rows = Rows(brought, {2: prompts([9], seed=60)[0]}, GREEDY, 9)
    rows.begin()
    before = figures(brought.describe().draft_counts)
    message, _ = rows.driver.step({2: 1 + MOST})
    drafts = {"num_drafts": int32s([2, MOST]), "draft_token_ids": int32s(rows.alone[2][1:5])}
    pending = brought.execute_model(msgspec.structs.replace(message, **drafts), [])
    run, taken_at = ModelRunner.execute_model, []

    def execute(runner, *step):  # the completion thread takes the result after the second step
        taken_at.append(pending.result() if len(taken_at) == 1 else None)
        return run(runner, *step)

    monkeypatch.setattr(ModelRunner, "execute_model", execute)
    rows.driver.warm_up()
    assert len(taken_at) > 3
    after = figures(brought.describe().draft_counts)
    assert (after - before).tolist() == [1, MOST, MOST]


def test_an_adopting_driver_gets_what_rows_gained(brought, prompts):
    rows = Rows(brought, texts_of(prompts, 61), NOISY, 20)
    rows.begin()
    for _ in range(2):
        have = {slot: len(own) for slot, own in rows.gained.items()}
        drafts = {slot: rows.alone[slot][n : n + MOST] for slot, n in have.items()}
        drafts[3] = [(t + 1) % VOCAB for t in drafts[3]]
        rows.take(dict.fromkeys(rows.texts, 1 + MOST), drafts)
    reply = brought.adopt_requests(AdoptRequests(**rows.driver.ids()))
    tokens = np.frombuffer(reply.token_ids, "<i4").tolist()
    assert tokens == [t for slot, own in rows.texts.items() for t in (*own, *rows.gained[slot])]
    for row in reply.rows:
        assert row.num_computed_tokens >= row.num_tokens - 1


@pytest.mark.parametrize(
    ("drafts", "scheduled", "fields", "word"),
    [
        ({0: [1] * (MOST + 1)}, {0: MOST + 2}, {}, "use 1 to 4 drafts"),
        ({0: [1, 2]}, {0: 2}, {}, "up to the last"),
        ({0: [1, 2]}, {0: 4}, {}, "up to the last"),
        ({0: [1, VOCAB]}, {0: 3}, {}, "token ids from 0 to 150"),
        ({0: [1, -1]}, {0: 3}, {}, "makes no drafts"),
        ({0: [1, -2]}, {0: 3}, {}, "token ids from 0"),
        ({0: [1]}, {0: 2}, {"draft_token_ids": b"12345678"}, "1, as num_drafts says"),
        ({0: [1]}, {0: 2}, {"num_drafts": b""}, "which slots"),
        ({0: [1]}, {0: 2}, {"num_drafts": b"1"}, "int32"),
        ({0: [1]}, {0: 2}, {"num_samples": b"\0" * 8}, "one of them"),
        ({5: [1]}, {0: 1, 5: 1}, {}, "admit a request"),
        ({1: [1]}, {0: 1}, {}, "name scheduled slots"),
        (None, {0: 1}, {"settled": b"\1"}, "had drafts"),
        (None, {0: 1}, {"settled": b"\4"}, "scheduled slots"),
    ],
)
def test_wrong_drafts_are_refused(brought, prompts, drafts, scheduled, fields, word):
    rows = Rows(brought, {0: prompts([9], seed=63)[0]}, GREEDY, 6)
    rows.begin()
    rows.driver.computed[5] = rows.driver.computed[1] = 0
    rows.driver.blocks[5] = rows.driver.blocks[1] = []
    with pytest.raises(InvalidStepError, match=word):
        rows.driver.execute(scheduled, drafts=drafts, **fields)


def test_a_group_without_drafts_refuses_them(model_root, llama, prompts):
    worker = Worker("cpu", [model_root], lambda phase, seconds, done=0.0: None)
    driver = WorkerDriver(worker, scheduler=msgspec.structs.replace(SCHEDULER))
    driver.init_device()
    driver.serve("llama")
    driver.execute({0: 5}, [(0, prompts([5], seed=65)[0], GREEDY)])
    with pytest.raises(InvalidStepError, match=r"speculative\.method"):
        driver.execute({0: 2}, drafts={0: [3]})
    worker.close()


def taken(driver, step_seq=None):
    """{request: drafts} that the worker has made after the last step, or that the deferred requests
    of a step have there; None without a drafter."""
    message = TakeDraftTokenIds(**driver.ids(), step_seq=step_seq)
    reply = driver.worker.take_draft_token_ids(message)
    if reply.drafts is None:
        return None
    found = read_drafts([reply.drafts])
    return dict(zip(found.req_ids, found.draft_token_ids, strict=True))


def test_drafts_of_deferred_rows_are_read_from_their_step(looked_up, prompts):
    """So a driver can make their masks. Other rows of the step have newer drafts by then, and rows
    of the step without drafts, or that were sampled meanwhile, are not named."""
    head = prompts([6], seed=66)[0]
    rows = Rows(looked_up, {1: head * 3, 4: head * 2, 6: head}, GREEDY, 30)
    driver = rows.driver
    rows.begin()
    expected = {name: own[:3] for name, own in taken(driver).items()}
    three_each = int32s([1, 3, 4, 3])
    message, _ = driver.step({1: 4, 4: 4, 6: 1}, defer=[1, 4, 6])
    message = msgspec.structs.replace(message, num_drafts=three_each)
    driver.read(looked_up.execute_model(message, []))
    del expected["request-6"]
    assert taken(driver, message.seq) == expected
    assert taken(driver, message.seq - 1) == {}
    found = driver.sample(message.seq, {}, slots=[4])[4]
    own = expected.pop("request-4")
    assert own[: len(found.earlier)] == [each.token for each in found.earlier]
    assert taken(driver, message.seq) == expected
    driver.sample(message.seq)
    assert taken(driver, message.seq) == {}


def test_drafts_that_a_driver_reads_are_those_that_the_next_step_verifies(looked_up, prompts):
    """Of rows that a prefill leaves unsampled, and of deferred ones, there are none yet."""
    head = prompts([6], seed=67)[0]
    rows = Rows(looked_up, {1: head * 3, 4: head * 2}, GREEDY, 30)
    driver = rows.driver
    assert taken(driver) == {}  # its last step has only ended a request
    rows.begin()
    num_right = 0
    for _ in range(5):
        drafts = taken(driver)
        assert taken(driver) == drafts and list(drafts) == ["request-1", "request-4"]
        have = {slot: len(own) for slot, own in rows.gained.items()}
        found = rows.take(dict.fromkeys(rows.texts, 1 + MOST), dict.fromkeys(rows.texts, [-1] * 4))
        for slot, newest in found.items():
            own = drafts[f"request-{slot}"]
            accepted = len(newest.earlier)
            assert len(own) == MOST and own[:accepted] == [s.token for s in newest.earlier]
            rest = rows.alone[slot][have[slot] :]
            assert accepted == MOST or own[accepted] != rest[accepted]
            num_right += accepted
    assert num_right
    rows.refused.pop(4, None)
    rows.take({1: 1}, finished=[4], settled=b"\2")
    assert list(taken(driver)) == ["request-1"]

    long = prompts([30], seed=69)[0]
    driver.execute({1: 1, 6: 8}, [(6, long, GREEDY)])
    assert [len(own) for own in taken(driver).values()] == [MOST, 0]
    deferred = {1: 1, 6: 22}
    driver.execute(deferred, defer=[6])
    seq = driver.seq
    assert [len(own) for own in taken(driver).values()] == [MOST, 0]
    driver.sample(seq)
    assert [len(own) for own in taken(driver).values()] == [MOST, MOST]

    looked_up.on_attach()
    assert taken(driver) == {}
    driver.computed[3], driver.blocks[3] = 0, []
    with pytest.raises(InvalidStepError):
        driver.execute({3: 1})
    with pytest.raises(PrecededByError, match="resync"):
        taken(driver)
    looked_up.on_attach()


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_a_drafter_follows_steps_that_skip_its_drafts(model_root, llama, prompts, method):
    """New drafts are those of a device that skips none; old ones are verified like others."""
    worker, head = make_worker(model_root, method), prompts([6], seed=71)[0]
    try:
        found = []
        for skips in ([False] * 9, [True, True, False, True, True, True, False, True, False]):
            rows = Rows(worker, {1: head * 3, 4: head * 2}, GREEDY, 30)
            rows.begin()
            decode = dict.fromkeys(rows.texts, 1)
            for skip in skips:
                rows.take(decode, skip_drafts=skip)
                counts = {len(own) for own in taken(rows.driver).values()}
                assert counts == {0 if skip else MOST}
            found.append(taken(rows.driver))
            rows.take(decode, skip_drafts=True)
            rows.take(dict.fromkeys(rows.texts, 1 + MOST), dict.fromkeys(rows.texts, [-1] * MOST))
            rows.check()
        assert found[0] == found[1]
    finally:
        worker.close()


@pytest.mark.parametrize("seed", range(2))
def test_drafts_after_a_rest_are_those_of_the_whole_texts(looked_up, prompts, monkeypatch, seed):
    """Rows rest for random times, beside others that begin, end, are preempted, fail, are adopted,
    and have drafts of any origin. Drafts are those of plain Python, tokens those without drafts."""
    rests = Rests(looked_up, prompts, np.random.default_rng([72, seed]))
    for _ in range(90):
        rests.step()
        event = rests.rng.random()
        if event < 0.06:
            rests.preempt()
        elif event < 0.14:
            rests.replace()
        elif event < 0.18:
            rests.fail(monkeypatch)
        elif event < 0.22:
            rests.adopt()
    assert rests.num_drafts > 20
    assert rests.events == {"adopt", "fail", "preempt", "replace"}
    rests.check_tokens()


def test_a_lookup_that_rests_makes_no_call(looked_up, model_root, llama, prompts):
    """From a steady step's message to its reply, but for its program."""
    without = Worker("cpu", [model_root], lambda phase, seconds, done=0.0: None)
    WorkerDriver(without, scheduler=msgspec.structs.replace(SCHEDULER)).init_device()
    WorkerDriver(without, scheduler=msgspec.structs.replace(SCHEDULER)).serve("llama")
    head, calls = prompts([6], seed=73)[0], []
    for worker in (without, looked_up):
        worker.on_attach()
        driver = WorkerDriver(worker)
        driver.execute({1: 6}, [(1, head, GREEDY)], skip_drafts=True)
        for _ in range(4):  # to be steady, with each of the staging buffers filled
            driver.execute({1: 1}, skip_drafts=True)
        message, arrays = driver.step({1: 1})
        message = msgspec.structs.replace(message, skip_drafts=True)
        made, is_running = [], []

        def note(frame, event, argument, made=made, is_running=is_running):
            name = frame.f_code.co_qualname, frame.f_code.co_filename.rpartition("/")[2]
            if name == ("EagerProgram.run", "stage_program.py"):
                is_running.append(name) if event == "call" else is_running.pop()
            if event == "call" and "worker_daemon" in frame.f_code.co_filename and not is_running:
                made.append(name)

        sys.setprofile(note)
        try:
            reply = worker.execute_model(message, arrays)
        finally:
            sys.setprofile(None)
        driver.read(reply)
        calls.append(made)
    without.close()
    assert len(calls[0]) > 15 and calls[1] == calls[0]


class Rests:
    """Requests in random rows, whose drafts are compared wherever some are made."""

    def __init__(self, worker, prompts, rng):
        worker.on_attach()
        self.worker, self.driver, self.rng = worker, WorkerDriver(worker), rng
        self.bound, self.refused, self.num_drafts, self.events = set(), {}, 0, set()
        self._prompts, self._fields = prompts, {}
        self._rows, self._done, self._new = {}, [], []
        for slot in range(4):
            self._begin(slot, *self._draw())

    def _draw(self):
        few = SamplingParams(allowed_token_ids=(5, 60, 70), temperature=1.0, seed=9)
        params = [GREEDY, NOISY, few, few][int(self.rng.integers(4))]
        (head,) = self._prompts([int(self.rng.integers(2, 7))], seed=int(self.rng.integers(9999)))
        return head * int(self.rng.integers(1, 3)), params, []

    def _begin(self, slot, prompt, params, output):
        self._rows[slot] = (prompt, params, output)
        self._new.append((slot, prompt + output, params))

    def _end(self, slot):
        """Note that a row's request ends with the next step."""
        self._fields["finished"] = [*self._fields.get("finished", ()), slot]
        self.bound.discard(slot)
        self.refused.pop(slot, None)
        return self._rows.pop(slot)

    def replace(self):
        """End the longest request, and begin another in its row."""
        slot = max(self._rows, key=lambda slot: len(self._rows[slot][2]))
        self._done.append(self._end(slot))
        self._begin(slot, *self._draw())
        self.events.add("replace")

    def preempt(self):
        """Preempt a request, and resume it at once in another row."""
        request = self._end(slot := int(self.rng.choice([*self._rows])))
        self._begin(
            int(self.rng.choice([s for s in range(7) if s not in self._rows and s != slot])),
            *request,
        )
        self.events.add("preempt")

    def fail(self, monkeypatch):
        """Let a step with another request fail."""
        self.step(settles=True)
        (slot,) = [s for s in range(7) if s not in self._rows][:1]
        stage = self.worker._model.stage
        with monkeypatch.context() as patch:
            patch.setattr(stage, "forward", lambda *args: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                self.driver.execute({slot: 5}, [(slot, [1, 2, 3, 4, 5], GREEDY)])
        self._fields["resync"] = {*self._rows}
        self.events.add("fail")

    def adopt(self):
        """Let another driver adopt the rows."""
        self.step(settles=True)
        self.worker.on_attach(keep_requests=True)
        self.worker.adopt_requests(AdoptRequests(**self.driver.ids()))
        self._fields["resync"] = {*self._rows}
        self.events.add("adopt")

    def step(self, *, settles=False):
        """Run a step of all new rows and some others, with or without drafts before and after.
        settles: there are none before it, so that all counts are exact after it."""
        new, self._new = self._new, []
        fields, self._fields = self._fields, {}
        scheduled = {slot: len(text) for slot, text, _ in new}
        drafts = {}
        for slot in self._rows:
            if slot not in scheduled and (slot in self.bound or self.rng.random() < 0.8):
                scheduled[slot] = 1
                if not (new or settles or "resync" in fields) and self.rng.random() < 0.12:
                    drafts[slot] = self.rng.integers(
                        0, VOCAB, int(self.rng.integers(1, 5))
                    ).tolist()
        settled = self.bound - {*drafts}
        pairs = [v for slot, count in sorted(self.refused.items()) for v in (slot, count)]
        for slot, count in self.refused.items():
            self.driver.computed[slot] -= count
        skips = bool(self.rng.random() < 0.7)
        found = self.driver.execute(
            {slot: count + len(drafts.get(slot, ())) for slot, count in scheduled.items()},
            new,
            drafts=drafts,
            corrections=int32s(pairs),
            settled=bitmap(settled) if settled else b"",
            skip_drafts=skips,
            **fields,
        )
        self.bound, self.refused = {*drafts}, {}
        for slot, newest in found.items():
            own = [*newest.earlier, newest]
            self._rows[slot][2].extend(each.token for each in own)
            if len(own) <= len(drafts.get(slot, ())):
                self.refused[slot] = 1 + len(drafts[slot]) - len(own)
        for slot, own in zip(sorted(found), taken(self.driver).values(), strict=True):
            prompt, _, output = self._rows[slot]
            assert own == ([] if skips else continued(prompt + output, 4, 2, MOST))
            self.num_drafts += any(own)

    def check_tokens(self):
        self.worker.on_attach()
        alone = WorkerDriver(self.worker)
        for prompt, params, output in [*self._done, *self._rows.values()]:
            if output:
                assert output == alone.generate(0, prompt, len(output), params)


def test_without_a_drafter_there_are_no_drafts_to_read(brought, prompts):
    brought.on_attach()
    driver = WorkerDriver(brought)
    driver.execute({0: 5}, [(0, prompts([5], seed=71)[0], GREEDY)])
    assert taken(driver) is None


@pytest.mark.parametrize(
    ("counts", "tokens", "word"),
    [(b"\1", b"123", "int32"), (b"\1", b"12345678", "columns"), (b"", b"", "columns")],
)
def test_replies_with_wrong_columns_are_refused(counts, tokens, word):
    rows = RowDrafts(req_ids=("a",), num_drafts=counts, token_ids=tokens)
    with pytest.raises(BadFrameError, match=word):
        read_drafts([rows])


def masks_of(slot, count):
    """Masks that allow any token, as a step brings them."""
    frame = pack_masks(np.ones((count, VOCAB), np.bool_))
    named = uint16s([slot] * count)
    return GrammarMasks(slots=named, indices=uint16s(range(count))), frame


@pytest.mark.parametrize("count", [1, 2, 4])
def test_a_number_of_masks_that_does_not_fit_the_drafts_is_refused(brought, prompts, count):
    """Nothing is applied, to the rows or to those that wait for their masks."""
    rows = Rows(brought, texts_of(prompts, 67), NOISY, 8)
    rows.begin()
    driver, ids = rows.driver, rows.driver.ids
    drafts = {"num_drafts": int32s([1, 2]), "draft_token_ids": int32s(rows.alone[1][1:3])}
    message = msgspec.structs.replace(driver.step({1: 3}, defer=[1])[0], **drafts)
    driver.read(brought.execute_model(message, []))
    with pytest.raises(InvalidStepError) as refused:
        driver.sample(message.seq, {1: np.ones((count, VOCAB), np.bool_)})
    assert (refused.value.field, refused.value.value) == ("masks.slots", f"slot 1: {count} masks")
    found = driver.sample(message.seq, {1: np.ones((3, VOCAB), np.bool_)})[1]
    assert [each.token for each in [*found.earlier, found]] == rows.alone[1][1:4]
    drafts = {"num_drafts": int32s([1, 2]), "draft_token_ids": int32s(rows.alone[1][4:6])}
    message = msgspec.structs.replace(driver.step({1: 3})[0], **drafts)
    own, frame = masks_of(1, count)
    before = brought.adopt_requests(AdoptRequests(**ids()))
    with pytest.raises(InvalidStepError) as refused:
        brought.execute_model(msgspec.structs.replace(message, extensions=(own,)), [frame])
    assert (refused.value.field, refused.value.value) == ("masks.slots", f"slot 1: {count} masks")
    assert refused.value.fix == "3 for its 2 drafts, or none"
    after = brought.adopt_requests(AdoptRequests(**ids()))
    assert (after.rows, after.token_ids) == (before.rows, before.token_ids)
