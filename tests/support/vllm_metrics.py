"""The metrics that vLLM defines: read from the syntax tree of its logger, and as they were when
vllm_metrics.json was made, in vLLM's environment:

    python -m tests.support.vllm_metrics
"""

import ast
import json
import re
from importlib.util import find_spec
from pathlib import Path

FILE = Path(__file__).with_suffix(".json")
KINDS = {"_gauge_cls": "gauge", "_counter_cls": "counter", "_histogram_cls": "histogram"}


def known():
    """Return {name: {"type": ..., "labels": [...]}} of the file, and of earlier versions."""
    held = json.loads(FILE.read_text())
    return held["metrics"], held["earlier"]


def defined():
    """Return the same of the vLLM that is installed. A label list that the source computes is
    empty."""
    spec = find_spec("vllm.v1.metrics.loggers")
    found = {}
    for node in ast.walk(ast.parse(Path(spec.origin).read_text())):
        kind = isinstance(node, ast.Call) and getattr(node.func, "attr", None)
        if kind not in KINDS:
            continue
        options = {each.arg: each.value for each in node.keywords}
        name = getattr(options["name"], "value", "vllm:cache_config_info")
        if KINDS[kind] == "counter":
            name += "_total"
        found[name] = {"type": KINDS[kind], "labels": sorted(set(_labels(options["labelnames"])))}
    return found | _of_drafts()


def _of_drafts():
    """Return those of speculative decoding: counters, whose names stand in a list."""
    found = {}
    spec = find_spec("vllm.v1.spec_decode.metrics")
    for node in ast.walk(ast.parse(Path(spec.origin).read_text())):
        name = getattr(node, "value", None) if isinstance(node, ast.Constant) else None
        if isinstance(name, str) and re.fullmatch(r"vllm:spec_decode_\w+", name):
            more = ["position"] if name.endswith("_per_pos") else []
            found[f"{name}_total"] = {"type": "counter", "labels": ["engine", "model_name", *more]}
    return found


def _labels(node):
    """Yield the labels of an expression such as `labelnames + ["reason"]`."""
    if isinstance(node, ast.Name) and node.id == "labelnames":
        yield from ("model_name", "engine")
    elif isinstance(node, ast.BinOp):
        yield from (*_labels(node.left), *_labels(node.right))
    elif isinstance(node, ast.List):
        for each in node.elts:  # self.labelname_max_lora: "max_lora"
            yield each.value if isinstance(each, ast.Constant) else _named(each)


def _named(node):
    if isinstance(node, ast.Attribute):
        return node.attr.removeprefix("labelname_")
    return ast.unparse(node)


if __name__ == "__main__":
    held = json.loads(FILE.read_text())
    FILE.write_text(json.dumps({**held, "metrics": defined()}, indent=1, sort_keys=True) + "\n")
