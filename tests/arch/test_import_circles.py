"""No import circle between the packages' modules, and no late import without a reason that is
written down here. Read from the syntax trees."""

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal, NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = (
    "model_hub",
    "rendezvous",
    "rpc_schema",
    "client/worker_client",
    "worker_daemon",
    "worker_host",
)

TRITON = "Triton takes long to import, and a daemon on the CPU does without"
TORCH = "torch takes seconds to import, for which no command and no socket should wait"

LATE_IMPORTS = {
    ("worker_client.cli.serve", "worker_client.service.server"): "imports FastAPI and uvicorn",
    (
        "worker_daemon.__main__",
        "worker_daemon.cli",
    ): "the first process of a container needs none of it",
    ("worker_daemon.cli", "worker_daemon.plan.plan_report"): TORCH,
    ("worker_daemon.cli", "worker_daemon.plan.planning"): TORCH,
    ("worker_daemon.cli", "worker_daemon.server.assembly"): "the extra `worker` is asked for first",
    ("worker_daemon.server.assembly", "worker_daemon.device.init"): TORCH,
    ("worker_daemon.server.assembly", "worker_daemon.distributed.rendezvous"): TORCH,
    ("worker_daemon.server.assembly", "worker_daemon.runner.connectors.file_traffic"): TORCH,
    ("worker_daemon.server.assembly", "worker_daemon.worker.worker"): TORCH,
    (
        "worker_daemon.server.daemon",
        "worker_daemon.server.metrics.rendered",
    ): "prometheus-client, for daemons with --metrics-listen alone",
    ("worker_daemon.backend", "worker_daemon.kernels.paged_attention"): TRITON,
    ("worker_daemon.backend", "worker_daemon.kernels.gathered_prefill"): TRITON,
    ("worker_daemon.backend", "worker_daemon.kernels.launch"): TRITON,
    ("worker_daemon.backend", "worker_daemon.kernels.moved_blocks"): TRITON,
    ("worker_daemon.backend", "worker_daemon.kernels.ops"): TRITON,
    ("worker_daemon.backend", "worker_daemon.kernels.peer_exchange"): TRITON,
    ("worker_daemon.backend", "worker_daemon.kernels.peer_reduce"): TRITON,
    ("worker_daemon.backend", "worker_daemon.kernels.row_ops"): TRITON,
    ("worker_daemon.backend", "worker_daemon.kernels.sampling"): TRITON,
    ("worker_daemon.backend", "worker_daemon.kernels.text_lookup"): TRITON,
    ("worker_daemon.runner.staging", "worker_daemon.kernels.step_buffers"): TRITON,
    ("worker_daemon.worker.serving", "worker_daemon.kernels.compile_ahead"): TRITON,
    ("worker_daemon.worker.serving", "worker_daemon.kernels.triton_hash"): TRITON,
    ("worker_daemon.server.assembly", "worker_daemon.kernels.triton_hash"): TRITON,
    ("worker_daemon.device.cuda_pages", "cuda.bindings"): "for GPUs with sleep mode alone",
    ("worker_daemon.device.nvml", "pynvml"): "for GPUs alone",
    ("worker_daemon.models.tensorized", "tensorizer"): "an extra that few install",
    ("worker_daemon.layers.prompt_providers", "flash_attn.cute"): "an extra that few install",
    ("worker_daemon.layers.encoder", "torch.nn.attention.varlen"): "for encoders on GPUs: compiler",
}
"""(importer, imported): the reason for the late import."""

When = Literal["at load", "late", "for types"]


class Import(NamedTuple):
    """One import statement's module, and when it runs: with its own module, in a function, or for
    type checkers alone."""

    importer: str
    imported: str
    when: When


def modules_below(root: Path) -> dict[str, ast.Module]:
    """Return the syntax trees of a package's modules by dotted name."""
    found = {}
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root.parent).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name] = ast.parse(path.read_text())
    return found


def imports_of(trees: dict[str, ast.Module]) -> set[Import]:
    def walk(importer: str, node: ast.AST, when: When) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            yield from (Import(importer, alias.name, when) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.module and not node.level, f"{importer}: a relative import"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield Import(importer, inner if inner in trees else node.module, when)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for child in node.body:
                yield from walk(importer, child, "for types")
            for child in node.orelse:
                yield from walk(importer, child, when)
            return
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            when = "late"
        for child in ast.iter_child_nodes(node):
            yield from walk(importer, child, when)

    return {found for name, tree in trees.items() for found in walk(name, tree, "at load")}


def circles(imports: Iterable[Import]) -> list[tuple[str, ...]]:
    """Return each import circle once: the modules that reach themselves."""
    direct: dict[str, set[str]] = {}
    for importer, imported, _ in imports:
        direct.setdefault(importer, set()).add(imported)

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        waiting = [start]
        while waiting:
            new = direct.get(waiting.pop(), set()) - seen
            seen |= new
            waiting += new
        return seen

    reach = {name: reached(name) for name in direct}
    return sorted(
        {
            tuple(sorted(other for other in reach[name] if name in reach.get(other, ())))
            for name in direct
            if name in reach[name]
        }
    )


@pytest.fixture(scope="module")
def imports() -> set[Import]:
    """All imports of the packages."""
    trees = {name: tree for root in PACKAGES for name, tree in modules_below(ROOT / root).items()}
    assert len(trees) > 250
    return imports_of(trees)


@pytest.mark.parametrize("also", [None, "late", "for types"])
def test_no_module_imports_itself_over_others(imports, also):
    assert circles(found for found in imports if found.when in ("at load", also)) == []


def test_every_late_import_has_a_reason(imports):
    late = {(found.importer, found.imported) for found in imports if found.when == "late"}
    assert late == LATE_IMPORTS.keys()


@pytest.mark.parametrize(
    ("statement", "when"),
    [
        ("from house import roof", "at load"),
        ("def open():\n    if True:\n        import house.roof", "late"),
        ("class Door:\n    def open(self):\n        from house.roof import Roof", "late"),
        ("if TYPE_CHECKING:\n    from house.roof import Roof", "for types"),
        ("def open():\n    if TYPE_CHECKING:\n        import house.roof", "for types"),
    ],
)
def test_circles_are_found_however_they_are_closed(tmp_path, statement, when):
    house = tmp_path / "house"
    house.mkdir()
    (house / "__init__.py").touch()
    (house / "roof.py").write_text("import os\nfrom house.wall import Wall")
    (house / "wall.py").write_text("from house.door import Door")
    (house / "door.py").write_text(statement)
    imports = imports_of(modules_below(house))
    assert Import("house.door", "house.roof", when) in imports
    assert circles(imports) == [("house.door", "house.roof", "house.wall")]
    assert bool(circles(found for found in imports if found.when == "at load")) == (
        when == "at load"
    )
