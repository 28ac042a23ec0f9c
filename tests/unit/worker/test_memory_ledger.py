"""Memory by kind, and advice, over figures that the test drives."""

import pytest

from tests.support.driven_memory import GIB, MIB, DrivenMemory
from worker_daemon.worker.memory_ledger import CUSHION_BYTES, MemoryLedger, memory_line

CONTEXT = 500 * MIB
WORKSPACE = 64 * MIB


@pytest.fixture(params=["by the allocator", "beside the allocator"])
def place(request):
    """(memory, bytes): how weights and caches are taken."""
    if request.param == "by the allocator":
        return lambda memory, size: memory.take(size)

    def beside(memory, size):
        memory.context += size

    return beside


def warm(memory, place, budget=60 * GIB):
    """16 GiB of weights, 30 of KV, a graph pool of 1 and 200 MiB of the driver's, a step of 3."""
    memory.context, memory.tensors = CONTEXT, WORKSPACE
    ledger = MemoryLedger(memory, memory.snapshot(), budget)
    with ledger.taking("weights"):
        place(memory, 16 * GIB)
    ledger.activations_peak = 3 * GIB
    with ledger.taking("kv_cache"):
        place(memory, 30 * GIB)
    memory.step(3 * GIB)
    with ledger.taking("graphs"):
        memory.pinned += GIB
        memory.context += 200 * MIB
    return ledger


@pytest.mark.parametrize("others", [{}, {7: 5 * GIB, 8: GIB}])
def test_kinds_add_up_to_what_is_used(place, others):
    memory = DrivenMemory()
    memory.others = others
    kinds = warm(memory, place).by_kind({"weights": 16 * GIB, "kv_cache": 30 * GIB})
    assert kinds == {
        "weights": 16 * GIB,
        "kv_cache": 30 * GIB,
        "graphs": GIB + 200 * MIB,
        "activations": 3 * GIB,
        "context": CONTEXT + WORKSPACE,
        "others": sum(others.values()),
        "activations_peak": 3 * GIB,
        "free": memory.free,
        "total": 80 * GIB,
    }
    assert "kv_cache 32.212 GB" in memory_line(kinds)


def test_others_that_nobody_names_are_in_the_context(place):
    memory = DrivenMemory(names_others=False)
    memory.others = {7: 5 * GIB}
    kinds = warm(memory, place).by_kind({"weights": 16 * GIB, "kv_cache": 30 * GIB})
    assert "others" not in kinds
    assert kinds["context"] == CONTEXT + WORKSPACE + 5 * GIB


def test_what_is_given_back_is_nobodys(place):
    memory = DrivenMemory()
    ledger = warm(memory, place)
    if memory.tensors > 30 * GIB:
        memory.give(30 * GIB)
    else:
        memory.context -= 30 * GIB
    ledger.forget("kv_cache")
    kinds = ledger.by_kind({"weights": 16 * GIB, "kv_cache": 0})
    assert (kinds["kv_cache"], kinds["activations"]) == (0, 3 * GIB)
    assert kinds["context"] == CONTEXT + WORKSPACE


@pytest.mark.parametrize("others", [{}, {7: 5 * GIB}])
@pytest.mark.parametrize("is_cached", [True, False], ids=["kept", "given back"])
def test_advice_is_what_could_be_had_after_all(place, others, is_cached):
    """With a KV cache of that size, a largest step just fits."""
    memory = DrivenMemory()
    memory.others = others
    ledger = warm(memory, place)
    if not is_cached:
        memory.cached = 0
    advice = ledger.advise()
    assert advice.request_bytes == 60 * GIB - 16 * GIB - 3 * GIB - GIB - 200 * MIB
    used = CONTEXT + WORKSPACE + 16 * GIB + 3 * GIB + GIB + 200 * MIB + sum(others.values())
    assert advice.card_bytes == 80 * GIB - used - CUSHION_BYTES


def test_advice_is_never_negative():
    memory = DrivenMemory(total=52 * GIB)
    advice = warm(memory, lambda memory, size: memory.take(size), budget=GIB).advise()
    assert (advice.request_bytes, advice.card_bytes) == (0, advice.card_bytes)
    assert advice.card_bytes >= 0


def test_a_kind_that_could_not_be_taken_is_not_noted():
    memory = DrivenMemory()
    ledger = MemoryLedger(memory, memory.snapshot(), GIB)
    with pytest.raises(MemoryError), ledger.taking("kv_cache"):
        memory.take(GIB)
        raise MemoryError
    memory.give(GIB)
    assert ledger.by_kind({})["kv_cache"] == 0
