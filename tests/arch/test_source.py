"""Rules of the source that linters do not check, read off the packages' syntax trees."""

import ast
from pathlib import Path

import pytest

from rpc_schema import step
from worker_daemon.contracts import layer_ops

ROOT = Path(__file__).parents[2]
PACKAGES = ("model_hub", "rendezvous", "rpc_schema", "client", "worker_daemon", "worker_host")
MODULES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))

BANNED_IMPORTS = {"pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
BANNED_CALLS = {"eval", "exec", "compile", "__import__", "globals"}
BANNED_ATTRIBUTES = {
    "torch.load",
    "torch.save",
    "np.load",
    "numpy.load",
    "object.__setattr__",
    "dist.send_object_list",
    "dist.recv_object_list",
    "dist.broadcast_object_list",
    "dist.scatter_object_list",
    "dist.all_gather_object",
    "dist.gather_object",
}


@pytest.fixture(scope="module")
def trees() -> dict[str, ast.Module]:
    """The syntax trees of all modules, by path."""
    return {path.relative_to(ROOT).as_posix(): ast.parse(path.read_text()) for path in MODULES}


def dotted(node):
    """The name that an attribute expression spells, or None."""
    if isinstance(node, ast.Name):
        return node.id
    base = dotted(node.value) if isinstance(node, ast.Attribute) else None
    return base and f"{base}.{node.attr}"


def imported(tree):
    """Modules that a tree imports, anywhere in it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


def attributes(tree):
    return {dotted(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}


def called_names(tree):
    return {
        node.func.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }


def test_the_trees_are_those_of_the_three_packages(trees):
    assert len(trees) > 60
    assert {name.split("/")[0] for name in trees} == set(PACKAGES)


def test_no_module_can_run_or_unpickle_what_it_was_sent(trees):
    for name, tree in trees.items():
        assert not {module.split(".")[0] for module in imported(tree)} & BANNED_IMPORTS, name
        assert not called_names(tree) & BANNED_CALLS, name
        assert not attributes(tree) & BANNED_ATTRIBUTES, name


def test_every_module_says_what_it_is_in_a_few_lines(trees):
    for name, tree in trees.items():
        docstring = ast.get_docstring(tree)
        assert docstring, name
        assert name.endswith("errors.py") or len(docstring.splitlines()) <= 12, name


def test_the_environment_is_read_in_one_place(trees):
    readers = {n for n, t in trees.items() if attributes(t) & {"os.environ", "os.getenv"}}
    assert {n for n in readers if n.startswith("worker_daemon")} <= {"worker_daemon/settings.py"}


def test_process_groups_are_made_in_one_place(trees):
    makers = {"dist.new_group", "dist.init_process_group", "dist.new_subgroups"}
    assert {n for n, t in trees.items() if attributes(t) & makers} == {
        "worker_daemon/distributed/link.py"
    }


def test_a_group_is_a_facade(trees):
    """Weights, adapters and the like have classes of their own in worker_client/group/: see
    `WorkerGroup.__init__`."""
    body = trees["client/worker_client/worker_group.py"].body
    (facade,) = (each for each in body if getattr(each, "name", "") == "WorkerGroup")
    methods = [each.name for each in facade.body if isinstance(each, ast.FunctionDef)]
    assert len(methods) <= 25, methods


def test_no_name_from_the_wire_becomes_an_attribute(trees):
    """getattr with a computed name appears nowhere in the daemon, except for names derived from the
    table of operations."""
    for name, tree in trees.items():
        if name.startswith("worker_daemon"):
            computed = [
                node
                for node in ast.walk(tree)
                if isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name)
                and node.func.id in ("getattr", "setattr")
                and not isinstance(node.args[1], ast.Constant)
                and ast.unparse(node.args[1]) != "operation_name(request)"
            ]
            assert not computed, name


def test_no_two_test_files_share_a_name():
    """pytest takes those outside of packages for the same module."""
    names = [
        path.name
        for path in (ROOT / "tests").rglob("test_*.py")
        if not (path.parent / "__init__.py").exists()
    ]
    assert sorted(names) == sorted(set(names))


def test_the_devices_word_for_no_token_is_the_wires():
    """Two definitions, since neither package may import the other."""
    assert layer_ops.NO_TOKEN == step.NO_TOKEN
