"""Random batches with every kind of row, and checks for any implementation of sampling: for tests
on the CPU, the interpreter and a GPU."""

from dataclasses import replace

import numpy as np
import torch
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from worker_daemon.contracts.sampling import SamplingMetadata
from worker_daemon.sample.sampler import TorchSampling

CHI_SQUARE_SETTINGS = [
    {"temperature": 1.0},
    {"temperature": 0.6},
    {"temperature": 1.7, "top_k": 8},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 1.3, "min_p": 0.05},
    {"temperature": 0.8, "top_k": 10, "top_p": 0.95, "min_p": 0.01},
]

SCALES = {"flat": 0.7, "wide": 8.0, "far": 1000.0, "peaked": 2.0, "masked": 8.0}
KINDS = (*SCALES, "equal", "ties", "close")


def make_metadata(
    num_rows, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seeds=None, positions=None
):
    def column(value, dtype):
        return torch.as_tensor(value, dtype=dtype).expand(num_rows).clone()

    return SamplingMetadata(
        temperature=column(temperature, torch.float32),
        top_k=column(top_k, torch.int32),
        top_p=column(top_p, torch.float32),
        min_p=column(min_p, torch.float32),
        seeds=column(7 if seeds is None else seeds, torch.int64),
        positions=torch.arange(num_rows) if positions is None else positions,
        any_random=True,
        any_top_k=True,
        any_top_p=True,
        any_min_p=True,
    )


def random_metadata(num_rows, rng):
    """Return random mixtures of greedy rows, temperatures and filters, extremes included."""
    return make_metadata(
        num_rows,
        temperature=torch.from_numpy(rng.choice([0.0, 1e-30, 0.5, 1.0, 1.9, 1e6], num_rows)),
        top_k=torch.from_numpy(rng.choice([0, 0, 1, 2, 50, 3000, 10**6], num_rows)),
        top_p=torch.from_numpy(rng.choice([1.0, 1.0, 0.999, 0.9, 0.3, 1e-6], num_rows)),
        min_p=torch.from_numpy(rng.choice([0.0, 0.0, 0.0, 1e-9, 0.02, 0.3, 1.0], num_rows)),
        seeds=torch.from_numpy(rng.integers(-(2**63), 2**63 - 1, num_rows)),
        positions=torch.from_numpy(rng.integers(0, 2**32, num_rows)),
    )


def random_logits(kind, num_rows, vocab_size, rng):
    """Return float32 [R, V] on the CPU."""
    normal = torch.from_numpy(rng.standard_normal((num_rows, vocab_size), np.float32))
    if kind == "equal":
        return torch.full_like(normal, float(normal[0, 0]))
    if kind == "ties":
        return (normal * 2).round()
    if kind == "close":
        return 100 + normal * 1e-5
    logits = normal * SCALES[kind]
    if kind == "peaked":
        logits[:, rng.integers(vocab_size)] += 80
    if kind == "masked":
        logits[torch.from_numpy(rng.random(logits.shape) < 0.9)] = -torch.inf
    return logits


def on(device, metadata):
    """Return metadata with its tensors on a device."""
    columns = {name: getattr(metadata, name) for name in metadata.__slots__}
    return replace(
        metadata, **{n: c.to(device) for n, c in columns.items() if isinstance(c, torch.Tensor)}
    )


def pick(metadata, rows):
    """Return the metadata of some rows, with flags set only if needed."""
    columns = ("temperature", "top_k", "top_p", "min_p", "seeds", "positions")
    part = replace(metadata, **{name: getattr(metadata, name)[rows] for name in columns})
    random = part.temperature > 0
    return replace(
        part,
        any_random=bool(random.any()),
        any_top_k=bool((random & (part.top_k > 0)).any()),
        any_top_p=bool((random & (part.top_p < 1)).any()),
        any_min_p=bool((random & (part.min_p > 0)).any()),
    )


def described(metadata, row):
    """Return a row's parameters, for a message."""
    names = ("temperature", "top_k", "top_p", "min_p", "seeds", "positions")
    return {name: getattr(metadata, name)[row].item() for name in names}


def check_against_torch(sampling, logits, metadata):
    """Check that every row has the token of plain torch on the same device."""
    tokens = sampling.tokens(logits, metadata)
    expected = TorchSampling().tokens(logits, metadata)
    assert tokens.dtype == torch.int64
    wrong = torch.nonzero(tokens != expected).flatten().tolist()
    assert not wrong, [
        (row, tokens[row].item(), expected[row].item(), described(metadata, row)) for row in wrong
    ]


def boundary_seeds(row, position, num_tried, **settings):
    """Return int64 [2]: a seed whose draw from logits [V] is among the least likely kept tokens,
    and one whose unfiltered draw is among the most likely dropped tokens.

    A threshold that is off by a few tokens gives a different token for one of the two.
    """
    plain = TorchSampling()
    seeds = torch.from_numpy(np.random.default_rng().integers(1 << 62, size=num_tried))
    positions = torch.full((num_tried,), position)
    rows = row.expand(num_tried, -1)
    temperature = settings.get("temperature", 1.0)
    filtered = make_metadata(num_tried, seeds=seeds, positions=positions, **settings)
    free = make_metadata(num_tried, temperature, seeds=seeds, positions=positions)
    kept = plain.tokens(rows, on(row.device, filtered))
    drawn = plain.tokens(rows, on(row.device, pick(free, slice(None))))
    assert (kept != drawn).any()
    last_kept = rows[0][kept].argmin()
    first_dropped = rows[0][drawn].masked_fill(kept == drawn, -torch.inf).argmax()
    return seeds[torch.stack([last_kept, first_dropped]).cpu()]


def check_boundary(sampling, row, num_tried=600, **settings):
    """Check that filters have the same threshold as in plain torch. row: logits [V]."""
    metadata = make_metadata(
        2,
        seeds=boundary_seeds(row, 5, num_tried, **settings),
        positions=torch.tensor([5, 5]),
        **settings,
    )
    check_against_torch(sampling, row.expand(2, -1).contiguous(), on(row.device, metadata))


def check_rows_are_independent(sampling, logits, metadata):
    """Check that a row gets the same token alone, permuted, in part of the batch, and in the whole
    batch."""
    num_rows = logits.shape[0]
    together = sampling.tokens(logits, metadata)
    for row in range(0, num_rows, max(1, num_rows // 6)):
        alone = sampling.tokens(logits[[row]], pick(metadata, [row]))
        assert torch.equal(alone, together[[row]])
    order = torch.randperm(num_rows, device=logits.device)
    assert torch.equal(sampling.tokens(logits[order], pick(metadata, order)), together[order])
    part = slice(num_rows // 3, num_rows // 2)
    assert torch.equal(sampling.tokens(logits[part], pick(metadata, part)), together[part])


def reference_probs(logits, temperature, top_k, top_p, min_p):
    """Return exact probabilities [V] by transformers' processors, in float64."""
    scores = TemperatureLogitsWarper(temperature)(None, logits.double().unsqueeze(0))
    if min_p > 0:
        scores = MinPLogitsWarper(min_p)(None, scores)
    if top_k > 0:
        scores = TopKLogitsWarper(top_k)(None, scores)
    if top_p < 1:
        scores = TopPLogitsWarper(top_p)(None, scores)
    return scores.softmax(-1)[0]


def draw(sampling, logits, num_draws, device="cpu", **settings):
    """Return tokens int64 [num_draws] on the CPU, all from the same logits [V]."""
    rows = logits.expand(num_draws, -1).contiguous().to(device)
    metadata = on(device, make_metadata(num_draws, **settings))
    return sampling.tokens(rows, metadata).cpu()


def check_distribution(sampling, device, settings, vary):
    """Check that draws with varied seeds or positions pass a chi-square test against
    transformers."""
    num_draws, vocab_size = 40_000, 16
    logits = torch.randn(vocab_size, generator=torch.Generator().manual_seed(3)) * 1.2
    filters = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, **settings}
    probs = reference_probs(logits, **filters)
    varied = torch.arange(num_draws)
    other = {"seeds": varied, "positions": torch.full_like(varied, 9)}
    tokens = draw(
        sampling, logits, num_draws, device, **settings, **(other if vary == "seeds" else {})
    )
    counts = torch.bincount(tokens, minlength=vocab_size).double()
    assert counts[probs == 0].sum() == 0
    kept = probs > 0
    expected = probs[kept] * num_draws
    chi_square = ((counts[kept] - expected) ** 2 / expected).sum().item()
    assert chi_square < chi_square_limit(int(kept.sum()) - 1)


def chi_square_limit(degrees):
    """Return the 99.9 % point of the chi-square distribution (Wilson and Hilferty's
    approximation)."""
    return degrees * (1 - 2 / (9 * degrees) + 3.09 * (2 / (9 * degrees)) ** 0.5) ** 3
