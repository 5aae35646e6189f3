"""Imports go one way, between folders and between files. A new folder needs a row here."""

import ast
import graphlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import haliax_fp8


ROOT = Path(haliax_fp8.__file__).parent

# A folder (or a file beside the folders) may import those of the lines above its own, never one of its own line.
# Folders whose names begin with an underscore are private.
LIBRARY = (
    # The ground, on which clients stand too: what needs no JAX.
    ("_arguments", "_printing", "_tensor_names", "formats", "scopes"),
    # JAX extended.
    ("_jax",),
    ("_numerics",),
    # How weights are quantized for inference.
    ("layouts",),
    ("devices",),
    # What becomes of a number: scalings, recipes.
    ("recipes",),
    # What is remembered from step to step.
    ("_state",),
    # One product and its derivative.
    ("_product",),
    # The public ops.
    ("_op",),
    ("_einsum",),
    # Layers.
    ("layers",),
    # What is kept for the backward pass.
    ("memory",),
    # The loop.
    ("training", "sharding", "ops"),
    # The model for inference.
    ("serving",),
)
# They stand on the library's public names, and load when they are used.
CLIENTS = (
    # Folders of quantized weights, with NumPy alone.
    ("folders",),
    # Proof before purchase; models, and adapters for them; what became of their numbers.
    ("preflight", "models", "statistics"),
    # Folders of others and for others; pictures.
    ("huggingface", "plots"),
    # One's own runs, which may also be loaded from such files.
    ("checkpoints",),
    ("_cli",),
)
# What may still change: nothing but the names of the package imports it.
FLOORS = (*LIBRARY, *CLIENTS, ("experimental",), ("__init__", "__main__"))
FLOOR = {room: floor for floor, line in enumerate(FLOORS) for room in line}


def files() -> list[Path]:
    return sorted(ROOT.rglob("*.py"))


def room_of(path: Path) -> str:
    """The folder that a file is in, or the file beside the folders, as the table above names it."""
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imports(path: Path) -> Iterator[str]:
    """The full names of all that a file imports, anywhere in it; relative ones resolved."""
    package = ["haliax_fp8", *path.relative_to(ROOT).parts[:-1]]
    for node in ast.walk(ast.parse(path.read_text(), filename=str(path))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            base = [*base, *(node.module.split(".") if node.module else [])]
            yield from (".".join([*base, alias.name]) for alias in node.names)


def is_public(name: str) -> bool:
    """Whether a public folder exports a name, or a module without an underscore in its path lists it in `__all__`."""
    module, _, last = name.removeprefix("haliax_fp8.").rpartition(".")
    path = ROOT / module.replace(".", "/")
    is_folder = path.is_dir() and "." not in module
    if any(part.startswith("_") for part in module.split(".")) or not (is_folder or path.with_suffix(".py").exists()):
        return False
    tree = ast.parse((path / "__init__.py" if is_folder else path.with_suffix(".py")).read_text())
    exported = {alias.asname for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    lists = [
        node.value for node in tree.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    ]
    return last in (exported if is_folder and not lists else [name for x in lists for name in ast.literal_eval(x)])


def imported_from(path: Path, folder: Path) -> set[str]:
    """What a file imports of a folder: the files and folders in it, `__init__` for names of the folder itself."""
    inside = ["haliax_fp8", *folder.relative_to(ROOT).parts]
    found = set()
    for name in (name.split(".") for name in imports(path)):
        if name[: len(inside)] == inside:
            rest = name[len(inside) :]
            is_module = bool(rest) and ((folder / rest[0]).is_dir() or (folder / f"{rest[0]}.py").is_file())
            found.add(rest[0] if is_module else "__init__")
    return found


def circle_in(folder: Path) -> list[str]:
    """The names along a circle of imports between a folder's files, and its folders as a whole; none without one."""
    needs: dict[str, set[str]] = {}
    for path in folder.rglob("*.py"):
        child = path.relative_to(folder).parts[0].removesuffix(".py")
        needs.setdefault(child, set()).update(imported_from(path, folder) - {child})
    try:
        graphlib.TopologicalSorter(needs).prepare()
    except graphlib.CycleError as error:
        return list(reversed(error.args[1]))
    return []


def test_every_folder_is_on_a_floor():
    assert {room_of(path) for path in files()} == set(FLOOR), "decide what a new folder may import: add it to FLOORS"


def test_imports_go_up_the_table():
    rooms = {path: imported_from(path, ROOT) - {room_of(path)} for path in files()}
    assert not [(path, room) for path, found in rooms.items() for room in found if FLOOR[room] >= FLOOR[room_of(path)]]


def test_clients_import_public_names_only():
    """What the library's own tools need, anyone's tools may use.

    But for JAX's internals that only clients use, and the comparison of two models, which is a product of its own.
    """
    clients, ground = ({room for line in lines for room in line} for lines in (CLIENTS, LIBRARY[:1]))
    library = {room for line in LIBRARY for room in line} - ground
    of_library = {name for path in files() if room_of(path) in library | {"experimental"} for name in imports(path)}
    private = {
        (str(path.relative_to(ROOT)), name.removeprefix("haliax_fp8."))
        for path in files()
        if room_of(path) in clients
        for name in imports(path)
        if name.startswith("haliax_fp8.") and name.split(".")[1] in library and not is_public(name)
    }
    engine = {name for file, name in private if file == "statistics/twin.py"}
    internals = {name for _, name in private if name.startswith("_jax.") and f"haliax_fp8.{name}" not in of_library}
    assert not {(file, name) for file, name in private if name not in engine | internals}
    assert engine and internals, "an exception that is not used any more"


def test_no_circles_inside_a_folder():
    circles = {folder: circle_in(folder) for folder in {path.parent for path in files()}}
    assert not {folder: circle for folder, circle in circles.items() if circle}


def test_nothing_depends_on_what_is_experimental():
    """The front door names it for type checkers alone, and loads it when it is used."""
    rooms = {room_of(path) for path in files() if "experimental" in imported_from(path, ROOT)} - {"experimental"}
    assert rooms == {"__init__"}
    names = [path.stem for path in ROOT.iterdir() if path.is_dir() and (path / "__init__.py").exists()]
    others = ", ".join(f"haliax_fp8.{name}" for name in names if name != "experimental")
    code = f"import sys, {others}; print([name for name in sys.modules if name.startswith('haliax_fp8.experimental')])"
    run = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert run.stdout.strip() == "[]"


def test_only_one_folder_imports_the_internals_of_jax():
    """But for what is experimental."""
    users = [path for path in files() if any(name.startswith(("jax._src", "jaxlib")) for name in imports(path))]
    assert {room_of(path) for path in users} == {"_jax", "experimental"}
    assert [path.name for path in users if room_of(path) == "experimental"] == ["platforms.py"]


def test_this_file_sees_imports(tmp_path, monkeypatch):
    """Relative and full ones, also in functions; and a circle."""
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "a.py").write_text("from . import b\nfrom ..other import name\n")
    (tmp_path / "folder" / "b.py").write_text("def f():\n    import haliax_fp8.folder.a\n")
    assert imported_from(tmp_path / "folder" / "a.py", tmp_path) == {"__init__", "folder"}
    assert imported_from(tmp_path / "folder" / "b.py", tmp_path / "folder") == {"a"}
    assert set(circle_in(tmp_path / "folder")) == {"a", "b"}
