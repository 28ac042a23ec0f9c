"""Libraries for the attention of long chunks: what is tried and chosen at load, what is refused,
what a failure costs, and what a later start remembers. torch on the CPU stands in for ours and for
the library; times are given."""

import json
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from tests.support.attention_steps import random_sinks
from tests.support.torch_gathered import TorchGathered
from worker_daemon.contracts.attention import AttentionLayer
from worker_daemon.layers.attention import HeadSizes
from worker_daemon.layers.prompt_providers import (
    AttendGathered,
    FlashAttention,
    PromptCase,
    ScoreKind,
)
from worker_daemon.layers.provider_choice import ProviderChoice, choose_provider
from worker_daemon.layers.provider_records import ProviderRecords
from worker_daemon.layers.torch_ops import TorchOps

ALL_KEYS = ScoreKind(None, None, False)
WINDOW = ScoreKind(64, None, False)
CAPPED = ScoreKind(None, 30.0, False)
SINKS = ScoreKind(None, None, True)
KINDS = (ALL_KEYS, WINDOW, CAPPED, SINKS)
HEADS = HeadSizes(2, 1, 8)


def case_of(*kinds: ScoreKind, dtype: torch.dtype = torch.float32) -> PromptCase:
    return PromptCase(torch.device("cpu"), dtype, HEADS, kinds or KINDS)


@dataclass
class Library:
    """A PromptProvider whose attention is right, or as `spoil` makes it."""

    name: str = "fast-attention"
    version: str | None = "1.0"
    obstacles: dict[ScoreKind, str] = field(default_factory=dict)
    spoil: Callable[[torch.Tensor, ScoreKind], torch.Tensor] = lambda out, kind: out
    opened: int = 0
    computed: list[ScoreKind] = field(default_factory=list)

    def find_obstacle(self, case: PromptCase, kind: ScoreKind) -> str | None:
        return self.obstacles.get(kind)

    def open(self) -> AttendGathered:
        self.opened += 1
        return self.attend

    def attend(
        self,
        q: torch.Tensor,
        context: torch.Tensor,
        layer: AttentionLayer,
        window: int | None,
    ) -> torch.Tensor:
        kind = ScoreKind.of(layer, window)
        self.computed.append(kind)
        return self.spoil(TorchGathered().attend(q, context, layer, window), kind)


class Unopenable(Library):
    def open(self) -> AttendGathered:
        super().open()
        raise ImportError("undefined symbol: cuInit")


class Times:
    """A Stopwatch that runs each launch once, and says that the library takes `theirs`."""

    def __init__(self, library: Library, theirs: float) -> None:
        self._library = library
        self._theirs = theirs
        self.num_timed = 0

    def __call__(self, launch: Callable[[], object]) -> float:
        self.num_timed += 1
        before = len(self._library.computed)
        launch()
        return self._theirs if len(self._library.computed) > before else 1.0


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker_daemon.layers.provider_choice.CHECKED", (111, 250))
    monkeypatch.setattr("worker_daemon.layers.provider_choice.TIMED", (128, 256))
    monkeypatch.setattr("worker_daemon.layers.prompt_providers.LEAST_OPERATIONS", 0.0)


def choose(
    library: Library,
    theirs: float = 0.5,
    case: PromptCase | None = None,
    records: ProviderRecords | None = None,
) -> tuple[ProviderChoice, TorchGathered, Times]:
    ours, times = TorchGathered(), Times(library, theirs)
    kept = ProviderRecords(None) if records is None else records
    choice = choose_provider(ours, [library], case or case_of(), kept, times)
    ours.attended.clear()
    library.computed.clear()
    return choice, ours, times


def attend(choice: ProviderChoice, kind: ScoreKind, *, with_lse: bool = False) -> torch.Tensor:
    """Compute a random chunk of this kind, and compare it with ours."""
    seed = random.randrange(2**31)
    print("seed", seed)
    generator = torch.Generator().manual_seed(seed)
    num_queries, num_keys = 40, 100
    q = torch.randn((num_queries, 2, 8), generator=generator)
    context = torch.randn((2, num_keys, 1, 8), generator=generator)
    sinks = random_sinks(2, torch.float32, seed=seed) if kind.has_sinks else None
    layer = AttentionLayer(
        TorchOps(), 1, 8, 0.3, kind.window, None, logit_softcap=kind.logit_softcap, sinks=sinks
    )
    lse = torch.full((num_queries, 2), torch.nan) if with_lse else None
    out = choice.gathered.attend(q, context, layer, kind.window, lse)
    torch.testing.assert_close(out, TorchGathered().attend(q, context, layer, kind.window))
    assert lse is None or lse.isfinite().all()
    return out


@pytest.mark.parametrize(("window", "per_pair"), [(None, 80.0), (7, 7.0)])
def test_small_chunks_are_ours(
    monkeypatch: pytest.MonkeyPatch, window: int | None, per_pair: float
) -> None:
    """40 queries of 2 heads of 8 see 80 keys each in the mean, of the 100 that there are."""
    kind, library = ScoreKind(window, None, False), Library()
    choice, ours, _ = choose(library, case=case_of(kind))
    operations = 4 * 40 * 2 * 8 * per_pair
    for least, computed in ((operations, [kind]), (operations + 1, [])):
        monkeypatch.setattr("worker_daemon.layers.prompt_providers.LEAST_OPERATIONS", least)
        library.computed.clear()
        attend(choice, kind)
        assert library.computed == computed
    assert len(ours.attended) == 1


def test_a_faster_library_computes_every_kind_that_was_tried() -> None:
    library = Library()
    choice, ours, _ = choose(library)
    assert (choice.name, choice.provided) == ("fast-attention", KINDS)
    for kind in KINDS:
        attend(choice, kind)
    assert library.computed == list(KINDS)
    assert not ours.attended
    assert "all keys: fast-attention 1.0, 2.00 times as fast; window 64: " in choice.report


def test_other_kinds_and_log_sum_exps_are_ours() -> None:
    library = Library()
    choice, ours, _ = choose(library, case=case_of(ALL_KEYS, CAPPED))
    for kind in (WINDOW, SINKS, CAPPED._replace(logit_softcap=31.0)):
        attend(choice, kind)
    attend(choice, ALL_KEYS, with_lse=True)
    assert not library.computed
    assert len(ours.attended) == 4
    attend(choice, CAPPED)
    assert library.computed == [CAPPED]


@pytest.mark.parametrize("theirs", [0.99, 1.0, 1.5])
def test_a_library_that_is_hardly_faster_is_not_used(theirs: float) -> None:
    library = Library()
    choice, ours, _ = choose(library, theirs)
    assert choice.gathered is ours
    assert (choice.name, choice.provided) == ("", ())
    assert f"all keys: ours (fast-attention 1.0 {1 / theirs:.2f} times as fast)" in choice.report


def test_a_library_that_is_not_installed_is_not_tried() -> None:
    library = Library(version=None)
    choice, ours, _ = choose(library)
    assert choice.gathered is ours
    assert choice.report == ""
    assert library.opened == 0


def test_an_obstacle_leaves_the_kind_to_us(caplog: pytest.LogCaptureFixture) -> None:
    library = Library(obstacles={SINKS: "it knows no sinks", WINDOW: "it knows no windows"})
    with caplog.at_level("INFO"):
        choice, _, _ = choose(library)
    assert choice.provided == (ALL_KEYS, CAPPED)
    assert "does not compute chunks with sinks: it knows no sinks" in caplog.text
    library = Library(obstacles=dict.fromkeys(KINDS, "wrong device"))
    choice, ours, _ = choose(library)
    assert choice.gathered is ours
    assert library.opened == 0


def raising(out: torch.Tensor, kind: ScoreKind) -> torch.Tensor:
    if kind == WINDOW:
        raise AssertionError("SM90 has no such kernel")
    return out


def unaligned(out: torch.Tensor, kind: ScoreKind) -> torch.Tensor:
    """As if the mask were aligned with the first key."""
    return out.roll(1, 0) if kind == WINDOW else out


def nan(out: torch.Tensor, kind: ScoreKind) -> torch.Tensor:
    return torch.full_like(out, torch.nan) if kind == WINDOW else out


def misshapen(out: torch.Tensor, kind: ScoreKind) -> torch.Tensor:
    return out.transpose(0, 1) if kind == WINDOW else out


@pytest.mark.parametrize("spoil", [raising, unaligned, nan, misshapen])
def test_a_kind_that_fails_is_logged_and_ours(
    spoil: Callable[[torch.Tensor, ScoreKind], torch.Tensor],
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> None:
    records = ProviderRecords(tmp_path)
    choice, ours, _ = choose(Library(spoil=spoil), records=records)
    assert choice.provided == (ALL_KEYS, CAPPED, SINKS)
    assert "fast-attention 1.0 is not used for window 64: " in caplog.text
    attend(choice, WINDOW)
    assert len(ours.attended) == 1
    assert not list(tmp_path.iterdir())  # the failure may pass: it is tried again
    choice, _, _ = choose(Library(), records=records)
    assert choice.provided == KINDS


def test_a_library_that_cannot_be_loaded_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    library = Unopenable()
    choice, ours, _ = choose(library)
    assert library.opened == 1
    assert choice.gathered is ours
    assert "cannot be loaded: ImportError('undefined symbol: cuInit')" in caplog.text
    assert choice.report.startswith("all keys: ours; window 64: ours; ")
    assert "not measured" in choice.report


def test_a_later_start_does_not_measure_again_but_checks(tmp_path: Path) -> None:
    records = ProviderRecords(tmp_path)
    first, _, times = choose(Library(), records=records)
    assert times.num_timed == 2 * len(KINDS)
    library = Library()
    again, _, times = choose(library, 2.0, records=ProviderRecords(tmp_path))
    assert times.num_timed == 0
    assert again.provided == first.provided == KINDS
    assert "2.00 times as fast" in again.report
    assert "measured before" in again.report
    wrong, _, _ = choose(Library(spoil=nan), records=records)
    assert wrong.provided == (ALL_KEYS, CAPPED, SINKS)


def test_a_library_that_was_slower_is_not_even_loaded(tmp_path: Path) -> None:
    records = ProviderRecords(tmp_path)
    choose(Library(), 2.0, records=records)
    library = Library()
    choice, ours, times = choose(library, 0.1, records=records)
    assert (library.opened, times.num_timed) == (0, 0)
    assert choice.gathered is ours
    assert "(fast-attention 1.0 0.50 times as fast)" in choice.report


@pytest.mark.parametrize(
    ("library", "case"),
    [
        (Library(version="1.1"), case_of()),
        (Library(name="other"), case_of()),
        (Library(), case_of(ALL_KEYS)),
        (Library(), case_of(dtype=torch.float64)),
        (Library(), PromptCase(torch.device("cpu"), torch.float32, HeadSizes(4, 1, 8), KINDS)),
    ],
)
def test_what_was_measured_holds_for_the_same_case_alone(
    library: Library, case: PromptCase, tmp_path: Path
) -> None:
    records = ProviderRecords(tmp_path)
    choose(Library(), 2.0, records=records)
    _, _, times = choose(library, case=case, records=records)
    assert times.num_timed == 2 * len(case.kinds)


@pytest.mark.parametrize(
    "content",
    [b"", b"[", b"{}", b"null", b"[[0.5, 1.0]]", json.dumps([[0.0, 1.0]] * 4).encode(),
     json.dumps([["a", 1.0]] * 4).encode(), b"[[NaN, 1.0], [1.0, 1.0], [1.0, 1.0], [1.0, 1.0]]",
     json.dumps([[1.0, 1.0, 1.0]] * 4).encode(), b"\xff\xfe", b"[" * 70_000],
)  # fmt: skip
def test_a_damaged_record_is_measured_again(
    content: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    records = ProviderRecords(tmp_path)
    choose(Library(), records=records)
    (path,) = tmp_path.iterdir()
    intact = path.read_bytes()
    path.write_bytes(content)
    choice, _, times = choose(Library(), records=records)
    assert times.num_timed == 2 * len(KINDS)
    assert choice.provided == KINDS
    assert "is not read, attention is measured again" in caplog.text
    assert path.read_bytes() == intact


def test_a_directory_that_takes_no_file_costs_nothing_but_the_record(tmp_path: Path) -> None:
    for directory in (tmp_path / "missing", tmp_path / "file"):
        (tmp_path / "file").write_text("")
        choice, _, _ = choose(Library(), records=ProviderRecords(directory))
        assert choice.provided == KINDS


def test_the_report_says_what_the_choice_took() -> None:
    def slow(out: torch.Tensor, kind: ScoreKind) -> torch.Tensor:
        time.sleep(0.15)
        return out

    choice, _, _ = choose(Library(spoil=slow), case=case_of(ALL_KEYS))
    seconds = float(choice.report.rsplit(", ", 1)[1].removesuffix(" s"))
    assert seconds >= 0.3  # once checked, once timed


@pytest.mark.parametrize(
    ("dtype", "head_dim", "major", "obstacle"),
    [
        (torch.bfloat16, 128, 9, None),
        (torch.float16, 64, 9, None),
        (torch.bfloat16, 256, 9, None),
        (torch.float32, 128, 9, "float32"),
        (torch.bfloat16, 264, 9, "heads of 264"),
        (torch.bfloat16, 132, 9, "heads of 132"),
        (torch.bfloat16, 128, 8, "not 8"),
        (torch.bfloat16, 128, 10, "not 10"),
    ],
)
def test_what_flash_attention_is_not_asked_for(
    dtype: torch.dtype,
    head_dim: int,
    major: int,
    obstacle: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (major, 0))
    case = PromptCase(torch.device("cuda"), dtype, HeadSizes(32, 8, head_dim), (ALL_KEYS,))
    found = FlashAttention().find_obstacle(case, ALL_KEYS)
    assert found is None if obstacle is None else found is not None and obstacle in found


def test_flash_attention_is_known_by_its_distribution(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not by its module: other packages have a module of the name flash_attn."""
    info = tmp_path / "flash_attn_4-4.0.0b36.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: flash-attn-4\nVersion: 4.0.0b36\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert FlashAttention().version == "4.0.0b36"


def test_flash_attention_gets_the_arguments_of_its_interface(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Windows count the keys left of a query's own; keys are [1, R, Hkv, D] views of the gathered
    ones, queries of the step's."""
    import sys
    from types import ModuleType

    calls = list[dict[str, object]]()

    def flash_attn_func(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: object
    ) -> tuple[torch.Tensor, None]:
        calls.append(options)
        window = options["window_size"]
        assert isinstance(window, tuple)
        left = None if window[0] is None else window[0] + 1
        layer = AttentionLayer(TorchOps(), 1, 8, options["softmax_scale"], left, None)  # type: ignore[arg-type]
        return TorchGathered().attend(q[0], torch.cat((k, v)), layer, left)[None], None

    for name in ("flash_attn", "flash_attn.cute"):
        module = ModuleType(name)
        vars(module)["flash_attn_func"] = flash_attn_func
        monkeypatch.setitem(sys.modules, name, module)
    theirs = FlashAttention().open()
    q, context = torch.randn(40, 4, 8)[:, :2], torch.randn(2, 100, 1, 8)
    sinks = random_sinks(2, torch.float32)
    for window, cap, given in ((None, None, None), (33, None, None), (None, 30.0, sinks)):
        layer = AttentionLayer(TorchOps(), 1, 8, 0.3, window, None, logit_softcap=cap, sinks=given)
        out = theirs(q, context, layer, window)
        assert out.shape == q.shape
        if cap is None:
            torch.testing.assert_close(out, TorchGathered().attend(q, context, layer, window))
    expected = {"causal": True, "softmax_scale": 0.3, "pack_gqa": None}
    assert calls == [
        expected | {"window_size": (None, None), "softcap": 0.0, "learnable_sink": None},
        expected | {"window_size": (32, 0), "softcap": 0.0, "learnable_sink": None},
        expected | {"window_size": (None, None), "softcap": 30.0, "learnable_sink": sinks.values},
    ]
