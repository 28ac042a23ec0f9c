"""What the ranks do in the tests of links: each function runs in every rank's process, with that
process's one link kept between calls.
"""

import random
import resource
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from rpc_schema.errors import CommError
from tests.support.waiting import wait_until
from worker_daemon.contracts.experts import RoutedTokens
from worker_daemon.contracts.layer_ops import Norm, NormedSum
from worker_daemon.contracts.window import Window
from worker_daemon.distributed import link
from worker_daemon.distributed.ep import ReplicaExperts
from worker_daemon.distributed.link import Link, RendezvousPoint
from worker_daemon.distributed.parallel_state import ParallelState
from worker_daemon.distributed.pp import STATUS_OK, HopShape, StageInbound, StageOutbound
from worker_daemon.distributed.symmetric import BLANK, Peers
from worker_daemon.distributed.tokens import TokenBroadcast
from worker_daemon.distributed.tp import tensor_parallel

CPU = torch.device("cpu")
MAX_TOKENS = 33

torch.set_num_threads(1)


class Audit:
    """Counts unpickling while it is armed; a hook stays for the process's life."""

    armed = False
    unpickled = 0


def _hook(event, args):
    if Audit.armed and event in ("pickle.find_class", "marshal.loads"):
        Audit.unpickled += 1


sys.addaudithook(_hook)


@contextmanager
def no_unpickling():
    Audit.unpickled, Audit.armed = 0, True
    try:
        yield
    finally:
        Audit.armed = False
    assert Audit.unpickled == 0


class Member:
    """This process as a rank of the link that it opened last."""

    state: ParallelState
    link: Link
    tp: object


def open_member(rank, pp_size, tp_size, generation, address, timeout_s=20.0):
    """Opens a link in the place of the last one."""
    leave()
    Member.state = ParallelState(pp_size, tp_size, rank)
    with no_unpickling():
        Member.link = Link(generation, CPU)
        Member.link.open(Member.state, RendezvousPoint(*address), timeout_s)
    Member.tp = tensor_parallel(Member.state.tp_rank, tp_size)
    Member.tp.bind(Member.link.groups.stage)
    return Member.link.backend


def open_without_the_secret(rank, stranger, *args):
    """Open a link like open_member; the stranger's messages to the others do not authenticate."""
    with pytest.MonkeyPatch.context() as patch:
        if rank == stranger:
            patch.setattr(link, "member_proof", lambda secret, *names: bytes(32))
        open_member(rank, *args)


def open_in_a_flood(rank, *args):
    """Open a link like open_member, but make its groups only once strangers have all the
    descriptors that they may have."""
    make_groups = link._make_groups

    def make_late(*given):
        wait_until(lambda: "listener-watch" not in _thread_names(), "the listeners are shut")
        return make_groups(*given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(link, "_make_groups", make_late)
        open_member(rank, *args)


def _thread_names():
    return [thread.name for thread in threading.enumerate()]


def limit_descriptors(rank, count):
    """Limit this process's open descriptors."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (count, hard))


def leave(rank=0, wait=True):
    """Leaves the link; with wait, until its groups are disposed of."""
    disposal = Member.link.leave() if hasattr(Member, "link") else None
    if disposal is not None and wait:
        disposal.join(30)
        return not disposal.is_alive()
    return True


def num_threads(rank=0):
    return len(list(Path("/proc/self/task").iterdir()))


def _ends(hidden_size, dtype, depth, generation=None):
    link = Member.link
    if generation is not None:
        groups, link = link.groups, Link(generation, CPU)
        link.groups = groups
    hop = HopShape(hidden_size, dtype, CPU, MAX_TOKENS, depth)
    inbound = None if Member.state.is_first_stage else StageInbound(link, Member.tp, hop)
    outbound = None if Member.state.is_last_stage else StageOutbound(link, Member.tp, hop)
    return inbound, outbound


def _settle(outbound):
    """The sender lets go of its buffers right after this; nothing may be lost by it."""
    if outbound is not None:
        outbound.settle()


def activations(seq, num_tokens, hidden_size, dtype):
    """What the first stage sends in step seq: small integers, to which adding is exact."""
    generator = torch.Generator().manual_seed(seq)
    return torch.randint(-99, 99, (num_tokens, hidden_size), generator=generator).to(dtype)


def hop(rank, hidden_size, dtype_name, depth, steps):
    """Steps (seq, tokens, status) from stage to stage; each stage adds one.

    Returns (equal, status) of each step on the last stage.
    """
    dtype = getattr(torch, dtype_name)
    inbound, outbound = _ends(hidden_size, dtype, depth)
    arrived = []
    with no_unpickling():
        for seq, num_tokens, status in steps:
            sent = activations(seq, num_tokens, hidden_size, dtype)
            hidden, state = sent, torch.tensor(status)
            if inbound is not None:
                hidden, state = inbound.post(num_tokens, seq).wait()
                arrived.append((torch.equal(hidden, sent + Member.state.pp_rank - 1), int(state)))
            if outbound is not None:
                scratch = hidden + 1 if inbound is not None else hidden.clone()
                outbound.send(scratch, len(scratch), state, seq)
                scratch.fill_(-7)  # both may be overwritten at once
        _settle(outbound)
    return arrived


def delayed(rank, hidden_size, depth, num_steps, seed):
    """Many steps of many sizes, posted ahead, with random pauses on every rank."""
    pauses, sizes = random.Random(seed + rank), random.Random(seed)
    inbound, outbound = _ends(hidden_size, torch.float32, depth)
    steps = [(seq, sizes.randint(1, MAX_TOKENS)) for seq in range(1, num_steps + 1)]
    posted, wrong = [], 0
    ahead = iter(steps)
    for seq, num_tokens in steps:
        time.sleep(pauses.choice([0, 0, 0, pauses.random() * 0.02]))
        hidden, status = activations(seq, num_tokens, hidden_size, torch.float32), torch.tensor(0)
        if inbound is not None:
            while len(posted) < depth and (upcoming := next(ahead, None)):
                posted.append(inbound.post(upcoming[1], upcoming[0]))
            expected = hidden + Member.state.pp_rank
            hidden, status = posted.pop(0).wait()
            hidden = hidden + 1
            wrong += not torch.equal(hidden, expected) or int(status) != 0
        if outbound is not None:
            outbound.send(hidden, len(hidden), status, seq)
    _settle(outbound)
    return wrong


def other_step(rank, first_seq, second_seq, first_generation, second_generation):
    """The first stage sends one step, the second expects another. Returns the status seen there."""
    generation = first_generation if rank == 0 else second_generation
    inbound, outbound = _ends(8, torch.float32, 2, generation)
    if outbound is not None:
        outbound.send(torch.ones(3, 8), 3, torch.tensor(0), first_seq)
        return _settle(outbound)
    return int(inbound.post(3, second_seq).wait()[1])


def other_shape(rank, sent, expected, seq):
    """The first stage sends (tokens, hidden size, dtype), the second expects others that take as
    many bytes. Returns the status seen there."""
    num_tokens, hidden_size, dtype = sent if rank == 0 else expected
    inbound, outbound = _ends(hidden_size, getattr(torch, dtype), 2)
    if outbound is not None:
        hidden = torch.ones(num_tokens, hidden_size, dtype=getattr(torch, dtype))
        outbound.send(hidden, num_tokens, torch.tensor(0), seq)
        return _settle(outbound)
    return int(inbound.post(num_tokens, seq).wait()[1])


def return_tokens(rank, num_rows, lag, seed):
    """Publications over rows that are used again and again, some with what the rows have refused,
    some with drafts; readers collect them late.

    Returns the number of collects after which some row did not hold its newest token, count or
    drafts. The last stage never reads any, and so keeps none.
    """
    rng, pauses = random.Random(seed), random.Random(seed + rank)
    last_sampled = torch.zeros(num_rows, dtype=torch.int64)
    refused = torch.zeros(num_rows, dtype=torch.int32)
    made = torch.zeros((num_rows, 2), dtype=torch.int64)
    state, depth = Member.state, Member.state.pp_size + 2
    tokens = TokenBroadcast(
        Member.link, last_sampled, refused, made, num_stages=state.pp_size, depth=depth
    )
    naive, wrong = [([0] * num_rows, [0] * num_rows, [[0, 0]] * num_rows)], 0
    for step in range(1, 60):
        rows = rng.sample(range(num_rows), rng.randint(1, num_rows))
        values = [rng.randrange(1 << 40) for _ in rows]
        counts = [rng.randrange(1 << 20) for _ in rows]
        drafts = [[rng.randrange(1 << 40) for _ in rows] for _ in range(2)]
        counted, drafted = rng.random() < 0.5, rng.random() < 0.5
        newest, totals, kept = (list(column) for column in naive[-1])
        for place, (row, value) in enumerate(zip(rows, values, strict=True)):
            newest[row] = value
            totals[row] = counts[place] if counted else totals[row]
            kept[row] = [own[place] for own in drafts] if drafted else kept[row]
        naive.append((newest, totals, kept))
        lines = [values, *([counts] if counted else []), *(drafts if drafted else [])]
        message = torch.tensor(lines if len(lines) > 1 else values)
        assert tuple(message.shape) == tokens.shape(len(rows), counted=counted, drafted=drafted)
        time.sleep(pauses.choice([0, 0, pauses.random() * 0.005]))
        tokens.publish(
            step,
            torch.tensor(rows, dtype=torch.int32),
            message if state.is_last_stage else None,
            counted=counted,
            drafted=drafted,
        )
        seen = 0 if state.is_last_stage else max(0, step - lag)
        tokens.collect(step - lag)
        wrong += (last_sampled.tolist(), refused.tolist(), made.tolist()) != naive[seen]
    tokens.settle()
    last = naive[0 if state.is_last_stage else -1]
    return wrong + ((last_sampled.tolist(), refused.tolist(), made.tolist()) != last)


def stage_sums(rank, seed):
    """(all-reduce, all-gather) of this stage's tensor-parallel ranks."""
    generator = torch.Generator().manual_seed(seed + rank)
    x = torch.randint(-9, 9, (3, 4), generator=generator)
    return Member.tp.all_reduce(x.clone()).tolist(), Member.tp.all_gather_last_dim(x).tolist()


class LibraryReducer:
    """Reduces short messages as a kernel would, but over the group's library; counts them."""

    limit_bytes = 64

    def __init__(self, group, fault):
        self.group, self.fault, self.count = group, fault, 0

    def takes(self, x):
        return x.numel() * x.element_size() <= self.limit_bytes

    def all_reduce(self, x):
        self.count += 1
        total = x.clone()
        torch.distributed.all_reduce(total, group=self.group)
        return total + (1 if self.fault == "wrong sums" else 0)

    def all_reduce_and_norm(self, source):
        return sum_and_norm(source._replace(part=self.all_reduce(source.part)))


class FakePeers(Peers):
    def __init__(self, rank, size):
        self.window = Window(rank, CPU, range(size), 0, BLANK, 0)


def sum_and_norm(source):
    total, norm = source.residual + source.part, source.norm
    return torch.nn.functional.rms_norm(total, norm.weight.shape, norm.weight, norm.eps), total


def reduce_by_size(rank, faults, seed):
    """Reductions where each rank's reducer has a fault or none.

    Returns (name, how many messages the reducer took, whether every result was right).
    """
    state, group = Member.state, Member.link.groups.stage
    reducer = LibraryReducer(group, faults[state.tp_rank])

    def make(window):
        assert window.rank == state.tp_rank
        if reducer.fault == "cannot be made":
            raise OSError("no compiler")
        return reducer

    tp = tensor_parallel(state.tp_rank, state.tp_size, make)
    if "cannot be made" in faults and reducer.fault == "":
        reducer.all_reduce = lambda x: x  # its peer never reduces
    tp.bind(group, FakePeers(state.tp_rank, state.tp_size))
    tried, right = reducer.count, True
    generator = torch.Generator().manual_seed(seed)
    for rows in (1, 2, 9):
        everyone = torch.randint(-9, 9, (state.tp_size + 1, rows, 8), generator=generator).float()
        norm = Norm(torch.rand(8, generator=generator), 1e-5)
        x, total = everyone[state.tp_rank], everyone[:-1].sum(0)
        right &= torch.equal(tp.all_reduce(x.clone()), total)
        source = NormedSum(x.clone(), everyone[-1], norm)
        results = tp.all_reduce_and_norm(source, sum_and_norm)
        expected = sum_and_norm(source._replace(part=total))
        right &= all(map(torch.equal, results, expected))
    return tp.all_reduce_name, reducer.count - tried, right


class LibraryExchange:
    """Exchanges few rows as kernels would, but over the group's library; counts them."""

    def __init__(self, group, fault):
        self.group, self.fault, self.count = group, fault, 0

    def most_rows(self, hidden_size, top_k, dtype):
        return 4

    def gather(self, x, routed, num_rows):
        self.count += 1
        missing = num_rows - x.shape[0]
        tokens = self._all(torch.nn.functional.pad(x, (0, 0, 0, missing)))
        experts = self._all(torch.nn.functional.pad(routed.experts, (0, 0, 0, missing), value=-1))
        weights = self._all(torch.nn.functional.pad(routed.weights, (0, 0, 0, missing)))
        return tokens, RoutedTokens(experts + (self.fault == "wrong experts"), weights)

    def sum_rows(self, total):
        sums = total.clone()
        torch.distributed.all_reduce(sums, group=self.group)
        return sums.chunk(self.group.size())[self.group.rank()] + (self.fault == "wrong sums")

    def _all(self, own):
        parts = [torch.empty_like(own) for _ in range(self.group.size())]
        torch.distributed.all_gather(parts, own.contiguous(), group=self.group)
        return torch.cat(parts)


def exchange_by_size(rank, faults, seed):
    """Exchanges of replicas that share experts, where each rank's windows have a fault or none.

    Returns (name, the most tokens of a graph, how many exchanges the windows took, whether every
    result was right).
    """
    state, group = Member.state, Member.link.groups.stage
    place, size = state.tp_rank, state.tp_size
    windows = LibraryExchange(group, faults[place])

    def make(window):
        if windows.fault == "cannot be made":
            raise OSError("no compiler")
        return windows

    if "cannot be made" in faults and windows.fault == "":  # its peer never sends
        windows.gather = lambda x, routed, num_rows: (x.repeat(size * num_rows, 1), routed)
        windows.sum_rows = lambda total: total
    experts = ReplicaExperts(ParallelState(1, 1, place, size, lockstep=True), make)
    experts.bind(group, FakePeers(place, size))
    tried, right = windows.count, True
    generator = torch.Generator().manual_seed(seed)
    for num_tokens in (1, 4, 5, 9):
        experts.begin(num_tokens)
        counts = [num_tokens, *(torch.randint(num_tokens + 1, (size - 1,), generator=generator))]
        tokens = torch.randint(-9, 9, (size, num_tokens, 8), generator=generator).float()
        chosen = torch.randint(size, (size, num_tokens, 2), generator=generator, dtype=torch.int32)
        weights = torch.randint(1, 5, (size, num_tokens, 2), generator=generator).float()

        def multiply(x, routed):
            """The rank's one expert multiplies by 1 + its number."""
            own = (routed.weights * (routed.experts == place)).sum(1, keepdim=True)
            return x * own * (1 + place)

        count = int(counts[place])
        routed = RoutedTokens(chosen[place, :count], weights[place, :count])
        sums = experts.run(tokens[place, :count], routed, multiply)
        factors = (weights[place] * (1 + chosen[place])).sum(1, keepdim=True)
        right &= torch.equal(sums, (tokens[place] * factors)[:count])
        experts.end()
    most = experts.most_graphed(8, 2, torch.float32)
    return experts.name, most, windows.count - tried, right


def receive_until_broken(rank):
    """Waits for a step that never comes. Returns (error type, seconds until it was raised)."""
    inbound, _ = _ends(8, torch.float32, 2)
    began = time.monotonic()
    try:
        inbound.post(3, 1).wait()
    except CommError:
        return "CommError", time.monotonic() - began
    return "arrived", time.monotonic() - began


def receive_until_aborted(rank, frees_peers):
    """As receive_until_broken; another thread aborts the link meanwhile."""
    abort = threading.Timer(0.5, Member.link.abort, kwargs={"frees_peers": frees_peers})
    abort.start()
    outcome = receive_until_broken(rank)
    abort.join()
    return outcome


def send_and_leave(rank):
    """Leaves the link as soon as a step is sent."""
    _, outbound = _ends(8, torch.float32, 2)
    outbound.send(torch.ones(3, 8), 3, torch.tensor(STATUS_OK), 1)
    outbound.settle()
    leave()


def receive_late(rank):
    """Takes the step of send_and_leave after that. Returns (its sum, status)."""
    time.sleep(0.5)
    inbound, _ = _ends(8, torch.float32, 2)
    hidden, status = inbound.post(3, 1).wait()
    return hidden.sum().item(), int(status)


def collect_until_broken(rank):
    """Waits for tokens that never come, after sends that nobody takes."""
    _, outbound = _ends(8, torch.float32, 2)
    began = time.monotonic()
    try:
        outbound.send(torch.ones(3, 8), 3, torch.tensor(0), 1)
        last_sampled, refused = torch.zeros(4).long(), torch.zeros(4).int()
        tokens = TokenBroadcast(Member.link, last_sampled, refused, num_stages=3, depth=5)
        tokens.publish(1, torch.tensor([0]), None, counted=False)
        tokens.collect(1)
    except CommError:
        return "CommError", time.monotonic() - began
    return "arrived", time.monotonic() - began
