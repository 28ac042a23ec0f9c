"""The load of replicas, as the benchmark divides it."""

from benchmarks.replicas import EVERY, LONGER, divided, make_requests

VOCAB_SIZE = 64


def tokens_of(requests):
    return sum(len(request.prompt) + request.max_tokens for request in requests)


def test_workloads_grow_with_the_number_of_replicas():
    one, three = (make_requests("decode_bs64", count, VOCAB_SIZE) for count in (1, 3))
    assert (len(one), len(three)) == (64, 192)
    assert len({request.id for request in three}) == 192
    assert tokens_of(three) == 3 * tokens_of(one)


def test_replicas_get_about_as_many_tokens_of_a_skewed_load():
    mixed, skewed = (make_requests(name, 2, VOCAB_SIZE) for name in ("mixed256", "skewed"))
    longer = [own.max_tokens // each.max_tokens for own, each in zip(skewed, mixed, strict=True)]
    assert longer == [LONGER if index % EVERY == 0 else 1 for index in range(len(mixed))]
    parts = divided(skewed, 2)
    assert sorted(each.id for part in parts for each in part) == sorted(e.id for e in skewed)
    first, second = map(tokens_of, parts)
    assert abs(first - second) <= max(tokens_of([request]) for request in skewed)
