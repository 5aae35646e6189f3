"""describe: every linear layer and op of a model with its recipe, or the reason why it has none."""

import dataclasses
import os.path
import re
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import Any

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
import jax.numpy as jnp
from jax.tree_util import GetAttrKey, KeyEntry
from jaxtyping import PyTree

from .._einsum import Fp8Einsum
from .._jax.used import depends_on
from .._op import Fp8DotGeneral
from .._state.op_state import OpState, OverwriteWithGradient
from .._tensor_names import is_head
from ..devices.device import Device
from ..recipes.catalog import as_recipe
from ..recipes.recipe import OPERAND_NAMES, Recipe
from ..recipes.scaling import AmaxHistory, DelayedScaling
from ..recipes.support import supported
from .checks import check_not_modified, require_layers, uncalibrated_operands, unrecorded_operands
from .config import Fp8Config, as_config
from .convert import Decision, decide
from .description import NOT_YET, LayerDescription, ModelDescription
from .only_where_faster import FasterOn
from .quantized import is_quantized_layer
from .rule import LayerRule, OnlyIfNamed
from .walk import STACKED, all_ops, find_layers, find_layers_and_ops, is_op, map_layers_in_stacks, path_string, rule_of


def describe(
    model: PyTree,
    loss_fn: Callable[..., Any] | None = None,
    *batch: Any,
    config: Fp8Config | None = None,
    device: Device | str | None = None,
    predict: FasterOn | None = None,
    step: Any = None,
) -> ModelDescription:
    """Lists every linear layer of a model with its recipe, or the reason why it stays in high precision.

    A product of a module of your own, an `Fp8DotGeneral` or `Fp8Einsum`, has a row and counts as a layer.

    Args:
        model: A converted model, or any other tree of layers.
        loss_fn: `loss_fn(model, *batch)`, to find layers that it never calls, and why: a model may multiply by a
            layer's weight itself. It is traced, not run. Without it, histories alone tell, once there are some.
        *batch: The arguments of `loss_fn` after the model. Their shapes, `jax.ShapeDtypeStruct`, are enough.
        config: Another configuration than the model was converted with, to see what that would do; needed for layers of
            custom rules.
        device: The device, or its name such as `"h100"`, for which to report whether each layer's products are native
            or emulated; by default the local one.
        predict: The device and tokens for which to predict the gain of FP8, such as `FasterOn("h100", tokens=8192)`;
            by default those of the first `FasterOn` among `targets`, if any. A layer in high precision is predicted
            with the recipe that it would get.
        step: A `TrainStep` with phases, to list what the layers run in from each of them on.

    Returns:
        The layers; `print` shows them as a table, and `summary` is one line for the start of a program.

    Raises:
        ValueError: If `model` is not a tree of layers, or is an optimizer's state or gradients; if the device's name is
            unknown, or `config` is not an `Fp8Config`; if `loss_fn` is not a function; or if anything but its own
            update changed the FP8 state of the model.

    Example:
        >>> In, Out = hax.Axis("in", 8), hax.Axis("out", 4)
        >>> layer = hax.nn.Linear.init(In, Out, key=jax.random.key(0))
        >>> describe({"up": layer})["up"].reason
        'not converted'
    """
    require_layers(model, "describe(model)")
    check_not_modified(model)
    named = None if device is None else Device.of(device, of="describe")
    chosen = Device.default() if named is None else named
    config_in_use = as_config(config)
    predict = next(iter(config_in_use.faster_on), None) if predict is None else predict
    reasons = _reasons_of_conversion(model) if config is None else {}
    calls: Mapping[str, str] = {}
    if loss_fn is not None:
        _require_loss(loss_fn)
        calls = calls_of_loss(model, loss_fn, batch, config_in_use.rules)
    decisions, rows = decide(model, config_in_use), []
    for path, (node, stack) in find_layers_and_ops(model, config_in_use.rules).items():
        if is_op(node):
            known, support = _of_op(node, calls.get(path)), supported(node.recipe, chosen)
            rows.append(LayerDescription(path, type(node).__name__, _sizes(stack), support=support, **known))
            continue
        decision = decisions[path]
        rule, kernel, op = decision.rule, decision.rule.kernel(node), decision.rule.op(node)
        recipe, known = _of_layer(decision, reasons.get(path), calls.get(path))
        support = None if recipe is None else kernel.support(recipe, chosen)
        recipe, residual = decision.recipe, config_in_use.kernel_residual
        if op is not None:
            recipe, residual = op.recipe, op.kernel_residual
        elif decision.refusal is None:
            recipe = recipe or config_in_use.resolved_recipe
        prediction = predict and recipe and predict.predict(rule, node, stack, recipe, residual)
        rows.append(LayerDescription(path, kernel.text, _sizes(stack), support=support, prediction=prediction, **known))
    if any(row.recorded for row in rows):
        is_new = lambda row: row.recorded is False and row.uncalled is None
        rows = [dataclasses.replace(row, uncalled=NOT_YET) if is_new(row) else row for row in rows]
    else:
        # Before the first step, no operand is worth a word.
        rows = [dataclasses.replace(row, unrecorded=()) for row in rows]
    others = tuple(_arrays_outside(model, config_in_use.rules))
    head = _head(rows, decisions) if all_ops(model) else ""
    phases, rules = ((), ()) if step is None else (step.phases, step.rules)
    plan = [
        f"From step {phase.start}: {describe(phase.applied(model, rules), config=config, device=device).summary}"
        for phase in phases
    ]
    return ModelDescription(tuple(rows), named, predict, others, head, tuple(plan))


def _require_loss(loss_fn: Any) -> None:
    if isinstance(loss_fn, eqx.Module) or not callable(loss_fn):
        raise ValueError(
            f"loss_fn is of type {type(loss_fn).__name__}, but must be a function: describe(model, loss_fn, x, y), "
            "which calls loss_fn(model, x, y). What else it takes is named: describe(model, config=..., device=...)"
        )


def _reasons_of_conversion(model: Any) -> dict[str, str]:
    """Why layers stay in high precision, by path, as far as the model's conversions said."""
    # All ops of a conversion keep one object.
    conversions = {id(op.skipped): op.skipped.reasons for op in all_ops(model) if op.skipped is not None}
    return {path: reason for reasons in conversions.values() for path, reason in reasons.items()}


def reasons_of_layers(tree: Any) -> dict[str, str]:
    """Why layers of any tree stay in high precision, by path, where a conversion said so or a rule refuses them."""
    decisions = {path: one for path, one in decide(tree, Fp8Config()).items() if one.rule.op(one.layer) is None}
    reasons = {path: one.reason for path, one in decisions.items()} | _reasons_of_conversion(tree)
    return {path: reason for path, reason in reasons.items() if reason}


def _is_of_another_kind(layer: Any, rule: LayerRule) -> bool:
    """Whether a layer in high precision does not count as a linear one, such as an embedding."""
    return isinstance(layer, hnn.Embedding) or isinstance(rule.refusal(layer), OnlyIfNamed)


def _of_op(op: Fp8DotGeneral, uncalled: str | None) -> dict[str, Any]:
    """What is known of an op, by the names of a row's fields."""
    return {
        "recipe": str(op.recipe),
        "products": op.recipe.precisions,
        "uncalibrated": uncalibrated_operands(op.state),
        "scales": op.recipe.scale_rounding,
        "uncalled": uncalled,
        **_recorded(op),
    }


def _of_layer(decision: Decision, reason: str | None, uncalled: str | None) -> tuple[Recipe | None, dict[str, Any]]:
    """The recipe that a layer multiplies with, None in high precision; and what is known of it, as in `_of_op`."""
    layer, rule = decision.layer, decision.rule
    if (op := rule.op(layer)) is not None:
        return op.recipe, _of_op(op, uncalled)
    if is_quantized_layer(layer):
        kernel, stored = layer.kernel, layer.kernel.storage.name
        if kernel.recipe is None:
            return None, {"reason": f"stored in {stored}, {kernel.text}", "stored": stored}
        products = {"fprop": kernel.recipe.precisions["fprop"]}
        return kernel.recipe, {"recipe": kernel.text, "stored": stored, "products": products}
    is_linear = not _is_of_another_kind(layer, rule)
    return None, {"reason": reason or decision.reason or "not converted", "is_linear": is_linear}


def _recorded(op: Fp8DotGeneral) -> dict[str, Any]:
    """What is known of an op's amaxes, as far as they can be read."""
    if not isinstance(op.state, OpState):
        return {}
    named = zip(OPERAND_NAMES, op.state.scalings, strict=False)
    delayed = {operand for operand, scaling in named if isinstance(scaling.memory, AmaxHistory)}
    # An output gradient of zeros leaves its history empty, even in training.
    expected = delayed - {"output_grad"} or delayed
    unrecorded = tuple(operand for operand in unrecorded_operands(op.state) if operand in expected)
    recorded = not expected.issubset(unrecorded_operands(op.state, everywhere=True)) if delayed else None
    return {"recorded": recorded, "unrecorded": unrecorded}


def _sizes(stack: tuple[hax.Axis, ...]) -> str:
    return " × ".join(f"{axis.name} {axis.size}" for axis in stack)


_LAST_OF_A_LIST = re.compile(r"[^\d.][^.]*\.\d+")


def _head(rows: Sequence[LayerDescription], layers: Container[str]) -> str:
    """The path of the converted layer whose output the loss seems to read, by its name or its place; or nothing.

    Args:
        rows: All rows.
        layers: The paths of those that a conversion can leave out.
    """
    alone = [row for row in rows if row.is_linear and not row.stacked]
    named = [row for row in alone if is_head(row.path)]
    above = [row.path.rpartition(".")[0] for row in alone]
    # The last layer of a list of layers, as in an MLP.
    in_list = len(alone) > 1 and above[-1] == above[-2] and _LAST_OF_A_LIST.fullmatch(alone[-1].path)
    last = named[-1:] or (alone[-1:] if in_list and alone[-1] is rows[-1] else [])
    return last[0].path if last and last[0].is_fp8 and last[0].path in layers else ""


def recipes_of(model: Any) -> list[Recipe]:
    """The recipes of a model's FP8 products, each once.

    Args:
        model: A converted model, or any other tree.
    """
    return list(dict.fromkeys(op.recipe for op in all_ops(model)))


# --- which layers a loss calls


MULTIPLIES_ITSELF = "never called: the model multiplies by its weight itself; exclude it"


UNUSED = "never called: the loss does not use this layer"


def calls_of_loss(
    model: Any, loss_fn: Callable[..., Any], batch: tuple[Any, ...], rules: tuple[LayerRule, ...]
) -> dict[str, str]:
    """Why a loss does not call layers and ops, by path; empty for those that it calls. It is traced, not run.

    Nothing is said of an op that has neither a rule nor state.

    Args:
        model: A converted model.
        loss_fn: `loss_fn(model, *batch)`.
        batch: Its arguments after the model: arrays, or their shapes.
        rules: The rules of the model's layers.
    """
    recipe = as_recipe(DelayedScaling(amax_history_length=1))

    def tag(path: str, layer: Any, stack: tuple[Any, ...]) -> Any:
        rule = rule_of(layer, rules)
        op = rule.op(layer)
        if op is None:
            return layer
        # Every op gets a state, and a loss that calls the op depends on it.
        made = rule.kernel(layer).init_op(recipe, op.compute_dtype, stack)
        return rule.with_op(layer, dataclasses.replace(made, allow_dense_groups=True))

    # An op without a rule has the state that it has, or none.
    tagged = map_layers_in_stacks(tag, model, rules)
    is_array = lambda x: eqx.is_array(x) or isinstance(x, jax.ShapeDtypeStruct)
    arrays, static = eqx.partition((tagged, batch), is_array)

    def value(arrays: Any) -> Any:
        model, batch = eqx.combine(arrays, static)
        return jax.tree.leaves(loss_fn(model, *batch))[0]

    leaves, structure = jax.tree.flatten(arrays)
    used = depends_on(lambda leaves: value(jax.tree.unflatten(structure, leaves)), leaves)
    calls = {}
    for path, (node, _) in find_layers_and_ops(jax.tree.unflatten(structure, used)[0], rules).items():
        op = node if is_op(node) else rule_of(node, rules).op(node)
        states = [] if op is None else jax.tree.leaves(op.state)
        if states:
            calls[path] = "" if any(states) else _why_not(node)
    return calls


def _why_not(layer: Any) -> str:
    """Why a loss does not call a layer, from whether it depends on each of its arrays; or an op, which has none."""
    if is_op(layer):
        return UNUSED
    paths = [path for path, is_used in jax.tree_util.tree_leaves_with_path(layer) if is_used]
    is_weight = lambda path: path[0] == GetAttrKey("weight") or (len(path) == 1 and path[0] != GetAttrKey("bias"))
    return MULTIPLIES_ITSELF if any(map(is_weight, paths)) else UNUSED


# --- arrays that belong to no layer


def _arrays_outside(model: Any, rules: tuple[LayerRule, ...]) -> list[str]:
    """The paths of floating-point arrays of two or more dimensions that belong to no layer with a rule.

    Axes of stacks and ensembles do not count, nor do the arrays of Equinox's and Haliax's own classes, such as
    embeddings and norms, or of what holds an op of its own.

    Args:
        model: Any tree.
        rules: The rules of the layer classes that are known.
    """
    layer_types = tuple(jax.tree.leaves([rule.layer_type for rule in rules]))
    ensembles = _ensembles(model, rules)
    paths: list[str] = []

    def visit(path: tuple[KeyEntry, ...], node: Any, stack: tuple[str, ...], *, is_owned: bool) -> None:
        if isinstance(node, (*layer_types, OverwriteWithGradient)) or is_op(node):
            return
        if isinstance(node, hax.NamedArray) or _is_array(node):
            if not is_owned and _dimensions(node, path, stack, ensembles) >= 2:
                paths.append(path_string(path))
            return
        if isinstance(node, hnn.Stacked):
            visit((*path, STACKED), node.stacked, (*stack, node.Block.name), is_owned=False)
            return
        is_inside = is_owned and not isinstance(node, eqx.Module)
        is_owned = is_inside or type(node).__module__.startswith(("equinox.nn", "haliax.nn")) or _multiplies(node)
        for key, child in _children(node):
            visit((*path, *key), child, stack, is_owned=is_owned)

    visit((), model, (), is_owned=False)
    return paths


def _children(node: Any) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """What is one level below a node; nothing for a leaf."""
    for path, child in jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda x: x is not node)[0]:
        if child is not node:
            yield path, child


def _multiplies(node: Any) -> bool:
    """Whether a module, list or dict has an op or an einsum for its own arrays, also in lists and dicts of it."""
    is_inner = lambda value: value is not node and isinstance(value, eqx.Module)
    return any(isinstance(x, Fp8DotGeneral | Fp8Einsum) for x in jax.tree.leaves(node, is_leaf=is_inner))


def _is_array(node: Any) -> bool:
    is_array = eqx.is_array(node) or isinstance(node, jax.ShapeDtypeStruct)
    return is_array and jnp.issubdtype(node.dtype, jnp.floating)


def _dimensions(node: Any, path: tuple[KeyEntry, ...], stack: tuple[str, ...], ensembles: Mapping[str, int]) -> int:
    """How many axes an array has, without those of stacks and ensembles."""
    if isinstance(node, hax.NamedArray):
        return len([name for name in node.axis_names if name not in stack]) if _is_array(node.array) else 0
    if not ensembles:
        return node.ndim - len(stack)
    # A plain array does not say which of its axes are of ensembles: the nearest layer's kernel does.
    common = lambda other: len(os.path.commonprefix([path_string(path).split("."), other.split(".")]))
    nearest = max(ensembles, key=common)
    return node.ndim - (ensembles[nearest] if common(nearest) else min(ensembles.values()))


def _ensembles(model: Any, rules: tuple[LayerRule, ...]) -> dict[str, int]:
    """How many axes of ensembles and stacks are in front of each layer's kernel, by path."""
    counts = {}
    for path, (layer, stack) in find_layers(model, rules).items():
        ensemble, inner = rule_of(layer, rules).kernel(layer).members_and_stack(stack)
        counts[path] = len(ensemble) + len(inner)
    return counts
