"""The file of a run: safetensors with checksums, because weights with a wrong byte look like weights."""

import contextlib
import os
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from ..folders.checksums import checksum, read_index
from ..folders.header import Stored, header_in
from ..folders.strict_json import BrokenCheckpoint
from ..folders.unfinished import take_name, unfinished
from ..folders.writer import TensorSpec, write_tensors_of
from ..layers.checks import check_not_modified, require_tree
from .checkpoint import HostArrays
from .names import Leaf, described, is_saved, leaves_of, require_one_each
from .recipes import Run, from_file, in_file, plans_in, recipes_of, require_microbatches


def save(
    path: str | os.PathLike[str], tree: Any, *, allow_nonfinite: bool = False, microbatches: int | None = None
) -> None:
    """Writes a model, or any tree, as a safetensors file: every array and number by the name of its leaf.

    The file is written under another name, flushed to the disk and renamed, so a save that is interrupted leaves the
    file that was there. If the process was killed, its unfinished file stays until the next save of that name removes
    it; SIGTERM leaves none. `load_into` reads the file into models of another recipe, history length or layout, and
    compares what it reads with checksums.

    Args:
        path: The file; `.safetensors` is added if the name has no suffix.
        tree: A model, or a tuple of model, optimizer state and whatever else a resumed run needs.
        allow_nonfinite: Whether to save NaN, and infinite weights and moments, too: to look at what went wrong. A run
            that goes on from there is lost, and the last good file with it.
        microbatches: How many microbatches a step has, `step.microbatches`: see `load_into`.

    Raises:
        ValueError: If the folder does not exist, or the file cannot be written; if anything but its own update changed
            the FP8 state; if an element is NaN, or an element of an array with axes is infinite, outside of FP8 state;
            if two leaves have the same name; if an array is divided over several processes, or a leaf is a random key
            with a type (save `jax.random.key_data` of it), an array of objects or texts, or a whole number of more than
            64 bits; if `microbatches` is not a positive integer.

    Example:
        >>> import tempfile
        >>> from haliax_fp8.checkpoints import load_into, save
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save(f"{folder}/model.safetensors", model)
        ...     fp8_model, report = load_into(fp8_linear_layers(model), f"{folder}/model.safetensors")
        >>> report.summary, bool((fp8_model.layers[0].weight == model.layers[0].weight).all())
        ('4 kept, 0 changed, 2 fresh, 0 unused', True)
    """
    if not isinstance(path, str | os.PathLike):
        raise ValueError(f"path is of type {type(path).__name__}, not the name of a file; use save(path, model)")
    require_tree(tree, "save(path, model)", "tree")
    require_microbatches(microbatches, of="save")
    if not allow_nonfinite:
        check_not_modified(tree)
    path = with_suffix(path)
    if os.path.isdir(path):  # A name may be too long for `path.is_dir`.
        raise ValueError(f"path={str(path)!r} is a folder; name a file, such as {str(path / 'model.safetensors')!r}")
    if not path.parent.is_dir():
        raise ValueError(f"path={str(path)!r} is in a folder that does not exist; create {str(path.parent)!r} first")
    saved = [leaf for leaf in leaves_of(tree) if is_saved(leaf.value)]
    for leaf in saved:
        _require_savable(leaf)
        if not allow_nonfinite:
            _require_finite(leaf)
    require_one_each((leaf.name for leaf in saved), "tree")
    index: dict[str, Any] = {"recipes": in_file(recipes_of(tree)), "phases": list(plans_in(tree))}
    if microbatches is not None:
        index["microbatches"] = microbatches
    with _replaced(path) as file:
        write_tensors_of(file, map(_spec, saved), ((leaf.name, leaf.value) for leaf in saved), index=index)


def with_suffix(path: str | os.PathLike[str]) -> pathlib.Path:
    """The path of the file, with the suffix that `save` adds."""
    path = pathlib.Path(path)
    return path if path.suffix else path.with_suffix(".safetensors")


def open_file(path: pathlib.Path, file: BinaryIO) -> HostArrays:
    """The tensors of a safetensors file; of one that `save` wrote, as the leaves were, compared with their checksums.

    Args:
        path: The file, for errors.
        file: The file, open at its beginning: the name may belong to another one the next moment.

    Raises:
        ValueError: If the file is damaged.
    """
    try:
        metadata: dict[str, str] = {}
        tensors = header_in(file, path, metadata)
        index = read_index(path.name, metadata, tensors)
        leaves = index.get("leaves", {})
        entries = {name: _entry(stored, leaves.get(name)) for name, stored in tensors.items()}
        run = _run(path.name, index)
    except ValueError as error:
        raise ValueError(f"path={str(path)!r} cannot be read: {error}") from error
    # Mapped as long as the checkpoint is open: the file may be replaced meanwhile.
    content = np.memmap(file, np.uint8, "r")

    def array(name: str) -> np.ndarray:
        stored = tensors[name]
        stored.require_known()
        # A copy, as the bytes may not be aligned.
        words = np.array(content[stored.offset : stored.offset + stored.bytes])
        if name in leaves and checksum(stored.name, stored.type, stored.shape, words) != leaves[name]["crc32"]:
            raise ValueError(
                f"{path} is damaged: the bytes of {name} have changed since they were saved; copy it again, or load an "
                "earlier one"
            )
        return words.view(entries[name].dtype).reshape(entries[name].shape)

    return HostArrays(entries, array, run)


def open_equinox(path: pathlib.Path, file: BinaryIO, made_from: Any) -> HostArrays:
    """The leaves of a file of Equinox, which has no names: those of the tree that it was made from.

    Args:
        path: The file, for errors.
        file: The file, open at its beginning.
        made_from: As in `load_into`.

    Raises:
        ValueError: If Equinox cannot read it into such a tree.
    """
    if made_from is None:
        raise ValueError(
            f"path={str(path)!r} is not something that load_into reads: a file that save wrote, a safetensors file, or "
            "a folder that Orbax wrote. A file of Equinox has no names: give the model that it was made from, "
            "load_into(model, path, made_from=old_model); eqx.filter_eval_shape makes one without arrays"
        )
    require_tree(made_from, "load_into(model, path, made_from=old_model)", "made_from")
    saved = [leaf for leaf in leaves_of(made_from) if is_saved(leaf.value)]
    require_one_each((leaf.name for leaf in saved), "made_from")
    try:
        leaves = eqx.tree_deserialise_leaves(file, [leaf.value for leaf in saved])
        if file.read(1):
            raise ValueError("it holds more arrays than made_from has leaves")
    except (RuntimeError, ValueError, EOFError, OSError) as error:
        raise ValueError(f"{path} was not made from a tree like made_from, or is cut off: {error}") from error
    arrays = {leaf.name: value for leaf, value in zip(saved, leaves, strict=True)}
    return HostArrays({name: described(value) for name, value in arrays.items()}, arrays.__getitem__)


def _run(file: str, index: Mapping[str, Any]) -> Run:
    """What an index records of the run.

    Raises:
        BrokenCheckpoint: If that is not what `save` writes.
    """
    try:
        require_microbatches(index.get("microbatches"), of="its index")
        phases = index.get("phases")
        if phases is not None and not (isinstance(phases, list) and all(isinstance(text, str) for text in phases)):
            raise ValueError(f"its index has phases={phases!r:.60}, which `save` does not write; copy the file")
        recipes = from_file(index["recipes"]) if "recipes" in index else None
        return Run(recipes, index.get("microbatches"), phases)
    except ValueError as error:
        raise BrokenCheckpoint(file, str(error)) from error


def _entry(stored: Stored, saved: Any) -> jax.ShapeDtypeStruct:
    """The shape and dtype of a leaf.

    Args:
        stored: Its tensor.
        saved: What the index says of it; None in a file that `save` did not write.

    Raises:
        BrokenCheckpoint: If that is not what `save` writes.
    """
    if saved is None or "dtype" not in saved:
        return jax.ShapeDtypeStruct(stored.shape, stored.dtype)
    with contextlib.suppress(TypeError):
        dtype = jnp.dtype(saved["dtype"])
        if (stored.dtype, *stored.shape[-1:]) == (np.uint8, dtype.itemsize):
            return jax.ShapeDtypeStruct(stored.shape[:-1], dtype)
    raise BrokenCheckpoint(stored.file.name, f"its index has {saved!r:.60} for it; copy the file", stored.name)


def _spec(leaf: Leaf) -> TensorSpec:
    entry = described(leaf.value)
    return TensorSpec(leaf.name, np.dtype(entry.dtype), entry.shape)


@contextlib.contextmanager
def _replaced(path: pathlib.Path) -> Iterator[BinaryIO]:
    """A file that takes its name when it is complete and on the disk."""
    try:
        with unfinished(path) as temporary:
            with temporary.open("wb") as file:
                yield file
            take_name(temporary, path)
    except OSError as error:
        what = f"path={str(path)!r} cannot be written: {error.strerror or error}"
        raise ValueError(f"{what}; choose another file, on a disk with room") from error


def _require_savable(leaf: Leaf) -> None:
    value, dtype = leaf.value, getattr(leaf.value, "dtype", None)
    if isinstance(value, jax.ShapeDtypeStruct):
        raise ValueError(f"tree is abstract: {leaf.name} has no numbers to save")
    if isinstance(value, jax.Array) and not (value.is_fully_addressable or value.is_fully_replicated):
        raise ValueError(
            f"{leaf.name} is divided over several processes; save the tree with Orbax, from which load_into reads too"
        )
    if dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key):
        raise ValueError(f"{leaf.name} is a random key, which no file can hold; save jax.random.key_data(key)")
    if dtype is None and np.asarray(value).dtype == object:
        what = f"is {value}, which has more than 64 bits" if isinstance(value, int) else f"is a {type(value).__name__}"
        raise ValueError(f"{leaf.name} {what}; keep it out of the tree")
    if dtype is not None and not (jnp.issubdtype(dtype, np.number) or dtype == np.bool_):
        raise ValueError(f"{leaf.name} has dtype {dtype}, which is not a dtype of numbers; keep it out of the tree")
    if dtype is not None and not dtype.isnative:
        remedy = f"save {leaf.name}.astype({dtype.name!r})"
        raise ValueError(f"{leaf.name} has dtype {dtype.str}, whose byte order is not this machine's; {remedy}")


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
        where = f"has an element that is infinite or NaN, at {first}" if value.ndim else "is NaN"
        if count > 1:
            where = f"has {count} elements that are infinite or NaN, the first at {first}"
        raise ValueError(
            f"tree is not finite, and was not saved: {leaf.name} {where}. Any earlier file is unchanged: go on from "
            "it. Call require_finite_step after each step, so that only finite steps are taken; to save this one for "
            "inspection, save(path, tree, allow_nonfinite=True)"
        )
