"""Links between real processes over gloo: hops, token return, failures, new links."""

import contextlib
import os
import socket
import threading

import pytest
from group_processes import Pool

from rpc_schema.errors import CommError
from tests.support.strangers import flood, listening
from tests.support.waiting import wait_until
from worker_daemon.distributed.pp import STATUS_FAILED, STATUS_MISMATCH, STATUS_OK
from worker_daemon.distributed.rendezvous import RendezvousServer, connect_store

TAG_RANGE = 1 << 30


@pytest.fixture(scope="module")
def pool():
    pool = Pool()
    yield pool
    pool.close()


def way_to(server):
    return server.host, server.port, server.secret


@pytest.fixture
def connected(pool):
    """(pp, tp) -> the pool with a fresh link between its first pp * tp ranks; left at the end."""
    servers, sizes = [], []

    def connect(pp_size, tp_size, generation=1, timeout_s=20.0):
        size = pp_size * tp_size
        sizes.append(size)
        servers.append(RendezvousServer("127.0.0.1", size))
        address = way_to(servers[-1])
        backends = pool.run(size, "open_member", pp_size, tp_size, generation, address, timeout_s)
        assert backends == ["gloo"] * size
        return pool

    yield connect
    if sizes:
        assert pool.run(max(sizes), "leave") == [True] * max(sizes)
    for server in servers:
        server.close()


def test_activations_and_status_cross_two_stages(connected):
    pool = connected(2, 1)
    sizes = [1, 33, 7, 2, 33, 1, 16, 5]
    statuses = [STATUS_OK, STATUS_FAILED, STATUS_OK, STATUS_MISMATCH] * 2
    for dtype, hidden_size in (("float32", 24), ("bfloat16", 7), ("float16", 16)):
        steps = [(seq + 100, n, s) for seq, (n, s) in enumerate(zip(sizes, statuses, strict=True))]
        _, arrived = pool.run(2, "hop", hidden_size, dtype, 3, steps)
        assert arrived == [(True, status) for status in statuses]


def test_another_step_than_the_one_expected_is_seen(connected):
    pool = connected(2, 1, generation=5)
    assert pool.run(2, "other_step", 7, 7, 5, 5)[1] == STATUS_OK
    assert pool.run(2, "other_step", 8 + TAG_RANGE, 8, 5, 5)[1] == STATUS_MISMATCH
    assert pool.run(2, "other_step", 9, 9, 4, 5)[1] == STATUS_MISMATCH
    assert pool.run(2, "other_step", 10, 10, 5, 5)[1] == STATUS_OK


def test_another_shape_or_dtype_of_the_same_size_is_seen(connected):
    pool = connected(2, 1)
    sent = (4, 8, "float16")
    others = [sent, (4, 8, "bfloat16"), (8, 4, "float16"), (2, 8, "float32"), sent]
    statuses = [pool.run(2, "other_shape", sent, e, seq)[1] for seq, e in enumerate(others, 1)]
    assert statuses == [STATUS_OK, *[STATUS_MISMATCH] * 3, STATUS_OK]


@pytest.mark.parametrize("hidden_size", [24, 7])
def test_tensor_parallel_slices_are_gathered(connected, hidden_size):
    pool = connected(2, 2)
    steps = [(seq, n, STATUS_OK) for seq, n in enumerate([1, 33, 5, 32], start=1)]
    outcomes = pool.run(4, "hop", hidden_size, "float32", 4, steps)
    assert outcomes == [[], [], *[[(True, STATUS_OK)] * 4] * 2]
    sums = pool.run(4, "stage_sums", 5)
    assert sums[0] == sums[1]
    assert sums[2] == sums[3]
    assert sums[0] != sums[2]
    (total, gathered), size = sums[0], 4
    for row in range(3):
        own = [gathered[row][rank * size : (rank + 1) * size] for rank in range(2)]
        assert total[row] == [a + b for a, b in zip(*own, strict=True)]


@pytest.mark.parametrize("fault", ["", "wrong sums", "cannot be made"])
def test_short_messages_are_reduced_over_windows_only_where_all_ranks_can(connected, fault):
    pool = connected(1, 2)
    outcomes = pool.run(2, "reduce_by_size", ["", fault], 11)
    expected = ("gloo", 0, True) if fault else ("peer memory up to 0 KiB, gloo", 4, True)
    assert outcomes == [expected] * 2


@pytest.mark.parametrize("fault", ["", "wrong sums", "wrong experts", "cannot be made"])
def test_few_rows_are_exchanged_over_windows_only_where_all_ranks_can(connected, fault):
    pool = connected(1, 2)
    outcomes = pool.run(2, "exchange_by_size", ["", fault], 12)
    ways, most, count = ("gloo", 0, 0) if fault else ("peer memory for few tokens, gloo", 4, 2)
    name = f"all-gather and reduce-scatter of 2 ranks, {ways}"
    assert outcomes == [(name, most, count, True)] * 2


@pytest.mark.parametrize("seed", [0, 1])
def test_steps_in_flight_survive_random_delays(connected, seed):
    pool = connected(3, 1)
    assert pool.run(3, "delayed", 24, 5, 80, seed) == [0, 0, 0]


@pytest.mark.parametrize(("pp_size", "lag"), [(2, 0), (3, 3)])
def test_tokens_return_in_order_though_rows_are_used_again(connected, pp_size, lag):
    pool = connected(pp_size, 1)
    assert pool.run(pp_size, "return_tokens", 6, lag, 7) == [0] * pp_size


def test_survivors_of_a_killed_peer_link_anew_with_a_fresh_process(connected, pool):
    timeout_s = 3.0
    connected(3, 1, timeout_s=timeout_s)
    pool.ranks[2].start("receive_until_broken", 2)
    pool.ranks[0].start("collect_until_broken", 0)
    pool.ranks[1].kill()
    for index in (0, 2):
        outcome, (error, seconds) = pool.ranks[index].outcome()
        assert (outcome, error) == ("returned", "CommError")
        assert seconds < timeout_s + 30  # however busy the host is
    pool.replace(1)
    connected(3, 1, generation=2)
    steps = [(seq, 4, STATUS_OK) for seq in range(1, 6)]
    outcomes = pool.run(3, "hop", 16, "float32", 5, steps)
    assert outcomes[2] == [(True, STATUS_OK)] * 5
    assert pool.run(3, "return_tokens", 4, 2, 3) == [0, 0, 0]


def test_abort_frees_a_rank_and_those_that_wait_for_it(connected):
    """Nobody is dead: rank 0 waits for rank 2, which waits for rank 1, which does nothing."""
    timeout_s = 100.0
    pool = connected(3, 1, timeout_s=timeout_s)
    pool.ranks[0].start("collect_until_broken", 0)
    pool.ranks[2].start("receive_until_aborted", 2, True)
    for index in (0, 2):
        outcome, (error, seconds) = pool.ranks[index].outcome()
        assert (outcome, error) == ("returned", "CommError")
        assert seconds < timeout_s / 2


def test_abort_of_its_own_hang_leaves_the_peers_to_their_timeouts(connected):
    """Rank 0 hangs as well, and must not take rank 2's abort for the loss of a peer."""
    timeout_s = 2.0
    pool = connected(3, 1, timeout_s=timeout_s)
    pool.ranks[0].start("collect_until_broken", 0)
    pool.ranks[2].start("receive_until_aborted", 2, False)
    for index in (0, 2):
        outcome, (error, seconds) = pool.ranks[index].outcome()
        assert (outcome, error) == ("returned", "CommError")
        assert seconds > timeout_s / 2


def test_what_was_sent_arrives_though_the_sender_has_left(connected):
    pool = connected(2, 1)
    pool.ranks[1].start("receive_late", 1)
    pool.ranks[0].start("send_and_leave", 0)
    assert pool.ranks[0].outcome() == ("returned", None)
    assert pool.ranks[1].outcome() == ("returned", (24.0, STATUS_OK))


def test_linking_again_and_again_leaves_no_threads_behind(connected, pool):
    connected(2, 2)
    assert pool.run(4, "leave") == [True] * 4
    before = pool.run(4, "num_threads")
    for generation in range(2, 7):
        connected(2, 2, generation=generation)
        assert pool.run(4, "leave") == [True] * 4
    after = pool.run(4, "num_threads")
    assert all(late <= early + 2 for early, late in zip(before, after, strict=True))


def test_a_link_that_not_everybody_joins_is_a_comm_error(pool):
    pool.grow(1)
    server = RendezvousServer("127.0.0.1", 2)
    pool.ranks[0].start("open_member", 0, 2, 1, 9, way_to(server), 1.0)
    outcome, (error, text, _) = pool.ranks[0].outcome()
    assert (outcome, error) == ("raised", "CommError")
    assert "relink" in text
    server.close()


@pytest.mark.parametrize("shape", [(2, 1), (1, 2)])
def test_stranger_in_a_ranks_place_is_noticed(pool, shape):
    pool.grow(2)
    server = RendezvousServer("127.0.0.1", 2)
    args = (*shape, 3, way_to(server), 20.0)
    for rank in range(2):
        pool.ranks[rank].start("open_without_the_secret", rank, 1, *args)
    kind, (error, text, _) = pool.ranks[0].outcome()
    assert (kind, error) == ("raised", "CommError")
    assert "a stranger has connected in the place of members [1]" in text
    pool.ranks[1].outcome()
    server.close()


def test_flood_while_ranks_meet_ends_none_of_them(connected, pool):
    """Whatever the flood hits; without it they meet again. A process that does not run for a while
    finds some 2,000 of its connections waiting, beyond those that it may have."""
    pool.grow(2)
    assert pool.run(2, "limit_descriptors", 4096) == [None] * 2
    flooding = Flood([rank.process.pid for rank in pool.ranks[:2]])
    outcomes = []
    for generation, scenario in enumerate(["open_member"] * 4 + ["open_in_a_flood"], 20):
        server = RendezvousServer("127.0.0.1", 2)
        args = (2, 1, generation, way_to(server), 1.0)
        for rank in range(2):
            pool.ranks[rank].start(scenario, rank, *args)
        outcomes += [pool.ranks[rank].outcome() for rank in range(2)]
        server.close()
    flooding.end()
    errors = {value[0] for kind, value in outcomes if kind == "raised"}
    assert errors <= {"CommError"}, outcomes
    connected(2, 1, generation=30)
    steps = [(seq, 4, STATUS_OK) for seq in range(1, 6)]
    assert pool.run(2, "hop", 16, "float32", 5, steps)[1] == [(True, STATUS_OK)] * 5


class Flood:
    """Opens connections to the listening sockets of some processes, until end()."""

    def __init__(self, pids):
        self._pids = pids
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def end(self):
        self._over.set()
        self._thread.join()

    def _run(self):
        while not self._over.is_set():
            with contextlib.suppress(OSError):  # what it looks at is closed meanwhile
                for address in {address for pid in self._pids for address in listening(pid)}:
                    flood(address, 1000)


def test_store_that_nobody_serves_is_a_comm_error():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(CommError) as caught:
        connect_store("127.0.0.1", port, bytes(32), 0.5)
    assert (caught.value.field, caught.value.value) == ("rendezvous", f"127.0.0.1:{port}")


def test_rendezvous_listens_on_its_own_interface_until_it_is_closed():
    server = RendezvousServer("127.0.0.1", 2)
    store = connect_store(*way_to(server), 5.0)
    store.set("key", "value")
    store.end()
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.2", server.port), 1).close()
    address = (server.host, server.port)
    assert address in listening(os.getpid())
    server.close()
    wait_until(lambda: address not in listening(os.getpid()), "it is closed")
