"""Every name that a file imports from the package is there: also in files that the tests on this machine do not run."""

import ast
import importlib
import importlib.util
import pathlib
from collections.abc import Iterator

import pytest


ROOT = pathlib.Path(__file__).parents[2]
FILES = sorted(
    path.relative_to(ROOT).as_posix()
    for folder in ("haliax_fp8", "tests", "benchmarks", "examples", "docs")
    for path in (ROOT / folder).rglob("*.py")
)


def missing(code: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(code)):
        if not isinstance(node, ast.ImportFrom) or node.level or not (node.module or "").startswith("haliax_fp8"):
            continue
        module = importlib.import_module(node.module or "")
        for name in (alias.name for alias in node.names):
            if not hasattr(module, name) and importlib.util.find_spec(f"{node.module}.{name}") is None:
                yield f"{node.module}.{name}"


@pytest.mark.parametrize("file", FILES)
def test_imported_names_are_there(file):
    assert not list(missing((ROOT / file).read_text()))


def test_this_file_sees_missing_names():
    assert list(missing("def f():\n    from haliax_fp8.preflight import inspect_step, targets")) == [
        "haliax_fp8.preflight.targets"
    ]
