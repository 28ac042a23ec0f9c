"""The ranks of a group hold the same weights and adapters, or serve nothing from them: files that
change on disk, and hosts with different files under one name."""

import contextlib
import os
import shutil

import pytest

from rpc_schema.codec import encode_step
from rpc_schema.config import LoraConfig
from rpc_schema.weight_transfer import DiskEngine, DiskSource, ReloadWeights
from tests.support.forked_daemons import ForkedDaemons
from tests.support.lora_adapters import adapted_requests, make_adapter
from tests.support.serving import (
    LONG_LEASE,
    connect,
    generate,
    greedy_request,
    kill_and_wait,
    worker_config,
)
from tests.support.waiting import wait_until
from worker_client.errors import (
    ClientConfigError,
    ContentMismatchError,
    WeightsNotWhole,
    WorkerDied,
)
from worker_client.wire.worker_client import TensorList
from worker_client.worker_group import WorkerGroup

PROMPT = [5, 6, 7, 8]
ROOM = LoraConfig(max_loras=2, max_lora_rank=16)


def tokens(served):
    run = generate(served.group, served.loaded, [greedy_request("a", PROMPT, 6)])
    return run.tokens["a"]


def overwrite(path, source):
    """Write a file's contents into an existing file of the same name, in place."""
    for file in source.path.glob("*.safetensors"):
        (path / file.name).write_bytes(file.read_bytes())


def test_a_replaced_rank_does_not_join_with_other_weights(daemons, checkpoint, model_root):
    old, new = checkpoint(), checkpoint(seed=1)
    path = model_root / "overwritten"
    shutil.copytree(old.path, path)
    config = worker_config(path, 1, 2)
    with connect(daemons.endpoints(2), config) as served:
        group = served.group
        assert tokens(served) == old.greedy(PROMPT, 6)
        overwrite(path, new)
        daemons.kill(1)
        daemons.restart_dead()
        group.replace(1)
        with pytest.raises(WeightsNotWhole, match=r"rank 0 .* and rank 1 .* different weights"):
            tokens(served)
        with pytest.raises(ContentMismatchError, match=r"rank 0 .* and rank 1 "):
            group.weights.save_sharded_state("mixed")
        group.weights.init_transfer_engine(DiskEngine())
        group.weights.start_update(partial=True)
        norm = TensorList(("model.norm.weight",), (), ())
        group.weights.update(norm, DiskSource(model=str(new.path)))
        group.weights.finish_update()
        with pytest.raises(
            WeightsNotWhole, match="version 1, sent"
        ):  # all else is still of two models
            tokens(served)
        group.weights.reload()
        assert tokens(served) == new.greedy(PROMPT, 6)
        overwrite(path, old)
        daemons.kill(0)
        daemons.restart_dead()
        group.replace(0)
        with pytest.raises(WeightsNotWhole):
            tokens(served)
    with connect(daemons.endpoints(2), config, reload=False) as served:  # which loads all anew
        assert served.loaded.was_loaded
        assert tokens(served) == old.greedy(PROMPT, 6)


def numbers(group):
    return [status.weights.version for status in group.get_status()]


def digests(group):
    return {status.weights.identity.content for status in group.get_status()}


def send(group, model, names=((),), **options):
    """Update all ranks from a checkpoint's files, in rounds of some names each."""
    group.weights.init_transfer_engine(DiskEngine())
    group.weights.start_update(**options)
    for some in names:
        group.weights.update(TensorList(tuple(some), (), ()), DiskSource(model=str(model.path)))
    return {reply.version for reply in group.weights.finish_update()}


def test_versions_over_updates_whose_ranks_are_killed(daemons, checkpoint):
    old, new = checkpoint(), checkpoint(seed=1)
    config = worker_config(old.path, 1, 2)
    some = sorted(new.model.state_dict())[:5]

    def lose(group, *ranks):
        for rank in ranks:
            daemons.kill(rank)
        daemons.restart_dead()
        group.replace(ranks[0])

    with connect(daemons.endpoints(2), config) as served:
        group = served.group
        assert numbers(group) == [0, 0] and group.weights.version.number == 0
        loaded = digests(group)
        assert send(group, new, version=40) == {40}
        assert numbers(group) == [40, 40]
        assert len(digests(group)) == 1 and digests(group) != loaded
        assert tokens(served) == new.greedy(PROMPT, 6)
        for wrong in (40, 39, 0, True, 2**63, "41"):
            for change in (group.weights.start_update, group.weights.reload):
                with pytest.raises(ClientConfigError, match="version 40 already") as raised:
                    change(version=wrong)
                assert (raised.value.field, raised.value.value) == ("version", wrong)
        assert numbers(group) == [40, 40] and tokens(served) == new.greedy(PROMPT, 6)

        # In the middle of an update: it makes no version.
        group.weights.start_update(version=50)
        group.weights.update(TensorList(tuple(some), (), ()), DiskSource(model=str(old.path)))
        assert numbers(group) == [40, 40] and group.weights.version.number == 40
        lose(group, 1)
        assert numbers(group) == [40, 0]
        with pytest.raises(WeightsNotWhole, match="the weights of rank 0 are dirty"):
            tokens(served)
        assert send(group, old, version=50) == {50}
        assert numbers(group) == [50, 50] and tokens(served) == old.greedy(PROMPT, 6)

        # Between the ends of an update on two ranks: one of them has the version.
        group.weights.start_update()
        group.weights.update(TensorList(), DiskSource(model=str(new.path)))
        daemons.kill(1)
        with pytest.raises(WorkerDied):
            group.weights.finish_update()
        daemons.restart_dead()
        group.replace(1)
        assert numbers(group) == [51, 0]
        both = r"rank 0 \(.*: version 51, sent, .*\) and rank 1 \(.*: version 0, read from files, "
        with pytest.raises(WeightsNotWhole, match=both):
            tokens(served)
        with pytest.raises(ClientConfigError, match="version 51 already"):
            group.weights.start_update(version=51)
        group.weights.reload()
        assert numbers(group) == [52, 52] and digests(group) == loaded
        assert tokens(served) == old.greedy(PROMPT, 6)

        # A rank that reads the files that the others have read has their version.
        lose(group, 1)
        assert numbers(group) == [52, 52] and tokens(served) == old.greedy(PROMPT, 6)
        send(group, new)
        lose(group, 0, 1)
        with pytest.raises(WeightsNotWhole, match="version 53 of the weights is lost with the"):
            tokens(served)
        assert send(group, new) == {54}
        assert tokens(served) == new.greedy(PROMPT, 6)
    with connect(daemons.endpoints(2), config, reload=False) as served:
        group = served.group
        assert served.loaded.was_loaded and group.weights.version.number == 54
        assert tokens(served) == new.greedy(PROMPT, 6)

        # A driver that dies between the ranks of a reload, which changes nothing but the number.
        group.weights.reload()
        request = ReloadWeights(**group._channel.next_ids()._asdict())
        group.clients[0].send(encode_step(request))
        wait_until(lambda: numbers(group) == [56, 55], "the reload of rank 0")
        assert digests(group) == loaded
        with WorkerGroup(daemons.endpoints(2), config.parallel, lease=LONG_LEASE) as other:
            other.attach(force=True)
            both = r"rank 0 \(.*: version 56, .* and rank 1 \(.*: version 55, .* different weights"
            with pytest.raises(WeightsNotWhole, match=both):
                other.execute_model(None)
            model = other.prepare(config, num_gpu_blocks=256)
            assert model.was_loaded and numbers(other) == [57, 57]
            assert tokens(served._replace(group=other)) == old.greedy(PROMPT, 6)


@pytest.fixture
def two_hosts(tmp_path):
    """Daemons that find different directories under one name: ([root, root], LocalDaemons)."""
    roots = [tmp_path / "a", tmp_path / "b"]
    for root in roots:
        root.mkdir()
    with contextlib.ExitStack() as stack:
        started = [
            stack.enter_context(ForkedDaemons(["cpu"], root, lora_root=root)) for root in roots
        ]
        yield roots, started


def test_hosts_with_different_files_at_one_path(two_hosts, checkpoint):
    (first, second), started = two_hosts
    endpoints = [each.endpoints[0] for each in started]
    base, other = checkpoint(seed=31), checkpoint(seed=32)
    shutil.copytree(base.path, first / "m")
    shutil.copytree(other.path, second / "m")
    config = worker_config("m", 2, lora=ROOM)
    with (
        pytest.raises(ContentMismatchError, match=r"rank 0 .* and rank 1 ") as raised,
        connect(endpoints, config),
    ):
        pass
    assert raised.value.value == "m" and "same files" in raised.value.fix
    shutil.rmtree(second / "m")
    shutil.copytree(base.path, second / "m", copy_function=shutil.copyfile)
    merged = {name: make_adapter(base, name, seed=n) for n, name in enumerate(("x", "y"))}
    for root, name in ((first, "x"), (second, "y")):
        shutil.copytree(merged[name].path, root / "z")
    with connect(endpoints, config) as (group, loaded):
        with pytest.raises(ContentMismatchError, match="read different files") as raised:
            group.loras.add("z")
        assert raised.value.value == "z" and not group.loras.known
        assert not any(reply.adapters for reply in group.loras.list_by_rank())
        overwrite(second / "z", merged["x"])
        (second / "z/adapter_config.json").write_bytes(
            (first / "z/adapter_config.json").read_bytes()
        )
        models = [(base, None), (merged["x"], group.loras.add("z"))]
        requests, expected = adapted_requests(models, 2, 4)
        assert generate(group, loaded, requests).tokens == expected
        os.utime(first / "z/adapter_model.safetensors", (1, 1))
        kill_and_wait(started[1].pids[0])
        started[1].restart_dead()
        group.replace(1)
        assert generate(group, loaded, requests).tokens == expected, "both still have the same"
        with pytest.raises(ContentMismatchError, match="changed since"):
            group.loras.add("z")


def test_an_adapter_that_changed_on_disk_is_not_taken_for_the_loaded_one(daemons, checkpoint):
    base = checkpoint("LlamaForCausalLM", seed=31)
    old, new = make_adapter(base, "edited", seed=41), make_adapter(base, "edits", seed=42)
    endpoints, config = daemons.endpoints(2), worker_config(base.path, 2, lora=ROOM)
    with connect(endpoints, config) as (group, loaded):
        before = group.loras.add("edited")
        requests, expected = adapted_requests([(old, before)], 7, 2)
        assert generate(group, loaded, requests).tokens == expected
        overwrite(old.path, new)
        with pytest.raises(ContentMismatchError, match="changed since") as raised:
            group.loras.add("edited")
        assert "load_inplace" in raised.value.fix
        assert generate(group, loaded, requests).tokens == expected, "knowingly, by its version"
    with connect(endpoints, worker_config(base.path, 2, lora=ROOM), reload=False) as (
        group,
        loaded,
    ):
        assert loaded.was_loaded and group.loras.known[before.lora_id].name == "edited"
        with pytest.raises(ContentMismatchError, match="changed since"):
            group.loras.add("edited")
        after = group.loras.add("edited", load_inplace=True)
        assert group.loras.add("edited") == after
        requests, expected = adapted_requests([(new, after)], 8, 2)
        assert generate(group, loaded, requests).tokens == expected
        overwrite(old.path, make_adapter(base, "edits", seed=43))
        daemons.kill(1)
        daemons.restart_dead()
        group.replace(1)
        assert not group.loras.known, "the new rank has read other files"
        assert not any(reply.adapters for reply in group.loras.list_by_rank())
