"""The layout of the package: which folder may import which, and what a file may be. A new folder needs a row here."""

import ast
import graphlib
import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import haliax_fp8


ROOT = Path(haliax_fp8.__file__).parent
REPOSITORY = ROOT.parent

# A folder (or a file beside the folders) may import those of the lines above its own, never one of its own line.
# Folders whose names begin with an underscore are private.
FLOORS = (
    # The ground: JAX extended; numbers, printed tables.
    ("_jax",),
    ("_numerics", "_printing"),
    ("devices",),
    # What becomes of a number: formats, scalings, recipes.
    ("recipes",),
    # What is remembered from step to step.
    ("_state",),
    # One product and its derivative.
    ("_product",),
    # What an op keeps of the conversion that made it.
    ("_unconverted",),
    # The public ops.
    ("_op", "attention"),
    # Models; and proof before purchase, which needs no model.
    ("_einsum", "layers", "preflight", "demo"),
    # The loop.
    ("training", "memory", "sharding", "ops"),
    # What became of its numbers; the model for inference.
    ("statistics", "serving"),
    # Models on disk, those for inference too; pictures.
    ("checkpoints", "plots"),
    ("_cli",),
    ("__init__", "__main__"),
)
FLOOR = {room: floor for floor, line in enumerate(FLOORS) for room in line}

# Up to and with the product: to be read and tested without Haliax, but for what its marker type needs.
WITHOUT_HALIAX = {room for line in FLOORS[: FLOOR["_product"] + 1] for room in line}
WITH_THE_MARKER = {"_state/marker.py", "_state/op_state.py", "_state/all_records.py", "_state/require.py"}

# The preflight reads any program, also of other packages: it knows devices, not recipes or layers. Of the product it
# knows the names that traced programs carry.
OF_THE_PREFLIGHT = {"devices", "_jax", "_numerics", "_printing", "_product"}
NAMES_OF_THE_PRODUCT = {"names"}

# What XLA is told with, of `jax.lax`.
TO_XLA = {"optimization_barrier", "platform_dependent"}

# What comes with an extra, by the folder that needs it; `import haliax_fp8` does without that folder.
EXTRAS = {"plots": {"matplotlib"}}

MAX_LINES = 330

# Folders of tests that are of no folder of the package, and what their tests are of.
OTHER_TESTS = {
    "command_line",  # `_cli`, and the models of `demo`
    "examples",  # the examples
    "hardware",  # what needs an accelerator: a script
    "mutations",  # wrong changes that tests notice: no tests
    "others",  # scripts for environments with other libraries
    "pages",  # the built site, in a browser
    "peers",  # models and tests of other packages
    "programs",  # what needs XLA's compilers for accelerators
    "project",  # the repository
    "reference",  # independent models: no tests
    "shared",  # helpers: no tests
}


def files() -> list[Path]:
    return sorted(ROOT.rglob("*.py"))


def folders() -> list[Path]:
    """The package's folder and every one in it that holds Python files."""
    return sorted({path.parent for path in files()})


def room_of(path: Path) -> str:
    """The folder that a file is in, or the file beside the folders, as the table above names it."""
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def module_of(path: Path) -> str:
    """The full name of a file's or folder's module."""
    return ".".join(["haliax_fp8", *path.relative_to(ROOT).with_suffix("").parts]).removesuffix(".__init__")


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


def imported_from(path: Path, folder: Path) -> set[str]:
    """What a file imports of a folder: the files and folders in it, `__init__` for names of the folder itself."""
    inside = module_of(folder).split(".") if folder != ROOT else ["haliax_fp8"]
    found = set()
    for name in (name.split(".") for name in imports(path)):
        if name[: len(inside)] == inside:
            rest = name[len(inside) :]
            is_module = bool(rest) and ((folder / rest[0]).is_dir() or (folder / f"{rest[0]}.py").is_file())
            found.add(rest[0] if is_module else "__init__")
    return found


over_files = pytest.mark.parametrize("path", files(), ids=lambda path: str(path.relative_to(ROOT)))
over_folders = pytest.mark.parametrize("folder", folders(), ids=lambda path: path.relative_to(ROOT.parent).as_posix())


def test_tests_mirror_the_package():
    """A test is in the folder that is named like the package's, without the underscore, or in one of a short list."""
    tests = Path(__file__).parents[1]
    mirrored = {room.strip("_") for room in FLOOR}
    assert not mirrored & OTHER_TESTS
    found = [path.relative_to(tests) for path in tests.rglob("*") if path.suffix == ".py"]
    assert [str(path) for path in found if len(path.parts) != 2] == ["conftest.py"]
    assert {path.parts[0] for path in found if len(path.parts) == 2} <= mirrored | OTHER_TESTS


def test_names_of_tests_are_unique():
    """pytest imports a file by its name alone, and `mutations/changes.py` names files so."""
    names = [path.name for path in Path(__file__).parents[1].rglob("test_*.py")]
    assert len(names) == len(set(names))


def test_every_folder_is_on_a_floor():
    found = {room_of(path) for path in files()}
    assert found == set(FLOOR), "a new folder: decide what it may import, and add it to FLOORS"
    assert sum(map(len, FLOORS)) == len(FLOOR), "a folder is twice in FLOORS"


@over_files
def test_imports_go_up_the_table(path):
    room = room_of(path)
    for imported in imported_from(path, ROOT) - {room}:
        assert FLOOR[imported] < FLOOR[room], f"{path.name} imports {imported}, which does not stand above {room}"


@over_folders
def test_no_circles_inside_a_folder(folder):
    """Its files, and its folders as a whole: no two of them need each other."""
    needs: dict[str, set[str]] = {}
    for path in folder.rglob("*.py"):
        child = path.relative_to(folder).parts[0].removesuffix(".py")
        needs.setdefault(child, set()).update(imported_from(path, folder) - {child})
    assert circle_in(needs) == []


def circle_in(needs: dict[str, set[str]]) -> list[str]:
    """The names along a circle, in the order of imports; none if there is no circle."""
    try:
        graphlib.TopologicalSorter(needs).prepare()
    except graphlib.CycleError as error:
        return list(reversed(error.args[1]))
    return []


def test_circles_are_found():
    assert circle_in({"a": {"b"}, "b": {"c"}, "c": set()}) == []
    assert set(circle_in({"a": {"b"}, "b": {"c"}, "c": {"a"}})) == {"a", "b", "c"}


def test_the_preflight_needs_no_recipes_and_no_layers():
    files = list((ROOT / "preflight").rglob("*.py"))
    needed = {room for path in files for room in imported_from(path, ROOT)}
    assert needed - {"preflight"} == OF_THE_PREFLIGHT
    of_the_product = {file for path in files for file in imported_from(path, ROOT / "_product")}
    assert of_the_product == NAMES_OF_THE_PRODUCT


def test_this_file_sees_imports():
    """The reader of imports, on what it has to find."""
    assert {"_op", "recipes", "layers"} <= imported_from(ROOT / "layers" / "kernel.py", ROOT)
    assert {"rule", "patterns"} <= imported_from(ROOT / "layers" / "walk.py", ROOT / "layers")
    assert {"_numerics", "_jax"} == imported_from(ROOT / "ops" / "arguments.py", ROOT)
    assert {"step", "compilable"} <= imported_from(ROOT / "preflight" / "__init__.py", ROOT / "preflight")
    assert "haliax.quantization.CustomGradientAccumulation" in set(imports(ROOT / "_state" / "marker.py"))
    assert any(name.startswith("jax._src") for name in imports(ROOT / "_jax" / "max_grad.py"))


@over_files
def test_numerics_do_not_need_haliax(path):
    if room_of(path) in WITHOUT_HALIAX and path.relative_to(ROOT).as_posix() not in WITH_THE_MARKER:
        assert not [name for name in imports(path) if name.split(".")[0] == "haliax"]


@over_files
def test_only_one_folder_imports_the_internals_of_jax(path):
    internals = [name for name in imports(path) if name.startswith(("jax._src", "jaxlib"))]
    assert not internals or room_of(path) == "_jax"


def switches_in(tree: ast.Module) -> list[ast.Call]:
    """Calls of `register_lowering` for one platform: by keyword (or `**`), or as the third argument."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    calls = [call for call in calls if ast.unparse(call.func).endswith("register_lowering")]
    return [x for x in calls if len(x.args) > 2 or not {k.arg for k in x.keywords}.isdisjoint({"platform", None})]


@over_files
def test_one_folder_talks_to_xla(path):
    """`_jax` has a function for each barrier and each switch between platforms, named after what it is for."""
    tree = tree_of(path)
    nodes = list(ast.walk(tree))
    used = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    used |= {alias.name for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert not (used & TO_XLA or switches_in(tree)) or room_of(path) == "_jax"


def test_this_file_sees_barriers_and_switches():
    used = {node.attr for node in ast.walk(tree_of(ROOT / "_jax" / "xla.py")) if isinstance(node, ast.Attribute)}
    assert used >= TO_XLA
    assert len(switches_in(tree_of(ROOT / "_jax" / "lowered_by_platform.py"))) == 1
    calls = "register_lowering(p, f)", "mlir.register_lowering(p, f, platform='cpu')", "register_lowering(p, f, 'cpu')"
    assert [bool(switches_in(ast.parse(call))) for call in calls] == [False, True, True]


@over_files
def test_only_what_is_declared_is_imported(path):
    """The dependencies of `pyproject.toml`, and what they bring: no peer, no test library."""
    declared = {
        "jax",
        "equinox",
        "haliax",
        "jaxtyping",
        "ml_dtypes",
        "numpy",
        "optax",
        "rich",
        "safetensors",
        "wadler_lindig",
        "haliax_fp8",
    }
    assert {name.split(".")[0] for name in imports(path)} <= declared | EXTRAS.get(
        room_of(path), set()
    ) | sys.stdlib_module_names


@over_files
def test_files_are_short(path):
    assert len(path.read_text().splitlines()) <= MAX_LINES


@over_files
def test_names_of_files(path):
    """Whether a file is private is said by its folder; none is a drawer for the rest."""
    is_special = path.stem in ("__init__", "__main__")
    assert is_special or path.stem.startswith("_") == (path.parent == ROOT)
    assert path.stem.strip("_") not in {"utils", "util", "helpers", "common", "misc"}


def test_public_folders_are_attributes_of_the_package():
    public = {path.name for path in folders() if path.parent == ROOT and not path.name.startswith("_")}
    assert public - set(EXTRAS) <= set(vars(haliax_fp8))


@over_folders
def test_no_file_has_the_name_of_an_export(folder):
    """Or `import folder.name` would give something else than the file."""
    for path in [*folder.glob("*.py"), *(child for child in folders() if child.parent == folder)]:
        name = module_of(path)
        if path.stem not in ("__init__", "__main__"):
            module = importlib.import_module(name)
            assert getattr(importlib.import_module(name.rpartition(".")[0]), path.stem) is module


def files_in_tables(text: str) -> set[str]:
    """The Python files that a page's tables name in backticks, some with a test's name after them."""
    rows = [line for line in text.splitlines() if line.startswith("|")]
    return {name for row in rows for name in re.findall(r"`([\w./]+\.py)(?:::\w+)?`", row)}


READMES = [
    path for top in (ROOT, REPOSITORY / "examples") for path in top.rglob("README.md") if "| file |" in path.read_text()
]
over_readmes = pytest.mark.parametrize("readme", READMES, ids=lambda path: path.relative_to(REPOSITORY).as_posix())


@over_readmes
def test_tables_of_readmes_name_every_file(readme):
    folder = readme.parent
    found = {path.relative_to(folder).as_posix() for path in folder.rglob("[a-z]*.py")}
    assert found - files_in_tables(readme.read_text()) == set()


@over_readmes
def test_files_in_tables_of_readmes_exist(readme):
    tops = readme.parent, ROOT, REPOSITORY
    named = files_in_tables(readme.read_text())
    assert [name for name in sorted(named) if not any((top / name).is_file() for top in tops)] == []


def test_this_file_sees_readmes():
    assert {f"haliax_fp8/{folder}" for folder in ("_jax", "_product", "_state")} <= {
        path.parent.relative_to(REPOSITORY).as_posix() for path in READMES
    }
    page = "`a.py`\n\n| `b.py`, `c/d.py` | `e.py::test_e` and `f` |\n"
    assert files_in_tables(page) == {"b.py", "c/d.py", "e.py"}


def test_the_readme_lists_the_folders_as_this_file_does():
    """In the same order: its table says that a folder imports only what stands above it."""
    _, _, table = (ROOT / "README.md").read_text().partition("| folder | what is there |\n|---|---|\n")
    first_cells = [re.match(r"\| `(\w+)(?:/|\.py)` \|", row) for row in table.partition("\n\n")[0].splitlines()]
    listed = [cell and cell[1] for cell in first_cells]
    assert listed == [room for line in FLOORS[:-1] for room in line]


def missing_from_ways(table: str) -> list[str]:
    """What rows of "to change, go to" name and is not there: paths, and names that none of the row's files has."""
    missing = []
    for row in re.findall(r"^\| .+ \|$", table, re.MULTILINE):
        named = re.findall(r"`([^`]+)`", row.split(" | ")[1])
        found = {
            name: next((top / name for top in (ROOT, REPOSITORY) if (top / name).exists()), None) for name in named
        }
        texts = [path.read_text() for path in found.values() if path is not None and path.is_file()]
        is_path = lambda name: "/" in name or "." in name
        missing += [
            name
            for name, path in found.items()
            if path is None and (is_path(name) or not any(name in text for text in texts))
        ]
        missing += [] if any(found.values()) else [row]
    return missing


def test_where_the_readme_sends_readers_exists():
    _, _, table = (ROOT / "README.md").read_text().partition("| to change | go to |\n|---|---|\n")
    table = table.partition("\n\n")[0]
    assert len(table.splitlines()) >= 12
    assert missing_from_ways(table) == []


def test_ways_that_lead_nowhere_are_found():
    ways = (
        "| a | `FLOORS` in `tests/project/test_architecture.py`, and `_product/` |",
        "| b | `_jax/no_such.py`, and `_jax/xla.py` |",
        "| c | `no_such_name` in `_jax/xla.py` |",
        "| d | nowhere |",
    )
    assert missing_from_ways("\n".join(ways)) == ["_jax/no_such.py", "no_such_name", ways[3]]


def definitions(tree: ast.Module) -> Iterator[ast.ClassDef | ast.FunctionDef]:
    """Public classes and functions, and abstract methods: what others call without reading it, or have to implement."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            is_public = node in tree.body and not node.name.startswith("_")
            if is_public or "abstractmethod" in " ".join(map(ast.unparse, node.decorator_list)):
                yield node


@over_files
def test_docstrings(path):
    tree = tree_of(path)
    assert ast.get_docstring(tree), "the file"
    missing = [node.name for node in definitions(tree) if not ast.get_docstring(node)]
    assert not missing


# "Squares." and "As the scaling.": one word, or a reference to what cannot be meant.
_SAYS_NOTHING = re.compile(r"\w+\.|As the \w+\.")


def says_nothing(docstring: str) -> bool:
    """Whether a docstring leaves the reader where the name has left them."""
    return _SAYS_NOTHING.fullmatch(docstring) is not None


def test_docstrings_say_something():
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [(path, node) for path in files() for node in ast.walk(tree_of(path)) if isinstance(node, documented)]
    assert not [(path, text) for path, node in nodes if says_nothing(text := ast.get_docstring(node) or "")]


def test_docstrings_that_say_nothing_are_found():
    assert says_nothing("Squares.") and says_nothing("As the scaling.")
    assert not says_nothing("Square blocks.") and not says_nothing("")


def classes() -> list[type]:
    """Every class that the package defines."""
    found = []
    for path in files():
        name = module_of(path)
        module = importlib.import_module(name)
        found += [value for value in vars(module).values() if inspect.isclass(value) and value.__module__ == name]
    return found


@pytest.mark.parametrize("cls", classes(), ids=lambda cls: cls.__name__)
def test_classes_are_abstract_or_final(cls):
    """No class inherits the code of a concrete one: what a method does is read in one file."""
    ours = [base for base in cls.__mro__[1:] if base.__module__.startswith("haliax_fp8")]
    assert all(map(inspect.isabstract, ours))


def test_only_the_contraction_knows_where_the_kernel_is():
    """Whether it is the first operand of `dot_general`, which is also in the file of a black box."""
    found = {path.relative_to(ROOT).as_posix() for path in files() if "kernel_first" in path.read_text()}
    assert found == {"_product/dot.py", "statistics/kept/box.py"}
    assert not [path for path in files() if "kernel_is_lhs" in path.read_text()]
