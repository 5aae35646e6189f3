"""The layout of the package: which module may import which, and what a file may be. A new module needs a place here."""

import ast
import importlib
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import haliax_fp8


ROOT = Path(haliax_fp8.__file__).parent

# A module (a file, or a folder as a whole) may import modules of the lines above its own, never one of its own line.
# So the numerics can be read without the layers, and training, calibration and the rest never need each other.
LAYERS = (
    ("_require",),
    (
        "_formats",
        "_rotation",
        "_state",
        "_dimension_numbers",
        "_opaque",
        "_mesh_axes",
        "_op_arguments",
        "_targets",
        "_kernel_residual",
        "_checkpoint",
        "_peaks",
        "_xla_flags",
    ),
    ("_quantized_array", "_rounding", "_device", "_roofline", "_ways"),
    ("_scaling", "_scaled_product", "preflight"),
    ("_contraction",),
    ("_recipe", "_ragged", "_members", "ops"),
    ("_product_spec", "_overwrite", "_presets", "_layer_work", "_compiler_options"),
    ("_measures", "_next_state", "_operands", "_prediction", "_records"),
    ("_products",),
    ("_mapped_tangent",),
    ("_dot_general", "_support"),
    ("_op", "_compressed", "_merge"),
    ("_own_state",),
    ("_layers", "_einsum", "_keys", "_rematerialized", "_loss", "_uncalibrated"),
    ("_where_pays", "_walk"),
    ("_transform", "_training"),
    ("_exact_gradients",),
    ("_describe", "_calibrate", "_statistics", "_fused_projections"),
    ("_train_step", "_fuse"),
    ("_command_line",),
    ("__init__", "__main__"),
)
RANK = {module: rank for rank, line in enumerate(LAYERS) for module in line}

# Up to and with the product: to be read and tested without Haliax and Equinox's layers.
WITHOUT_HALIAX = {module for line in LAYERS[: RANK["_dot_general"] + 1] for module in line} - {"_overwrite", "_records"}

MAX_LINES = 330


def files() -> list[Path]:
    return sorted(ROOT.rglob("*.py"))


def module_of(path: Path) -> str:
    """The file, or the folder that it is in, as the table above names it."""
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), filename=str(path))


def imports(path: Path) -> Iterator[str]:
    """The full names of all that a file imports, anywhere in it; relative ones resolved."""
    package = ["haliax_fp8", *path.relative_to(ROOT).parts[:-1]]
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            base = [*base, *(node.module.split(".") if node.module else [])]
            yield from (".".join([*base, alias.name]) for alias in node.names)


def inner_imports(path: Path) -> set[str]:
    """The modules of the package that a file imports, as the table names them."""
    names = {tuple(name.split(".")) for name in imports(path)}
    found = set()
    for name in names:
        if name[0] == "haliax_fp8":
            # `from haliax_fp8 import x` asks for the whole package, unless x is a module.
            found.add(name[1] if len(name) > 1 and name[1] in RANK else "__init__")
    return found


over_files = pytest.mark.parametrize("path", files(), ids=lambda path: str(path.relative_to(ROOT)))


def test_every_module_has_a_place():
    found = {module_of(path) for path in files()}
    assert found == set(RANK), "a new module: decide what it may import, and give it a line in LAYERS"
    assert sum(map(len, LAYERS)) == len(RANK), "a module has two lines in LAYERS"


@over_files
def test_imports_go_up_the_table(path):
    module = module_of(path)
    for imported in inner_imports(path) - {module}:
        assert RANK[imported] < RANK[module], f"{path.name} imports {imported}, which does not stand above {module}"


def test_this_file_sees_imports():
    """The reader of imports, on what it has to find."""
    assert {"_op", "_recipe", "_layers"} <= inner_imports(ROOT / "_layers" / "_haliax.py")
    assert {"_layers", "_targets"} <= inner_imports(ROOT / "_walk.py")
    assert {"_formats", "_state"} == inner_imports(ROOT / "ops" / "_arguments.py")
    assert "haliax.quantization.CustomGradientAccumulation" in set(imports(ROOT / "_overwrite.py"))
    assert any(name.startswith("jax._src") for name in imports(ROOT / "_state.py"))


@over_files
def test_numerics_do_not_need_haliax(path):
    if module_of(path) in WITHOUT_HALIAX:
        assert not [name for name in imports(path) if name.split(".")[0] == "haliax"]


@over_files
def test_only_state_imports_the_internals_of_jax(path):
    internals = [name for name in imports(path) if name.startswith(("jax._src", "jaxlib"))]
    assert not internals or path.name == "_state.py"


@over_files
def test_only_what_is_declared_is_imported(path):
    """The dependencies of `pyproject.toml`, and what they bring: no peer, no test library."""
    declared = {"jax", "equinox", "haliax", "jaxtyping", "numpy", "optax", "rich", "wadler_lindig", "haliax_fp8"}
    assert {name.split(".")[0] for name in imports(path)} <= declared | sys.stdlib_module_names


@over_files
def test_files_are_short(path):
    assert len(path.read_text().splitlines()) <= MAX_LINES


def test_names_of_files():
    """Every file is private, but for what users import as a module; none is a drawer for the rest."""
    names = {path.stem for path in files()}
    assert all(name.startswith("_") for name in names)
    assert not {name.strip("_") for name in names} & {"utils", "util", "helpers", "common", "misc"}


def definitions(node: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.AST]]:
    """Public classes and functions, and the public methods of public classes."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and not child.name.startswith("_"):
            yield prefix + child.name, child
            if isinstance(child, ast.ClassDef):
                yield from definitions(child, f"{child.name}.")


@over_files
def test_docstrings(path):
    tree = tree_of(path)
    assert ast.get_docstring(tree), "the file"
    missing = [name for name, node in definitions(tree) if not ast.get_docstring(node)]
    assert not missing


def classes() -> list[type]:
    """Every class that the package defines."""
    found = []
    for path in files():
        name = ".".join(["haliax_fp8", *path.relative_to(ROOT).with_suffix("").parts]).removesuffix(".__init__")
        module = importlib.import_module(name)
        found += [value for value in vars(module).values() if inspect.isclass(value) and value.__module__ == name]
    return found


@pytest.mark.parametrize("cls", classes(), ids=lambda cls: cls.__name__)
def test_classes_are_abstract_or_final(cls):
    """No class inherits the code of a concrete one: what a method does is read in one place."""
    ours = [base for base in cls.__mro__[1:] if base.__module__.startswith("haliax_fp8")]
    assert all(map(inspect.isabstract, ours))
