"""Files of Equinox's serialisation, with an index of names after the leaves.

Equinox's own `tree_deserialise_leaves` reads these files too: it does not read beyond the last leaf. Leaves in
8-bit floats, or in dtypes of fewer bits, it refuses: to NumPy they are bytes.
"""

import json
import os
import pathlib
import struct
import uuid
from collections.abc import Mapping
from typing import Any, BinaryIO

import jax
import jax.numpy as jnp
import numpy as np

from ...layers.model_argument import require_tree
from ...layers.own_state import require_own_state
from .array_headers import Header, headers
from .checkpoint import HostArrays
from .checksum import Summed, summed
from .names import Leaf, described, is_saved, leaves_of, name_twice, require_one_each


# After the index come its length and this mark.
_MARK = b"haliax_fp8 names"
# How each array of Equinox's files begins: NumPy's format.
_ARRAY = b"\x93NUMPY"
_END = struct.Struct(f"<Q{len(_MARK)}s")


def save(path: str | os.PathLike[str], tree: Any, *, allow_nonfinite: bool = False) -> None:
    """Writes a model, or any tree, as a file of Equinox's serialisation that knows its leaves by name.

    The file is written under another name, flushed to the disk and renamed, so a save that is interrupted leaves the
    file that was there. `load_into` reads it into models of another recipe, history length or layout, and
    compares what it reads with checksums. `eqx.tree_deserialise_leaves` reads it into the same model, without, unless
    a leaf is in an 8-bit float or a dtype of fewer bits.

    Args:
        path: The file; `.eqx` is added if the name has no suffix, as Equinox does.
        tree: A model, or a tuple of model, optimizer state and whatever else a resumed run needs.
        allow_nonfinite: Whether to save NaN, and infinite weights and moments, too: to look at what went wrong. A run
            that goes on from there is lost, and the last good file with it.

    Raises:
        ValueError: If the folder does not exist, or the file cannot be written; if the name ends in `.safetensors`; if
            anything but its own update changed the FP8 state; if an element is NaN, or an element of an array with axes
            is infinite, outside of FP8 state; if two leaves have the same name; if an array is divided over several
            processes, or a leaf is a random key with a type (save `jax.random.key_data` of it), an array of objects or
            texts, or a whole number of more than 64 bits.

    Example:
        >>> import tempfile
        >>> from haliax_fp8.checkpoints import load_into, save
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save(f"{folder}/model.eqx", model)
        ...     fp8_model, report = load_into(fp8_linear_layers(model), f"{folder}/model.eqx")
        >>> report.summary, bool((fp8_model.layers[0].weight == model.layers[0].weight).all())
        ('4 kept, 0 changed, 2 fresh, 0 unused', True)
    """
    if not isinstance(path, str | os.PathLike):
        raise ValueError(f"path is of type {type(path).__name__}, not the name of a file; use save(path, model)")
    require_tree(tree, "save(path, model)", "tree")
    if not allow_nonfinite:
        require_own_state(tree)
    path = with_suffix(path)
    if path.suffix == ".safetensors":
        raise ValueError(
            f"path={str(path)!r} names a file of safetensors, which save does not write; use a name such as "
            f"{str(path.with_suffix('.eqx'))!r}, or export_model for weights that other libraries read"
        )
    if os.path.isdir(path):  # A name may be too long for `path.is_dir`.
        raise ValueError(f"path={str(path)!r} is a folder; name a file, such as {str(path / 'model.eqx')!r}")
    if not path.parent.is_dir():
        raise ValueError(f"path={str(path)!r} is in a folder that does not exist; create {str(path.parent)!r} first")
    saved = [leaf for leaf in leaves_of(tree) if is_saved(leaf.value)]
    for leaf in saved:
        _require_savable(leaf)
        if not allow_nonfinite:
            _require_finite(leaf)
    require_one_each((leaf.name for leaf in saved), "tree")
    names = [(leaf.name, described(leaf.value).dtype.name) for leaf in saved]
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    opened = _opened(temporary, path)
    try:
        with opened as file:
            # As `eqx.tree_serialise_leaves` does, which would hide why a leaf cannot be written.
            through, index = Summed(file), []
            for leaf, (name, dtype) in zip(saved, names, strict=True):
                index.append({"name": name, "dtype": dtype, "crc32": through.leaf(name, dtype, leaf.value)})
            encoded = json.dumps(index).encode()
            file.write(encoded + _END.pack(len(encoded), _MARK))
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        raise _not_written(path, error) from error
    finally:
        temporary.unlink(missing_ok=True)
    _flush_folder(path.parent)


def open_equinox(path: pathlib.Path, made_from: Any) -> HostArrays:
    """The entries of a file.

    Args:
        path: The file.
        made_from: For files without an index, the tree, or one of the same structure, that the file was made from.

    Raises:
        ValueError: If it is not such a file, is cut off, or has no index and `made_from` is missing or differs.
    """
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        index, sums = _index(file, size, path)
        if index is not None:
            names, expected = index, []
        elif made_from is None:
            file.seek(0)
            if file.read(len(_ARRAY)) != _ARRAY:
                raise ValueError(
                    f"path={str(path)!r} is not something that load_into reads: a file that save or Equinox wrote, a "
                    "safetensors file, or a folder that Orbax wrote"
                )
            raise ValueError(
                f"{path} has no index of names: it is cut off, or Equinox wrote it without one. Copy it again; or give "
                "the model that it was made from, load_into(model, path, made_from=old_model); eqx.filter_eval_shape "
                "makes one without arrays. checkpoints.save writes files with names"
            )
        else:
            expected = [leaf for leaf in leaves_of(made_from) if is_saved(leaf.value)]
            require_one_each((leaf.name for leaf in expected), "made_from")
            names = [(leaf.name, described(leaf.value).dtype) for leaf in expected]
        file.seek(0)
        arrays = {name: header for (name, _), header in zip(names, headers(file, size, names, path), strict=True)}
    _require_made_from(expected, arrays, path)
    dtypes = dict(names)
    entries = {name: jax.ShapeDtypeStruct(header.shape, dtypes[name]) for name, header in arrays.items()}

    def array(name: str) -> np.ndarray:
        header, dtype = arrays[name], np.dtype(dtypes[name])
        raw = np.memmap(path, np.uint8, "r", header.start, header.end - header.start)
        if name in sums and summed(raw, name, dtype.name) != sums[name]:
            raise ValueError(
                f"{path} is damaged: the bytes of {name} have changed since they were saved; copy it again, or load an "
                "earlier one"
            )
        # As bytes: NumPy's files do not know bfloat16 and the FP8 formats by name.
        values = np.asarray(raw)[header.numbers - header.start :].view(dtype)
        return values.reshape(header.shape, order="F" if header.in_columns else "C")

    return HostArrays(entries, array)


def with_suffix(path: str | os.PathLike[str]) -> pathlib.Path:
    """The path of the file, as Equinox completes it."""
    path = pathlib.Path(path)
    return path if path.suffix else path.with_suffix(".eqx")


def _require_savable(leaf: Leaf) -> None:
    value = leaf.value
    if isinstance(value, jax.ShapeDtypeStruct):
        raise ValueError(f"tree is abstract: {leaf.name} has no numbers to save")
    if isinstance(value, jax.Array) and not (value.is_fully_addressable or value.is_fully_replicated):
        raise ValueError(
            f"{leaf.name} is divided over several processes; save the tree with Orbax, from which load_into reads too"
        )
    if isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        raise ValueError(f"{leaf.name} is a random key, which Equinox cannot save; save jax.random.key_data(key)")
    dtype = getattr(value, "dtype", None)
    if dtype is None and np.asarray(value).dtype == object:
        what = f"is {value}, which has more than 64 bits" if isinstance(value, int) else f"is a {type(value).__name__}"
        raise ValueError(f"{leaf.name} {what}; keep it out of the tree")
    if dtype is not None and not (jnp.issubdtype(dtype, np.number) or dtype == np.bool_):
        raise ValueError(f"{leaf.name} has dtype {dtype}, which is not a dtype of numbers; keep it out of the tree")
    if dtype is not None and not dtype.isnative:
        raise ValueError(
            f"{leaf.name} has dtype {dtype.str}, whose byte order is not this machine's; save {leaf.name}.astype("
            f"{dtype.name!r})"
        )


def _require_finite(leaf: Leaf) -> None:
    """State has its own ways with what is not finite; a number alone may be infinite, as the best loss before any."""
    value = leaf.value
    is_array = isinstance(value, jax.Array | np.ndarray)
    if leaf.state is not None or not is_array or not jnp.issubdtype(value.dtype, jnp.inexact):
        return
    # Checked where it is: a second copy may not fit the host's memory, and NumPy has dtypes that JAX lacks.
    numbers: Any = np if isinstance(value, np.ndarray) else jnp
    is_good = numbers.isfinite if value.ndim else lambda x: ~numbers.isnan(x)
    bad = ~is_good(value.astype(jnp.float32) if value.dtype.itemsize == 1 else value)
    if count := int(bad.sum()):
        first = [int(i) for i in np.argwhere(np.asarray(bad))[0]] if value.ndim else []
        where = f"an element that is infinite or NaN, at {first}"
        if count > 1:
            where = f"{count} elements that are infinite or NaN, the first at {first}"
        raise ValueError(
            f"tree is not finite, and was not saved: {leaf.name} {f'has {where}' if value.ndim else 'is NaN'}. Any "
            "earlier file is unchanged: go on from it. Call require_finite_step after "
            "each step, so that only finite steps are taken; to save this one for inspection, save(path, tree, "
            "allow_nonfinite=True)"
        )


def _flush_folder(folder: pathlib.Path) -> None:
    """A rename is on the disk once the folder is."""
    if not hasattr(os, "O_DIRECTORY"):  # Windows
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _opened(temporary: pathlib.Path, path: pathlib.Path) -> BinaryIO:
    try:
        return temporary.open("wb")
    except OSError as error:
        raise _not_written(path, error) from error


def _not_written(path: pathlib.Path, error: OSError) -> ValueError:
    return ValueError(
        f"path={str(path)!r} cannot be written: {error.strerror or error}; choose another file, on a disk with room"
    )


def _index(file: BinaryIO, size: int, path: pathlib.Path) -> tuple[list[tuple[str, Any]] | None, Mapping[str, int]]:
    """The name and the dtype of each leaf, None for a file without an index; and checksums, none in older files."""
    if size < _END.size:
        return None, {}
    file.seek(size - _END.size)
    length, mark = _END.unpack(file.read(_END.size))
    if mark != _MARK or length > size - _END.size:
        return None, {}
    file.seek(size - _END.size - length)
    try:
        index = json.loads(file.read(length))
        names = [(entry["name"], jnp.dtype(entry["dtype"])) for entry in index]
        sums = {entry["name"]: entry["crc32"] for entry in index} if any("crc32" in entry for entry in index) else {}
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(
            f"{path} is damaged: its index of names cannot be read ({error}); copy it again, or load an earlier one"
        ) from error
    if (name := name_twice(name for name, _ in names)) is not None:
        raise ValueError(
            f"{path} is damaged, or was saved from a tree in which two leaves are called {name!r}. Copy it again; or "
            "read it with eqx.tree_deserialise_leaves, and save it with names that differ"
        )
    return names, sums


def _require_made_from(expected: list[Leaf], found: dict[str, Header], path: pathlib.Path) -> None:
    for leaf in expected:
        shape, stored = described(leaf.value).shape, found[leaf.name].shape
        if stored != shape:
            raise ValueError(
                f"{path} was not made from a model like made_from: {leaf.name} has shape {stored} in the file and "
                f"{shape} in made_from"
            )
