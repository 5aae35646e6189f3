"""Every public name has a docstring and a place in the documentation."""

import ast
import importlib
import inspect
import pathlib
import re
import types

import pytest

import haliax_fp8


PACKAGE = pathlib.Path(haliax_fp8.__file__).parent
API = (PACKAGE.parent / "docs" / "api.md").read_text()
DOCUMENTED = re.findall(r"^::: haliax_fp8\.(\w+)$", API, re.MULTILINE)


def exported_names():
    """What `__init__.py` exports: `from .folder import name as name`."""
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    return {alias.asname for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names}


PUBLIC = sorted(exported_names())


def documented_values():
    """Names of module-level values that a string stands behind, as mkdocstrings reads it."""
    for path in PACKAGE.rglob("*.py"):
        body = ast.parse(path.read_text()).body
        for node, following in zip(body, body[1:], strict=False):
            target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
            text = following.value if isinstance(following, ast.Expr) else None
            if isinstance(target, ast.Name) and isinstance(text, ast.Constant) and isinstance(text.value, str):
                yield target.id


def has_own_docstring(value):
    """Whether a class or function has a docstring of its own: not its parent's, not the one `dataclass` writes."""
    doc = vars(value).get("__doc__") if inspect.isclass(value) else inspect.getdoc(value)
    return bool(doc) and not doc.startswith(f"{value.__name__}(")


def test_nothing_else_is_public():
    bound = {name for name in vars(haliax_fp8) if not name.startswith("_")}
    # The import hook of `conftest.py` binds the second.
    assert bound - {"jaxtyping"} == set(PUBLIC)


@pytest.mark.parametrize("name", PUBLIC)
def test_name_has_a_docstring(name):
    value = getattr(haliax_fp8, name)
    if inspect.isclass(value) or inspect.isroutine(value) or isinstance(value, types.ModuleType):
        assert has_own_docstring(value)
    else:
        assert name in set(documented_values())


@pytest.mark.parametrize("name", [name for name in PUBLIC if inspect.isclass(getattr(haliax_fp8, name))])
def test_public_members_have_docstrings(name):
    members = vars(getattr(haliax_fp8, name)).items()
    ours = {key: value for key, value in members if not key.startswith("_")}
    functions = {
        key: inspect.unwrap(getattr(value, "fget", getattr(value, "__func__", value))) for key, value in ours.items()
    }
    missing = [key for key, value in functions.items() if inspect.isfunction(value) and not inspect.getdoc(value)]
    assert not missing


def test_api_page_lists_exactly_the_public_names():
    assert sorted(DOCUMENTED) == PUBLIC


def test_api_page_lists_exactly_the_public_names_of_the_preflight():
    listed = re.findall(r"^::: haliax_fp8\.preflight\.(\w+)$", API, re.MULTILINE)
    tree = ast.parse((PACKAGE / "preflight" / "__init__.py").read_text())
    exported = {alias.asname for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert sorted(listed) == sorted(exported)


def test_functions_of_the_low_level_module_have_docstrings():
    missing = [name for name in haliax_fp8.ops.__all__ if not getattr(haliax_fp8.ops, name).__doc__]
    assert not missing


def exports_of(module):
    """The names that a public module exports."""
    tree = ast.parse(pathlib.Path(module.__file__).read_text())
    return {alias.asname for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names}


def test_modules_hold_the_same_names():
    """Everything but the two ops and their state is also in one module for its subject, as the same object."""
    subjects = ("devices", "recipes", "layers", "training", "statistics", "memory")
    # Not as an attribute: `haliax_fp8.recipes` is the dictionary.
    modules = {name: importlib.import_module(f"haliax_fp8.{name}") for name in subjects}
    found = [name for module in modules.values() for name in sorted(exports_of(module))]
    assert len(found) == len(set(found))
    # The preflight exports it too, as the type of a field of its targets.
    assert set(found) - set(PUBLIC) == {"Peaks"}
    alone = {"Fp8DotGeneral", "Fp8Einsum", "OverwriteWithGradient", "OpState", "fp32_max_grad"}
    assert set(PUBLIC) - set(found) - {*subjects, "demo", "preflight", "ops"} == alone
    for name in set(found) - {"Peaks"}:
        assert all(
            getattr(haliax_fp8, name) is vars(module)[name] for module in modules.values() if name in vars(module)
        )
