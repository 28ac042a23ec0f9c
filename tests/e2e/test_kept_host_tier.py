"""Host memory that outlives its daemons: their successors load what killed ones have left, and give
the same tokens, whatever became of it meanwhile."""

import random
from contextlib import suppress

import pytest

from rpc_schema.errors import CapacityError, WorkerDaemonError
from tests.support.exhaustive import exhaustively
from tests.support.filing_daemons import FilingDaemons
from tests.support.serving import connect, kill_and_wait, worker_config
from tests.support.tiered_waves import (
    CONFIG,
    NUM_GPU_BLOCKS,
    Waves,
    assert_right,
    new_driver,
    num_loaded,
    run_waves,
    tiers,
)
from tests.support.tmpfs import tmpfs_directory


@pytest.fixture(scope="module")
def daemons_of_all(model_root):
    """Two daemons that leave their host memory to their successors."""
    with (
        tmpfs_directory() as directory,
        FilingDaemons(2, model_root, directory, option="--kv-host-dir") as daemons,
    ):
        yield daemons


@pytest.fixture
def keeping(daemons_of_all):
    """The two daemons, with nothing in their memory."""
    yield daemons_of_all
    daemons_of_all.kill()
    for path in files_of(daemons_of_all):
        path.unlink()


def files_of(keeping):
    return [own / "blocks" for own in keeping.directories if (own / "blocks").exists()]


def serving(keeping, model, pp=1, tp=1, **config):
    wanted = worker_config(model.path, pp, tp, **{**CONFIG, **config})
    return connect(keeping.endpoints[: pp * tp], wanted, num_gpu_blocks=NUM_GPU_BLOCKS)


def kill_at_work(keeping, model, waves, pp=1, tp=1):
    """Serve all but the last requests, and kill all daemons while they compute these."""
    with suppress(WorkerDaemonError), serving(keeping, model, pp, tp) as (group, loaded):
        driver = new_driver(group, loaded)
        run_waves(driver, waves.requests[:-1])
        for request in waves.requests[-1]:
            driver.add_request(request)
        for _ in range(6):
            driver.step()
        for pid in keeping.pids[: pp * tp]:
            kill_and_wait(pid)
        driver.run()
    keeping.kill()


def damage(rng, path):
    """Change bits of the index and of blocks, and cut the file off."""
    raw = bytearray(path.read_bytes())
    for first, last, num in ((0, 4096, 3), (4096, len(raw), 40)):
        for _ in range(num):
            raw[rng.randrange(first, last)] ^= 1 << rng.randrange(8)
    path.write_bytes(raw[: rng.randrange(len(raw) // 2, len(raw))])


@pytest.mark.parametrize(
    ("pp", "tp", "seed"),
    [(2, 1, None), *(exhaustively(1, tp, seed) for tp in (1, 2) for seed in range(10))],
)
def test_successors_load_what_killed_daemons_have_left(keeping, checkpoint, pp, tp, seed):
    """The same tokens, and only what is damaged meanwhile is computed again."""
    rng = random.Random(random.randrange(1 << 30) if seed is None else seed)
    waves, model = Waves(rng.randrange(1 << 30)), checkpoint()
    print("seed", waves.seed)
    kill_at_work(keeping, model, waves, pp, tp)
    with serving(keeping, model, pp, tp) as (group, loaded):
        before = tiers(group)
        outputs = run_waves(new_driver(group, loaded), waves.requests)
        after = tiers(group)
    assert_right(outputs, model, waves)
    assert all(tier.num_restored == tier.num_held > 0 for tier in before), before
    assert all(tier.num_rejected == tier.num_invalid == 0 < tier.num_loaded for tier in after)
    assert num_loaded({each.id: outputs[each.id] for each in waves.requests[0]}) > 0
    for pid in keeping.pids:
        kill_and_wait(pid)
    for path in files_of(keeping):
        damage(rng, path)
    keeping.restart()
    with serving(keeping, model, pp, tp) as (group, loaded):
        before = tiers(group)
        outputs = run_waves(new_driver(group, loaded), waves.requests)
    assert_right(outputs, model, waves)
    assert sum(tier.num_rejected for tier in before) > 0, before
    assert num_loaded(outputs) > 0


def test_a_driver_goes_on_with_what_a_successor_has_taken_over(keeping, checkpoint):
    waves, model = Waves(random.randrange(1 << 30)), checkpoint()
    print("seed", waves.seed)
    results = []

    def count(result):
        results.append(result)
        if len(results) == num_before + 4:
            kill_and_wait(keeping.pids[1])

    with serving(keeping, model, pp=2) as (group, loaded):
        num_before = 1 << 30

        def recover(died):
            keeping.restart_dead()
            group.replace(died.rank)

        driver = new_driver(group, loaded, recover=recover, on_result=count)
        run_waves(driver, waves.requests)
        num_before = len(results)
        outputs = run_waves(driver, waves.requests)
        found = tiers(group)
    assert len(results) > num_before + 4
    assert_right(outputs, model, waves)
    assert found[1].num_restored > 0 == found[0].num_restored, found
    assert all(tier.num_invalid == 0 < tier.num_loaded for tier in found), found


def test_blocks_of_other_weights_never_match(keeping, models):
    """Neither another model's, nor those of an update that the successor has not got."""
    waves = Waves(random.randrange(1 << 30))
    print("seed", waves.seed)
    waves.requests = waves.requests[:2]
    old, new, _ = models
    with serving(keeping, old) as (group, loaded):
        run_waves(new_driver(group, loaded), waves.requests)
    for _ in range(2):
        keeping.kill()
        with serving(keeping, new) as (group, loaded):
            (before,) = tiers(group)
            driver = new_driver(group, loaded)
            assert_right(run_waves(driver, waves.requests), new, waves)
            group.weights.reload(str(old.path))
            assert_right(run_waves(driver, waves.requests), old, waves)
        assert before.num_restored == 0 < before.num_rejected


def test_the_file_goes_with_its_tier(keeping, checkpoint):
    model = checkpoint()
    with serving(keeping, model) as (group, _):
        (tier,) = tiers(group)
        assert files_of(keeping)[0].stat().st_size == tier.file_bytes > tier.size_bytes
    with serving(keeping, model, kv_host_memory_bytes=1 << 19) as (group, _):
        assert files_of(keeping)[0].stat().st_size == tiers(group)[0].file_bytes < tier.file_bytes
    with serving(keeping, model, kv_host_memory_bytes=0):
        assert not files_of(keeping)


def test_too_little_room_is_refused_before_the_model_is_loaded(keeping, checkpoint):
    size = 1 << 50
    refused = pytest.raises(CapacityError, match="field kv-host-dir")
    with refused, serving(keeping, checkpoint(), kv_host_memory_bytes=size):
        pass
