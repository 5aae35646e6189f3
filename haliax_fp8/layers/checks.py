"""Checks at the entrance: that an argument is a model, and that its FP8 state can be used."""

from collections.abc import Sequence
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from .._jax.errors import calls_users_function
from .._op import Fp8DotGeneral
from .._printing import Printable
from .._product.arguments import floating_dtype
from .._state.guard import is_modified
from .._state.op_state import KEEP_STATE_WITH_TRAINED, OpState
from .._state.table import numbers_of
from ..recipes.recipe import OPERAND_NAMES
from ..recipes.scaling import AmaxHistory, StaticScaling
from .config import Fp8Config
from .quantized import is_quantized_layer
from .roles import AbstractAdapter
from .walk import all_ops, is_op, named_ops, path_string


__all__ = [
    "calls_users_function",
    "check_not_modified",
    "floating_dtype",
    "holds_optimizer_state",
    "require_calibrated",
    "require_layers",
    "require_merged",
    "require_model",
    "require_no_quantized_kernels",
    "require_single_key",
    "require_tree",
    "require_weights",
    "table_on_host",
    "unrecorded_operands",
]


# --- whether it is a model


def require_tree(tree: Any, call: str, name: str = "model") -> None:
    """Raises a ValueError if an argument cannot hold arrays: None, a class, a function or a string.

    Args:
        tree: The argument.
        call: How the function is called.
        name: The argument's name.
    """
    if isinstance(tree, type):
        raise ValueError(f"{name} is the class {tree.__name__}, but must be an instance, with weights; use {call}")
    is_array = isinstance(tree, jax.Array | np.ndarray | jax.ShapeDtypeStruct)
    if tree is None or (_is_leaf(tree) and not is_array):
        raise _without_layers(tree, call, name)


def require_model(model: Any, call: str, name: str = "model") -> None:
    """Like `require_tree`, for functions that take a model alone: without its optimizer's state, or a result.

    Args:
        model: As in `require_tree`.
        call: As in `require_tree`.
        name: As in `require_tree`.
    """
    require_tree(model, call, name)
    if type(model) is not tuple:
        return
    for index, item in enumerate(model):
        others = model[:index] + model[index + 1 :]
        beside = [f"a {type(other).__name__}" for other in others if isinstance(other, Printable)]
        if isinstance(item, eqx.Module) and any(_is_of_optimizer(other, type(item)) for other in others):
            beside.append("an optimizer's state")
        if beside and not isinstance(item, Printable):
            raise ValueError(
                f"{name} is a tuple with {beside[0]}, and the model is {_item(index)}: give the model alone, {call}"
            )


def require_whole_model(model: Any, call: str, name: str = "model") -> None:
    """Like `require_model`, and raises if a tree has the layers of a model but is none: moments, or gradients.

    Gradients are known by the FP8 state that was split from them, or by JAX's gradients of whole numbers.

    Args:
        model: As in `require_tree`.
        call: As in `require_tree`.
        name: As in `require_tree`.
    """
    require_model(model, call, name)
    nodes = jax.tree.leaves(model, is_leaf=lambda node: _is_state_of_optimizer(node) or is_op(node))
    if states := [type(node).__name__ for node in nodes if _is_state_of_optimizer(node)]:
        raise ValueError(
            f"{name} is or holds an optimizer's state, {states[0]}, and moments are not layers: give the model alone, "
            f"{call}"
        )
    without_state = any(is_op(node) and node.state is None and node.recipe.is_stateful for node in nodes)
    if without_state or any(getattr(node, "dtype", None) == jax.dtypes.float0 for node in nodes):
        raise ValueError(
            f"{name} is the gradient of a model, or a part of one, without its FP8 state or whole numbers: give the "
            f"model itself, {call}"
        )


def require_layers(model: Any, call: str, name: str = "model") -> None:
    """Like `require_whole_model`, for functions to which an array or an op alone is not a model.

    Args:
        model: As in `require_tree`.
        call: As in `require_tree`.
        name: As in `require_tree`.
    """
    require_whole_model(model, call, name)
    if is_op(model):
        raise ValueError(f"{name} is an Fp8DotGeneral, the product of a layer; use {call}, with the model it is in")
    if isinstance(model, hax.NamedArray) or _is_leaf(model):
        raise _without_layers(model, call, name)


def require_single_key(key: Any, name: str = "key") -> None:
    """Raises a ValueError unless an argument is one key of `jax.random.key`."""
    if not (isinstance(key, jax.Array) and jnp.issubdtype(key.dtype, jax.dtypes.prng_key) and key.ndim == 0):
        raise ValueError(f"{name}={key!r} is not a single random key; make one with jax.random.key(seed)")


def holds_optimizer_state(tree: Any) -> bool:
    """Whether a tree is an optimizer's state, or has one in it: Optax makes it of named tuples, models have none."""
    return any(map(_is_named_tuple, jax.tree.leaves(tree, is_leaf=_is_named_tuple)))


def _is_leaf(tree: Any) -> bool:
    return not isinstance(tree, eqx.Module) and jax.tree_util.all_leaves([tree])


def _is_of_optimizer(tree: Any, model_type: type) -> bool:
    """Whether a tree has moments of a model of a class, or is an optimizer's state that needs none.

    A named tuple may also be what a recurrent layer carries, or several models: Optax calls its own `...State`.
    """
    states = [x for x in jax.tree.leaves(tree, is_leaf=_is_named_tuple) if type(x).__name__.endswith("State")]
    is_model = lambda node: isinstance(node, model_type)
    return any(not x or any(map(is_model, jax.tree.leaves(x, is_leaf=is_model))) for x in states)


def _is_state_of_optimizer(node: Any) -> bool:
    """Whether a node is an optimizer's state with layers in it, or one of Optax's."""
    if not (_is_named_tuple(node) and type(node).__name__.endswith("State")):
        return False
    is_module = lambda node: isinstance(node, eqx.Module)
    is_of_optax = type(node).__module__.partition(".")[0] == "optax"
    return is_of_optax or any(map(is_module, jax.tree.leaves(node, is_leaf=is_module)))


def _is_named_tuple(node: Any) -> bool:
    return isinstance(node, tuple) and hasattr(node, "_fields")


def _without_layers(model: Any, call: str, name: str) -> ValueError:
    if model is None:
        shown = "None"
    elif isinstance(model, Fp8Config):
        shown = "an Fp8Config"
    else:
        shown = "a function" if callable(model) else f"of type {type(model).__name__}"
    return ValueError(f"{name} is {shown}, and has no layers; use {call}, with the model itself")


def _item(index: int) -> str:
    return f"its {('first', 'second', 'third')[index]} item" if index < 3 else f"its item {index}"


# --- whether its FP8 state can be used


def check_not_modified(model: Any, *, wait: bool = True) -> None:
    """Raises a ValueError that names the layers, if anything but its own update changed the state of one.

    An optimizer that gets the whole tree, weight decay, an average of models: each of them changes scales, which are
    not parameters. On a device, products with such scales give NaN.

    Args:
        model: A model, or any tree; not checked if it is traced or abstract.
        wait: Whether to wait for state that is being computed; without it, such state is not checked.
    """
    # Paths are slow to make, and needed for the message alone.
    if not any(_is_modified(op.state, wait=wait) for op in all_ops(model)):
        return
    layers = [name or "the model itself" for name, op in named_ops(model) if _is_modified(op.state, wait=wait)]
    if layers:
        raise ValueError(_modified_message(layers))


def _modified_message(layers: list[str]) -> str:
    return (
        f"the FP8 state of {_first(layers)} was changed by something other than its own update: an "
        "optimizer, weight decay or an average that was given the whole model, or gradients that were divided before "
        "state was split from them. Scales are not parameters, and products with them now give NaN. Use TrainStep, or "
        "split state from parameters in your step:\n"
        "    overwrites, grads = partition_for_grad_overwrite(grads)\n"
        "    updates, opt_state = optimizer.update(grads, opt_state, trainable(model))\n"
        "    model = apply_updates(model, updates, overwrites)\n"
        "and start with optimizer.init(trainable(model)). Average models (EMA, SWA, target networks) with\n"
        "    average = training.incremental_update(model, average, step_size=0.01)\n"
        "The state of this model is lost: convert it again, fp8_linear_layers(restore_linear_layers(model), config)"
    )


def require_whole_state(model: Any, *, calibrating: bool = False) -> None:
    """Raises a ValueError that names the layers, if a step would have to update state that is in another part.

    Args:
        model: A model, or a part of one, as `eqx.partition` returns it.
        calibrating: Whether state that training only reads is written too, as that of static scaling.
    """

    def is_missing(state: Any) -> bool:
        missing = isinstance(state, OpState) and state.table.array is None
        return missing and (calibrating or numbers_of(state.scalings) > 0)

    if any(is_missing(op.state) for op in all_ops(model)):
        layers = [name or "the model itself" for name, op in named_ops(model) if is_missing(op.state)]
        raise ValueError(
            f"the FP8 state of {_first(layers)} is not in this part of the model, so its scales would never be "
            f"updated: eqx.partition put it with the frozen weights. {KEEP_STATE_WITH_TRAINED} Or pass the whole "
            "model, and freeze weights in the optimizer: optax.masked(optax.set_to_zero(), mask) at its end"
        )


def require_calibrated(model: Any, *, wait: bool = True) -> None:
    """Raises a ValueError that names the layers, if a static scale is not calibrated yet.

    Args:
        model: A model; not checked if it is traced or abstract.
        wait: As in `uncalibrated_operands`.
    """
    # Paths are slow to make, and needed for the message alone.
    if not any(uncalibrated_operands(op.state, wait=wait) for op in all_ops(model)):
        return
    operands = {name: uncalibrated_operands(op.state, wait=wait) for name, op in named_ops(model)}
    layers = [f"{name or 'the model itself'} ({', '.join(missing)})" for name, missing in operands.items() if missing]
    if layers:
        raise ValueError(
            f"model has static scales that are not calibrated, in {len(layers)} layers: {_first(layers)}. "
            "Calibrate it first: model = step.calibrate(model, *batch) with a TrainStep, or calibrate(model, loss_fn, "
            "[batch]). If you did, the loss did not reach these operands, or they were all zeros or not finite: "
            "calibrate on another batch, leave the layers out with Fp8Config(exclude=...), or give a scale, "
            "StaticScaling(scale=...)"
        )


def require_usable_tables(model: Any, tables: Sequence[Any]) -> None:
    """`check_not_modified` and `require_calibrated`, without a walk over a model whose tables are in order.

    Args:
        model: The model; state that is still being computed is not waited for.
        tables: The tables of its states.
    """
    if not _are_usable(tables_on_host(tables, wait=False)):
        require_calibrated(model, wait=False)
        check_not_modified(model, wait=False)


def _are_usable(tables: Sequence[np.ndarray]) -> bool:
    """Whether all these tables are unmodified, and each of their scales is calibrated."""
    if not tables:
        return True
    columns = ([table[..., column].ravel() for table in tables] for column in (0, -1))
    # Models may be cast to several dtypes.
    scales, guards = (np.concatenate(column, dtype=np.float32, casting="unsafe") for column in columns)
    return not np.isinf(scales).any() and not is_modified(scales, guards)


def _is_modified(state: Any, *, wait: bool = True) -> bool:
    """Whether a state holds a scale that does not match its guard; False if it has no values to read."""
    table = table_on_host(state, wait=wait)
    return table is not None and is_modified(table[..., 0], table[..., -1])


def uncalibrated_operands(state: Any, *, wait: bool = True) -> tuple[str, ...]:
    """The operands of an op whose scale is not calibrated in at least one layer of its stack.

    Args:
        state: An op's state. An abstract or traced state has no values to read, so no operand is reported.
        wait: Whether to wait for a state that is being computed; without it, no operand is reported for such a state.
    """
    if not isinstance(state, OpState):
        return ()
    rows = [row for row, s in enumerate(state.scalings) if isinstance(s, StaticScaling) and s.scale is None]
    table = table_on_host(state, wait=wait) if rows else None
    return () if table is None else tuple(OPERAND_NAMES[row] for row in rows if np.isinf(table[..., row, 0]).any())


def unrecorded_operands(state: Any, *, everywhere: bool = False) -> tuple[str, ...]:
    """The operands of an op whose delayed scale is still the first one, 1, in at least one layer of its stack.

    Steps that were not finite do not count: they record `-inf`, and leave the scale as it was.

    Args:
        state: As in `uncalibrated_operands`.
        everywhere: Whether it must be so in every layer of the stack.
    """
    if not isinstance(state, OpState) or (table := table_on_host(state)) is None:
        return ()
    rows = [row for row, scaling in enumerate(state.scalings) if isinstance(scaling.memory, AmaxHistory)]
    is_first = (table[..., 0] == 1.0) & (table[..., 1:-1] <= 0.0).all(-1)
    of_stack = np.all if everywhere else np.any
    return tuple(OPERAND_NAMES[row] for row in rows if of_stack(is_first[..., row]))


def _first(layers: list[str]) -> str:
    return ", ".join(layers[:3]) + (f" and {len(layers) - 3} more" if len(layers) > 3 else "")


# --- whether it has weights of its own


def require_merged(model: Any) -> None:
    """Raises a ValueError if a model has adapters, where they would be lost.

    Args:
        model: Any model.
    """
    is_adapter = lambda node: isinstance(node, AbstractAdapter)
    if any(map(is_adapter, jax.tree.leaves(model, is_leaf=is_adapter))):
        raise ValueError(
            "model has adapters; pass merge_lora(model), or write them alone: huggingface.export_adapter(model, folder)"
        )


def require_weights(model: Any, name: str, remedy: str) -> None:
    """Raises a ValueError that names the layers for inference, which have no gradients, if there are any.

    Args:
        model: A model, or any tree.
        name: The argument's name.
        remedy: What to do, other than make plain layers.
    """
    nodes = jax.tree_util.tree_flatten_with_path(model, is_leaf=is_quantized_layer)[0]
    served = [path for path, node in nodes if is_quantized_layer(node) and not node.kernel.has_gradient]
    paths = [path_string(path) or "the model itself" for path in served]
    if not paths:
        return
    more = f" and {len(paths) - 3} more" if len(paths) > 3 else ""
    raise ValueError(
        f"{name} was made by quantize_for_inference: it has FP8 data in place of the weight of {', '.join(paths[:3])}"
        f"{more}. {remedy}; or take plain layers, whose weights are the rounded ones: serving.dequantize(model)"
    )


def require_no_quantized_kernels(model: Any, name: str = "model") -> None:
    """Raises a ValueError if a model that is to last has copies of its kernels, which would not follow its weights.

    Args:
        model: A model, or any tree; gradients have no copies.
        name: The argument's name, for the error.
    """
    if not any(_has_quantized_kernel(op) for op in all_ops(model)):
        return
    paths = [path or "the model itself" for path, op in named_ops(model) if _has_quantized_kernel(op)]
    more = f" and {len(paths) - 3} more" if len(paths) > 3 else ""
    raise ValueError(
        f"{name} has quantized kernels, in {', '.join(paths[:3])}{more}: copies of the weights of one step, which do "
        "not change with them. Pass the original model, the argument of quantize_kernels; only losses take the one "
        "with copies"
    )


def _has_quantized_kernel(op: Fp8DotGeneral) -> bool:
    # In gradients there is None instead, or JAX's arrays without elements.
    leaves = jax.tree.leaves(op.quantized_kernel)
    return any(getattr(leaf, "dtype", None) != jax.dtypes.float0 for leaf in leaves)


# --- reading state


def table_on_host(state: Any, *, wait: bool = True) -> np.ndarray | None:
    """The numbers of an op's state; None if it is abstract, traced, deleted or not a state.

    Args:
        state: Anything.
        wait: Whether to wait for state that is being computed; without it, such state gives None.
    """
    tables = tables_on_host([state.table.array], wait=wait) if isinstance(state, OpState) else []
    return tables[0] if tables else None


def tables_on_host(tables: Sequence[Any], *, wait: bool = True) -> list[np.ndarray]:
    """The numbers of those tables that have any: not of abstract, traced and deleted ones.

    Args:
        tables: The tables of several states.
        wait: As in `table_on_host`.
    """
    arrays: list[Any] = []
    for table in tables:
        if isinstance(table, np.ndarray):
            arrays.append(table)
        # JAX's arrays have `is_ready`, but its types do not declare it.
        elif isinstance(table, jax.Array) and not isinstance(table, Tracer) and not table.is_deleted():
            if wait or getattr(table, "is_ready", lambda: True)():
                # On several hosts, each has a copy.
                arrays.append(table if table.is_fully_addressable else table.addressable_data(0))
    # All copies from the device run at the same time.
    return jax.device_get(arrays)
