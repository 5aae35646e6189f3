"""Every public name has a docstring and an entry in the documentation."""

import ast
import functools
import importlib
import inspect
import pathlib
import re
import types

import pytest

import haliax_fp8


PACKAGE = pathlib.Path(haliax_fp8.__file__).parent
API = (PACKAGE.parent / "docs" / "api.md").read_text()
DOCUMENTED = re.findall(r"^::: haliax_fp8\.((?:\w+\.)?\w+)$", API, re.MULTILINE)
# The modules whose names are documented one by one.
SUBJECTS = (
    "attention",
    "devices",
    "recipes",
    "layers",
    "training",
    "statistics",
    "memory",
    "sharding",
    "checkpoints",
    "serving",
    "plots",
)
# Of them, what needs more than `import haliax_fp8`: an import of its own, and the packages of an extra.
APART = ("plots",)


def exports(path):
    """What an `__init__.py` exports: `from .folder import name as name`."""
    tree = ast.parse(path.read_text())
    return {alias.asname for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names}


FRONT_DOOR = sorted(exports(PACKAGE / "__init__.py"))
IN_MODULES = {f"{subject}.{name}" for subject in SUBJECTS for name in exports(PACKAGE / subject / "__init__.py")}
# Each name once: at the front door if it is there, else in its module.
PUBLIC = [*FRONT_DOOR, *sorted(name for name in IN_MODULES if name.partition(".")[2] not in FRONT_DOOR)]


def value_of(name):
    if (subject := name.partition(".")[0]) in APART:
        importlib.import_module(f"haliax_fp8.{subject}")
    return functools.reduce(getattr, name.split("."), haliax_fp8)


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
    assert bound - {"jaxtyping", *APART} == set(FRONT_DOOR)


def test_the_front_door_is_small():
    """Names that nearly every program needs, and modules; `docs/api.md` has the rest."""
    names = [name for name in FRONT_DOOR if not isinstance(value_of(name), types.ModuleType)]
    assert len(names) <= 25


@pytest.mark.parametrize("name", PUBLIC)
def test_name_has_a_docstring(name):
    value = value_of(name)
    if inspect.isclass(value) or inspect.isroutine(value) or isinstance(value, types.ModuleType):
        assert has_own_docstring(value)
    else:
        assert name.rpartition(".")[2] in set(documented_values())


@pytest.mark.parametrize("name", [name for name in PUBLIC if inspect.isclass(value_of(name))])
def test_public_members_have_docstrings(name):
    members = vars(value_of(name)).items()
    ours = {key: value for key, value in members if not key.startswith("_")}
    functions = {
        key: inspect.unwrap(getattr(value, "fget", getattr(value, "__func__", value))) for key, value in ours.items()
    }
    missing = [key for key, value in functions.items() if inspect.isfunction(value) and not inspect.getdoc(value)]
    assert not missing


def test_api_page_lists_exactly_the_public_names():
    # The preflight exports it too, as the type of a field of its devices.
    listed = [name for name in DOCUMENTED if not name.startswith("preflight.")]
    assert sorted(listed) == sorted(set(PUBLIC) - {"devices.Peaks"})


def test_api_page_lists_exactly_the_public_names_of_the_preflight():
    listed = re.findall(r"^::: haliax_fp8\.preflight\.(\w+)$", API, re.MULTILINE)
    assert sorted(listed) == sorted(exports(PACKAGE / "preflight" / "__init__.py"))


def test_functions_of_the_low_level_module_have_docstrings():
    missing = [name for name in haliax_fp8.ops.__all__ if not getattr(haliax_fp8.ops, name).__doc__]
    assert not missing


def test_modules_hold_the_same_names():
    """All at the front door but the two ops and their state is also in the module of its subject, the same object."""
    names = [name.partition(".")[2] for name in IN_MODULES]
    assert len(names) == len(set(names))
    alone = {"Fp8DotGeneral", "Fp8Einsum", "OverwriteWithGradient", "fp32_max_grad"}
    assert set(FRONT_DOOR) - set(names) - {*SUBJECTS, "demo", "preflight", "ops"} == alone
    for name in IN_MODULES:
        if (short := name.partition(".")[2]) in FRONT_DOOR:
            assert value_of(short) is value_of(name)
