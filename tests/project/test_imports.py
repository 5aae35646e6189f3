"""Every name that a file imports from the package is there: also in files that the tests on this machine do not run."""

import ast
import importlib
import importlib.util
import pathlib
from collections.abc import Iterator


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
        try:
            module = importlib.import_module(node.module or "")
        except ModuleNotFoundError:
            yield node.module or ""
            continue
        for name in (alias.name for alias in node.names):
            if not hasattr(module, name) and importlib.util.find_spec(f"{node.module}.{name}") is None:
                yield f"{node.module}.{name}"


def test_imported_names_are_there():
    """Also in benchmarks and examples, which no other test runs."""
    found = {file: list(missing((ROOT / file).read_text())) for file in FILES}
    assert not {file: names for file, names in found.items() if names}


def test_this_file_sees_missing_names():
    code = "def f():\n    from haliax_fp8.preflight import inspect_step, targets\n    from haliax_fp8.no import name"
    assert list(missing(code)) == ["haliax_fp8.preflight.targets", "haliax_fp8.no"]
