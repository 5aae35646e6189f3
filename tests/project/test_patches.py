"""No test changes the package or the examples: a fault is real, or comes in by an argument."""

import ast
import pathlib
from collections.abc import Iterator

import pytest


TESTS = pathlib.Path(__file__).parents[1]
OURS = {"haliax_fp8", "examples"}
# Of pytest's `monkeypatch` and of `unittest.mock`, and Python's own. What they change comes first.
PATCHES = {"setattr", "delattr", "setitem", "delitem", "patch"}
OF_PATCH = {"object", "multiple", "dict"}


def changed(source: str) -> Iterator[tuple[int, str]]:
    """The line and the name of what a file changes, unless that is known to be another library's.

    Known is a text such as "os.fsync", and a name that begins with one that is imported, such as `sys.prefix`. Of a
    variable nobody knows what it holds, nor of what a call returns.
    """
    tree = ast.parse(source)
    modules: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {alias.asname or alias.name.partition(".")[0]: alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            modules |= {alias.asname or alias.name: node.module or "" for alias in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and _is_patch(node.func):
            target = node.args[0] if node.args else node.keywords[0].value
            if _package(target, modules) in OURS | {None}:
                yield node.lineno, ast.unparse(target)
        elif isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign | ast.Delete):
            targets = node.targets if isinstance(node, ast.Assign | ast.Delete) else [node.target]
            for target in targets:
                if isinstance(target, ast.Attribute) and _package(target, modules) in OURS:
                    yield node.lineno, ast.unparse(target)


def _name(function: ast.expr) -> str | None:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", None)


def _is_patch(function: ast.expr) -> bool:
    of_patch = isinstance(function, ast.Attribute) and function.attr in OF_PATCH and _name(function.value) == "patch"
    return of_patch or _name(function) in PATCHES


def _package(target: ast.expr, modules: dict[str, str]) -> str | None:
    """The package of what is changed; None if nobody knows."""
    if isinstance(target, ast.Constant):
        return str(target.value).partition(".")[0]
    while isinstance(target, ast.Attribute):
        target = target.value
    if isinstance(target, ast.Name) and target.id in modules:
        return modules[target.id].partition(".")[0]
    return None


@pytest.mark.parametrize("path", sorted(TESTS.rglob("*.py")), ids=lambda path: str(path.relative_to(TESTS)))
def test_no_file_changes_what_it_tests(path):
    assert list(changed(path.read_text())) == []


@pytest.mark.parametrize(
    "line, name",
    [
        ("patch.setattr(train, 'step', None)", "train"),
        ("monkeypatch.setattr(checkpoint.os, 'fsync', None)", "checkpoint.os"),
        ("monkeypatch.setattr('haliax_fp8.checkpoints.layouts.ignore._SECONDS', 0.5)", "'haliax_fp8.checkpoints"),
        ("monkeypatch.setattr(type(compilable_devices['h100']), 'missing', None)", "type(compilable_devices"),
        ("monkeypatch.delattr(fp8.recipes, 'named')", "fp8.recipes"),
        ("setattr(local, 'field', None)", "local"),
        ("mock.patch.object(train, 'step')", "train"),
        ("monkeypatch.setitem(compilable_devices, 'h100', None)", "compilable_devices"),
        ("mock.patch.dict(compilable_devices, h100=None)", "compilable_devices"),
        ("mock.patch('examples.train_vit.train.train')", "'examples"),
        ("patch(target='examples.train_vit.train.train')", "'examples"),
        ("train.step = None", "train.step"),
        ("del fp8.recipes.named", "fp8.recipes.named"),
        ("monkeypatch.setattr(sys, 'prefix', None)", None),
        ("monkeypatch.setattr(importlib.util, 'find_spec', None)", None),
        ("monkeypatch.setattr('os.fsync', None)", None),
        ("monkeypatch.setitem(sys.modules, 'libtpu', None)", None),
        ("sys.stdout = None", None),
    ],
)
def test_what_counts_as_a_change(line, name):
    imports = [
        "import importlib.util, sys",
        "import haliax_fp8 as fp8",
        "from unittest import mock",
        "from examples.train_lm import checkpoint, train",
        "from haliax_fp8.preflight import compilable_devices",
    ]
    found = list(changed("\n".join([*imports, "def test(monkeypatch, local):", f"    {line}"])))
    assert [(at, what.startswith(name or "?")) for at, what in found] == ([] if name is None else [(7, True)])
