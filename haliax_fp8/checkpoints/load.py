"""Which kind of checkpoint a path is."""

import dataclasses
import os
import pathlib
from collections.abc import Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._arguments import require_bool
from ..folders.fits import require_fits
from ..folders.header import UNKNOWN
from ..folders.strict_json import BrokenCheckpoint, open_regular
from ..layers.checks import require_no_quantized_kernels, require_tree
from .checkpoint import AbstractCheckpoint, HostArrays
from .file import open_equinox, open_file, with_suffix
from .histories import fitted, recorded_rows, refusal, rows_as_here
from .names import Leaf, described, former_names, is_rounding_key, is_saved, leaves_of, require_one_each, with_leaves
from .orbax import OrbaxFolder
from .recipes import (
    Run,
    delayed_part,
    differences,
    is_gradient,
    op_of,
    plans_in,
    recipes_of,
    require_microbatches,
    resized,
    table_of,
)
from .report import PHASES, LoadReport, incomplete, listed, require_fit, require_no_fresh_weights
from .state_dict import with_names_of


def open_checkpoint(path: Any, model: Any, made_from: Any) -> AbstractCheckpoint:
    """A checkpoint, with the names of a model's leaves where it has them under other keys.

    Args:
        path: As in `load_into`.
        model: As in `load_into`.
        made_from: As in `load_into`.

    Raises:
        ValueError: If there is nothing, or nothing that can be read.
    """
    if isinstance(path, Mapping):
        arrays = {str(name): array for name, array in path.items() if array is not None}
        entries = {name: described(array) for name, array in arrays.items()}
        return with_names_of(model, HostArrays(entries, arrays.__getitem__))
    if not isinstance(path, str | os.PathLike):
        raise ValueError(
            f"path is of type {type(path).__name__}, not a file, a folder of Orbax or a state dict; use "
            "load_into(model, path)"
        )
    path = pathlib.Path(path)
    if path.is_dir():
        return OrbaxFolder(path)
    on_disk = path if path.exists() else with_suffix(path)
    if not on_disk.exists():
        either = "" if on_disk == path else f", and neither does {os.fspath(on_disk)!r}"
        raise ValueError(f"path={os.fspath(path)!r} does not exist{either}; give a file, or a folder that Orbax wrote")
    try:
        file = open_regular(on_disk)
    except BrokenCheckpoint as error:
        raise ValueError(f"path={os.fspath(on_disk)!r} cannot be read: {error}") from None
    with file:
        is_equinox = made_from is not None or file.read(len(_ARRAY)) == _ARRAY
        file.seek(0)
        return open_equinox(on_disk, file, made_from) if is_equinox else with_names_of(model, open_file(on_disk, file))


# How each array of Equinox's files begins: NumPy's format.
_ARRAY = b"\x93NUMPY"


def load_into[M](
    model: M,
    path: str | os.PathLike[str] | Mapping[str, Any],
    *,
    strict: bool = False,
    made_from: Any = None,
    allow_fresh_weights: bool = False,
    microbatches: int | None = None,
) -> tuple[M, LoadReport]:
    """A model with the numbers of a checkpoint, which may be of another recipe, or of the plain model.

    What has the name and the shape of a leaf is loaded, in the leaf's dtype and onto its devices, one leaf at a time.
    Histories of delayed scaling are cut or padded so that their maximum stays the same, and scales are computed from
    them, for the model's recipe. Static scales are converted to its formats and margin. Other state starts fresh, as
    does an optimizer's where it does not fit. So a plain model's checkpoint loads into a converted one and the reverse,
    with any recipe. A weight of another shape or kind than the model's is an error.

    Args:
        model: What to load into: a model, a tuple of model and optimizer state, any tree. Arrays may be
            `jax.ShapeDtypeStruct`s (`eqx.filter_eval_shape`), whose sharding is then that of the loaded array.
        path: A file of `save` or of Equinox's serialisation, a safetensors file, the folder of a step that Orbax wrote,
            or a mapping of names to arrays. Keys of safetensors and of mappings may be those of Haliax's state dict.
        strict: Whether anything but a complete load is an error: a leaf changed or fresh, an entry unused, a layer
            with another recipe than in the run that `save` wrote, other phases, or another number of microbatches. A
            file does not know an optimizer's class and options, such as learning rates.
        made_from: For files of Equinox without names: the tree that was saved, or one of its structure.
        allow_fresh_weights: Whether a weight that the checkpoint lacks may stay as it is in the given model. State of
            FP8 layers and of optimizers may always.
        microbatches: How many microbatches a step has, `step.microbatches`. If `save` was given another number, the
            amaxes of output gradients are multiplied: in a mean over microbatches of the same batch, the gradient of
            each is as many times larger as there are more of them.

    Returns:
        The model, and what became of every leaf and entry.

    Raises:
        ValueError: If the checkpoint is missing or damaged; if nothing in it fits the model, a weight has another
            shape or kind than the model's, or an abstract model has a leaf that it lacks; if a weight in FP8 comes
            without its scale; if two leaves have the same name, or a number does not fit its leaf's dtype; with
            `strict`, if the load is not complete, or the file has a number of microbatches and you do not say yours;
            without `allow_fresh_weights`, if the checkpoint lacks a weight; if `microbatches` is not a positive
            integer. The message names the leaves and the remedy.

    Example:
        >>> from haliax_fp8.checkpoints import load_into
        >>> fp8_model = fp8_linear_layers(model, recipe=DelayedScaling(amax_history_length=8))
        >>> weights = {"layers.0.weight": np.ones((32, 16), np.float32)}
        >>> loaded, report = load_into(fp8_model, weights, allow_fresh_weights=True)
        >>> report.kept, "calibrate" in report.fresh["layers.0.dot_general.state.table"]
        (('layers.0.weight',), True)
    """
    require_bool("strict", strict, "load_into")
    require_bool("allow_fresh_weights", allow_fresh_weights, "load_into")
    require_microbatches(microbatches, of="load_into")
    checkpoint = open_checkpoint(path, model, made_from)
    require_tree(model, "load_into(model, path)")
    require_no_quantized_kernels(model)
    leaves = list(leaves_of(model))
    require_one_each((leaf.name for leaf in leaves if is_saved(leaf.value)), "model")
    shown = "the mapping" if isinstance(path, Mapping) else f"path={os.fspath(path)!r}"
    former = former_names(model)
    plans = [_plan(leaf, checkpoint, former) if is_saved(leaf.value) else _Plan() for leaf in leaves]
    misfits = {leaf.name: plan.why for leaf, plan in zip(leaves, plans, strict=True) if plan.why and plan.is_misfit}
    require_fit(model, misfits, shown)
    _require_all(leaves, plans)
    arrays = checkpoint.read({p.name: p.sharding for p in plans if p.name is not None})
    here = Run(recipes_of(model), microbatches, list(plans_in(model)))
    recipes = _Recipes(checkpoint.run, here)
    values, kept, changed, fresh = [], [], {}, {}
    for leaf, plan in zip(leaves, plans, strict=True):
        value, how, why = leaf.value, plan.how, plan.why
        if plan.name is not None:
            array = arrays[plan.name]
            if leaf.state is not None:
                array, how, why = _table(_on_host(array), leaf, recipes)
            elif hasattr(leaf.value, "dtype") and leaf.value.dtype != described(array).dtype:
                array = _on_host(array)
                require_fits(array, leaf.value.dtype, leaf.name)
            value = None if array is None else _like_leaf(array, leaf.value)
        if leaf.state is not None and (plan.name is None or value is None):
            value = _like_leaf(leaf.state.before_first_step(), leaf.value)
        elif why is not None and isinstance(value, jax.ShapeDtypeStruct):
            value = _like_leaf(np.zeros(value.shape, value.dtype), leaf.value)
        values.append(value)
        if why is not None:
            fresh[leaf.name] = why
        elif how is not None:
            changed[leaf.name] = how
        elif plan.name is not None:
            kept.append(leaf.name)
    changed |= recipes.changed_without_table(checkpoint.entries.keys(), {leaf.name for leaf in leaves})
    if here.phases and checkpoint.run.phases not in (None, here.phases):
        saved, planned = ("; ".join(filter(None, phases)) or "none" for phases in (checkpoint.run.phases, here.phases))
        changed[PHASES] = f"{saved} in the checkpoint, {planned} here"
    used = {plan.name for plan in plans}
    unused = checkpoint.entries.keys() - used - {plan.refused for plan in plans}
    report = LoadReport(tuple(kept), changed, fresh, tuple(sorted(unused)), recipes.not_compared)
    if checkpoint.entries and not used - {None}:
        raise ValueError(_nothing_fits(checkpoint, [leaf.name for leaf in leaves if is_saved(leaf.value)], shown))
    if strict:
        _require_same_microbatches(checkpoint.run.microbatches, microbatches)
    if strict and not report.is_complete:
        raise ValueError(incomplete(model, report, checkpoint.entries))
    if not allow_fresh_weights:
        require_no_fresh_weights(model, [leaf.name for leaf in leaves if _is_weight(leaf)], report, shown)
    return with_leaves(model, values), report


def _require_same_microbatches(saved: int | None, here: int | None) -> None:
    if saved is not None and here is None:
        raise ValueError(
            f"strict=True, and the run was saved with microbatches={saved}, while load_into got none: pass "
            "microbatches=step.microbatches, because another number gives other gradients"
        )


def _nothing_fits(checkpoint: AbstractCheckpoint, expected: list[str], shown: str) -> str:
    """What to do where a checkpoint and a model have no name and shape in common."""
    names = sorted(checkpoint.entries)
    start = f"nothing in {shown} fits the model: it holds {_first(names)}; the model expects {_first(expected)}. "
    first = {name.partition(".")[0] for name in names}
    if first <= {str(i) for i in range(len(first))} and not set(expected) & set(names):
        return start + (
            "It was saved from a tuple or list, such as (model, opt_state): load it into one, (model, opt_state), "
            "report = load_into((model, opt_state), path). For the model alone, give None instead of the rest: "
            "(model, _), report = load_into((model, None), path)"
        )
    return start + "Give the model that was saved, or a tuple only where one was saved"


def _first(names: list[str]) -> str:
    return ", ".join(names[:2]) + (f" and {len(names) - 2} more" if len(names) > 2 else "")


@dataclasses.dataclass(frozen=True)
class _Plan:
    """What becomes of a leaf.

    Args:
        name: The name of the entry that it is made of; None if there is none.
        sharding: Where that is to be read to.
        how: How it is changed; None if it is not.
        why: Why it is fresh; None if it is not.
        refused: The name of the entry that is the leaf's, and does not fit; None if there is none.
        is_misfit: Whether that is because of its shape or kind, and nothing can take its place.
    """

    name: str | None = None
    sharding: Any = None
    how: str | None = None
    why: str | None = None
    refused: str | None = None
    is_misfit: bool = False


def _plan(leaf: Leaf, checkpoint: AbstractCheckpoint, former: Mapping[str, str]) -> _Plan:
    # In Orbax's folders a list with one array looks like a named array.
    whole, _, last = leaf.name.rpartition(".")
    names = leaf.name, former.get(leaf.name, leaf.name), whole if last == "0" else leaf.name
    name = next((name for name in names if name in checkpoint.entries), leaf.name)
    entry, wanted = checkpoint.entries.get(name), described(leaf.value)
    if entry is None:
        return _Plan(why=_MISSING_STATE if leaf.state is not None else "not in the checkpoint")
    if leaf.state is not None:
        # Rows and stack have to fit; the width is a matter of the recipe.
        if entry.shape[:-1] != wanted.shape[:-1] or not entry.shape or entry.shape[-1] < 3:
            why = f"the state in the checkpoint has shape {entry.shape}, this one {wanted.shape}"
            return _Plan(why=why, refused=name)
        return _Plan(name)
    if entry.shape != wanted.shape:
        why = f"shape {entry.shape} in the checkpoint, {wanted.shape} here"
        return _Plan(why=why, refused=name, is_misfit=_is_weight(leaf))
    if entry.dtype == wanted.dtype:
        return _Plan(name, _sharding_of(leaf.value))
    if entry.dtype == UNKNOWN:
        return _Plan(name)  # Reading it raises an error that names the type.
    if _is_fp8(entry.dtype) and not _is_fp8(wanted.dtype):
        raise ValueError(
            f"{leaf.name} is stored in {np.dtype(entry.dtype).name}: FP8 data without its scale is not a weight. Load "
            "a checkpoint of the model before it was quantized"
        )
    kinds = [_kind(dtype) for dtype in (entry.dtype, wanted.dtype)]
    names = [str(dtype) for dtype in (entry.dtype, wanted.dtype)]
    if kinds[0] != kinds[1] or kinds[0] is None:
        return _Plan(why=f"{names[0]} in the checkpoint, {names[1]} here", refused=name, is_misfit=_is_weight(leaf))
    return _Plan(name, how=f"{names[0]} in the checkpoint, cast to {names[1]}")


def _is_weight(leaf: Leaf) -> bool:
    """Whether it has numbers that were learned: a number of Python, such as a rate of dropout, is an option."""
    return hasattr(leaf.value, "shape") and leaf.state is None and not is_rounding_key(leaf.name)


_MISSING_STATE = (
    "not in the checkpoint: its model was plain or had another recipe, or it is a state dict; calibrate the model "
    "to begin with scales that fit"
)


def _kind(dtype: Any) -> Any:
    kinds = (jnp.floating, jnp.integer, jnp.bool_)
    return next((kind for kind in kinds if jnp.issubdtype(dtype, kind)), None)


def _is_fp8(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.floating) and np.dtype(dtype).itemsize == 1


class _Recipes:
    """The recipes of the run that wrote a checkpoint, beside those of the model."""

    def __init__(self, saved: Run, here: Run) -> None:
        """Both, by the names of the ops' tables.

        Args:
            saved: What the checkpoint records; files that `save` did not write record nothing.
            here: The same of the model that is loaded into.
        """
        self._is_recorded = saved.recipes is not None
        self._saved, self._here = ({table_of(op): x for op, x in (run.recipes or {}).items()} for run in (saved, here))
        self._microbatches = saved.microbatches, here.microbatches

    def fitted(self, table: np.ndarray, leaf: Leaf) -> tuple[np.ndarray | None, list[str]]:
        """A table as the model's recipe needs it, and how it was changed; None if it has no use for it."""
        state, saved, here = leaf.state, self._saved.get(leaf.name), self._here.get(leaf.name)
        assert state is not None
        if saved is None or here is None:
            if table.shape == leaf.value.shape:
                return table, []
            old, new = table.shape[-1] - 2, leaf.value.shape[-1] - 2
            return fitted(table, state, rows_as_here(table.shape[-1], state))[0], [resized(old, new)]
        before, now = self._microbatches
        names, factor = list(here)[: len(state.limits)], 1.0 if before is None or now is None else now / before
        result, fresh = fitted(table, state, recorded_rows(saved, here, names, factor))
        if result is None:
            return None, []
        how = [text] if (text := differences(saved, here)) else []
        if how and not np.array_equal(result[..., 0], table[..., 0]):
            how += ["the scales were computed for the recipe here"]
        how += [f"{names[row]} starts fresh: calibrate the model" for row in fresh]
        remembered = [name for name, scaling in zip(names, state.scalings, strict=True) if scaling.memory is not None]
        if factor != 1.0 and any(is_gradient(name) for name in remembered):
            shown = f"{before} microbatch{'' if before == 1 else 'es'} in the checkpoint, {now} here"
            how += [f"{shown}: the amaxes of gradients were multiplied by {factor:g}"]
        return result, how

    @property
    def not_compared(self) -> str:
        """What the runs may differ in although each table is the same; empty if there is nothing."""
        operands = ((name, delayed_part(x["scaling"] or {})) for op in self._here.values() for name, x in op.items())
        if (
            not self._is_recorded
            or None not in self._microbatches
            or not any(is_gradient(name) and "amax_history_length" in scaling for name, scaling in operands)
        ):
            return ""
        where = " and ".join(f for f, n in zip(("save", "load_into"), self._microbatches, strict=True) if n is None)
        return f"the number of microbatches, because {where} got none: pass microbatches=step.microbatches"

    def changed_without_table(self, entries: Collection[str], leaves: Collection[str]) -> dict[str, str]:
        """The ops whose recipe is another, by name, and how; those that have a table are reported with it.

        Args:
            entries: The names in the checkpoint.
            leaves: The names in the model.
        """
        changed = {}
        for table in dict.fromkeys([*self._here, *self._saved]) if self._is_recorded else ():
            op, saved, here = op_of(table), self._saved.get(table), self._here.get(table)
            layer = op.rpartition(".")[0]
            in_both = not layer or all(any(x.startswith(f"{layer}.") for x in names) for names in (entries, leaves))
            if table in entries or table in leaves or not in_both:
                continue
            if saved is not None and here is not None:
                text = differences(saved, here)
            else:
                text = "in FP8 " + ("here" if saved is None else "in the checkpoint") + " alone"
            changed |= {op: text} if text else {}
        return changed


def _table(array: np.ndarray, leaf: Leaf, recipes: _Recipes) -> tuple[np.ndarray | None, str | None, str | None]:
    """The table of a state, how it was changed, and why it is fresh instead."""
    table = array.astype(np.float32, copy=False)
    if (why := refusal(table)) is not None:
        return None, None, why
    try:
        result, how = recipes.fitted(table, leaf)
    except ValueError as error:
        raise ValueError(f"{leaf.name} is damaged: {error}; load an earlier checkpoint") from error
    if result is None:
        return None, None, "the state in the checkpoint belongs to another scaling, or has recorded nothing"
    if array.dtype != leaf.value.dtype:
        how = [f"{array.dtype} in the checkpoint, cast to {leaf.value.dtype}", *how]
    return result, "; ".join(how) or None, None


def _require_all(leaves: list[Leaf], plans: list[_Plan]) -> None:
    """An abstract leaf that nothing is known of has no numbers; state and rounding keys have first ones."""
    missing = [
        f"{leaf.name}: {plan.why}"
        for leaf, plan in zip(leaves, plans, strict=True)
        if plan.why is not None
        and isinstance(leaf.value, jax.ShapeDtypeStruct)
        and leaf.state is None
        and not is_rounding_key(leaf.name)
    ]
    if missing:
        raise ValueError(
            "the checkpoint lacks leaves of a model that has no numbers of its own: " + listed(missing) + ". Give a "
            "model with arrays, which stay where the checkpoint has none, or the checkpoint of this model"
        )


def _sharding_of(leaf: Any) -> Any:
    """Where a leaf has to be; None where JAX may decide, and for leaves that are not on a device."""
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf.sharding
    # An array that nobody put on a device may move to the others of a computation.
    return leaf.sharding if isinstance(leaf, jax.Array) and getattr(leaf, "committed", True) else None


def _like_leaf(array: Any, leaf: Any) -> Any:
    """An array, or a number, on the devices and of the kind of a leaf.

    Args:
        array: The numbers, of the leaf's shape; on its sharding already or on the host.
        leaf: What the model has.
    """
    if isinstance(leaf, np.ndarray):
        return _on_host(array).astype(leaf.dtype, copy=False)
    if not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
        return type(leaf)(np.asarray(array).item())
    sharding = _sharding_of(leaf)
    if isinstance(array, jax.Array) and sharding is not None and array.sharding == sharding:
        return array if array.dtype == leaf.dtype else array.astype(leaf.dtype)
    if isinstance(array, jax.Array) and jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        return array if sharding is None else jax.device_put(array, sharding)
    host = _on_host(array).astype(leaf.dtype, copy=False)
    if sharding is None:
        return jnp.asarray(host)
    # Each device gets its own part, and no device the whole.
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


def _on_host(array: Any) -> np.ndarray:
    """An array's numbers in memory of their own."""
    if isinstance(array, jax.Array) and not array.is_fully_addressable:
        array = array.addressable_data(0)
    return np.array(array)
