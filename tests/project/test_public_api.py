"""The API page lists what the package exports, and the front door shows what it is for."""

import ast
import importlib
import inspect
import pathlib
import re
import subprocess
import sys

import pytest

import haliax_fp8


PACKAGE = pathlib.Path(haliax_fp8.__file__).parent
API = (PACKAGE.parent / "docs" / "api.md").read_text()
FRONT_DOOR = haliax_fp8.__all__


def exports(module):
    """What a module's `__init__.py` exports: `from .folder import name as name`."""
    tree = ast.parse((PACKAGE / module.replace(".", "/") / "__init__.py").read_text())
    nodes = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    return {alias.asname for node in nodes for alias in node.names if alias.asname}


def listed(path):
    """The names in a module's `__all__`; none without one."""
    nodes = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.Assign)]
    lists = [ast.literal_eval(node.value) for node in nodes if ast.unparse(node.targets[0]) == "__all__"]
    return set().union(*lists)


# Modules for tools, which the page documents as a whole, by name: all that list what is public in them.
FOR_TOOLS = {
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts): names
    for path in PACKAGE.rglob("[!_]*.py")
    if not any(part.startswith("_") for part in path.relative_to(PACKAGE).parts) and (names := listed(path))
}
# The page documents `ops` as a whole too, and what is experimental by its parts.
MODULES = sorted(set(dir(haliax_fp8)) - {*FRONT_DOOR, *FOR_TOOLS, "__version__", "ops", "experimental"})
MODULES += sorted(f"experimental.{name}" for name in exports("experimental"))
# With the modules themselves, whose docstrings stand above their names.
DOCUMENTED = re.findall(r"^::: haliax_fp8\.((?:\w+\.)*\w+)$", API, re.MULTILINE)
# Each name once: at the front door if it is there, else in its module; those of modules for tools there.
ELSEWHERE = set(FRONT_DOOR).union(*FOR_TOOLS.values())
PUBLIC = [*FRONT_DOOR, *sorted(f"{module}.{name}" for module in MODULES for name in exports(module) - ELSEWHERE)]
NAMES_FOR_TOOLS = sorted(f"{module}.{name}" for module, names in FOR_TOOLS.items() for name in names)


def test_the_api_page_lists_exactly_the_public_names():
    assert sorted(set(DOCUMENTED) - {*MODULES, "ops", "experimental"}) == sorted([*PUBLIC, *FOR_TOOLS])


@pytest.mark.parametrize("name", [*PUBLIC, *NAMES_FOR_TOOLS])
def test_public_names_exist_and_have_docstrings(name):
    module, _, last = name.rpartition(".")
    value = getattr(importlib.import_module(f"haliax_fp8.{module}".removesuffix(".")), last)
    assert not callable(value) or inspect.getdoc(value)


def test_a_star_import_takes_functions_and_classes_alone():
    namespace: dict[str, object] = {}
    exec("from haliax_fp8 import *", namespace)
    assert namespace.keys() - {"__builtins__"} == set(FRONT_DOOR)
    assert not any(inspect.ismodule(value) for name, value in namespace.items() if name != "__builtins__")


def test_modules_load_when_they_are_used():
    train = "import haliax_fp8 as fp8; fp8.fp8_linear_layers, fp8.TrainStep, fp8.calibrate, fp8.describe"
    code = (
        f"import sys; {train}; core = set(sys.modules); fp8.checkpoints.save; fp8.quantization_statistics;"
        "print(*sorted(core)); print(*sorted({*sys.modules} - core))"
    )
    run = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    core, later = (set(line.split()) for line in run.stdout.splitlines())
    subjects = {name for name in MODULES if f"haliax_fp8.{name}" in core}
    assert subjects == {"devices", "recipes", "layers", "memory", "training"}
    assert "matplotlib" not in core
    assert later >= {"haliax_fp8.checkpoints", "haliax_fp8.statistics"}
    with pytest.raises(AttributeError, match="no attribute 'checkpoint'"):
        haliax_fp8.checkpoint  # noqa: B018


@pytest.mark.parametrize("name", ["OverwriteWithGradient", "fp32_max_grad"])
def test_names_that_flax_and_haliax_have_are_at_the_front_door_too(name):
    assert getattr(haliax_fp8, name) is getattr(haliax_fp8.training, name)
