"""The page of the API lists what the package exports, and nothing else is public."""

import ast
import functools
import importlib
import pathlib
import re

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


def test_nothing_else_is_public():
    bound = {name for name in vars(haliax_fp8) if not name.startswith("_")}
    # The import hook of `conftest.py` binds the second.
    assert bound - {"jaxtyping", *APART} == set(FRONT_DOOR)


def test_api_page_lists_exactly_the_public_names():
    # The preflight exports it too, as the type of a field of its devices.
    listed = [name for name in DOCUMENTED if not name.startswith("preflight.")]
    assert sorted(listed) == sorted(set(PUBLIC) - {"devices.Peaks"})


def test_api_page_lists_exactly_the_public_names_of_the_preflight():
    listed = re.findall(r"^::: haliax_fp8\.preflight\.(\w+)$", API, re.MULTILINE)
    assert sorted(listed) == sorted(exports(PACKAGE / "preflight" / "__init__.py"))


def test_modules_hold_the_same_names():
    """All at the front door but the two ops and their state is also in the module of its subject, the same object."""
    names = [name.partition(".")[2] for name in IN_MODULES]
    assert len(names) == len(set(names))
    alone = {"Fp8DotGeneral", "Fp8Einsum", "OverwriteWithGradient", "fp32_max_grad"}
    assert set(FRONT_DOOR) - set(names) - {*SUBJECTS, "demo", "preflight", "ops"} == alone
    for name in IN_MODULES:
        if (short := name.partition(".")[2]) in FRONT_DOOR:
            assert value_of(short) is value_of(name)
