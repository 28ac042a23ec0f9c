"""The committed plots show the committed data: by the stamp of their data, and, where matplotlib
is installed, byte for byte."""

import importlib.util
import json
import re
import shutil

import msgspec
import pytest

from benchmarks.plot_data import DOCS, IMAGES, TIMELINES, read_plot_data, stamp_of

THEMES = ("light", "dark")
DRAWN_BY = re.compile(r"<dc:description>([0-9a-f]{16})</dc:description>")
REDRAW = "run: python -m benchmarks.plots"


@pytest.fixture
def docs(tmp_path):
    """A copy of the data that may be changed."""
    for name in ("performance.json", "plots.json", *TIMELINES.values()):
        if (DOCS / name).exists():
            shutil.copy(DOCS / name, tmp_path)
    return tmp_path


def stamps(data):
    return {name: stamp_of(shown) for name, shown in data._asdict().items() if shown}


def test_each_plot_is_of_the_present_data():
    expected = {
        f"{name}-{theme}.svg": stamp
        for name, stamp in stamps(read_plot_data()).items()
        for theme in THEMES
    }
    drawn = {
        path.name: path.read_text() for theme in THEMES for path in IMAGES.glob(f"*-{theme}.svg")
    }
    found = {name: DRAWN_BY.findall(text) for name, text in drawn.items()}
    assert found == {name: [stamp] for name, stamp in expected.items()}, REDRAW


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="needs the extra plots")
def test_each_plot_is_what_the_program_draws():
    from benchmarks.plots import drawn

    for name, text in drawn(read_plot_data()):
        assert (IMAGES / name).read_text() == text, f"{name}; {REDRAW}"


def test_a_new_figure_changes_the_stamps_of_the_plots_that_show_it(docs):
    before = stamps(read_plot_data(docs))
    path = docs / "performance.json"
    records = json.loads(path.read_text())
    for record in records:
        if record["part"] == "e2e qwen3-0.6b 1x1" and record["name"] == "decode_bs64":
            record["value"] += 1.0
        if record["part"] == "startup llama-8b 1x1 cold" and record["device"] == "NVIDIA H200":
            record["value"] += 1.0
        if record["part"].startswith("sleep"):
            record["value"] += 1.0
    path.write_text(json.dumps(records))
    after = stamps(read_plot_data(docs))
    changed = {name for name, stamp in before.items() if after[name] != stamp}
    assert changed == {"throughput", "recovery"}


def test_sources_with_a_wrong_field_are_refused(docs):
    path = docs / "plots.json"
    sources = json.loads(path.read_text())
    sources["beside_vllm_0_26"]["seconds"]["Llama 8B, FP8"]["4 x 30,000 in, 64 out"] = [3.72]
    path.write_text(json.dumps(sources))
    with pytest.raises(msgspec.ValidationError, match="length 2"):
        read_plot_data(docs)


def test_figures_of_others_name_their_source_date_and_device():
    for section in json.loads((DOCS / "plots.json").read_text()).values():
        assert section["source"] and section["device"]
        assert re.search(r"2026-\d\d-\d\d", section["date"])
