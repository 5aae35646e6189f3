"""describe: what every linear layer of a model runs in."""

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import haliax as hax
import haliax.nn as hnn

from .._op import Fp8DotGeneral
from .._state.op_state import OpState
from ..devices.device import Device, is_device_name
from ..recipes.recipe import OPERAND_NAMES, Recipe
from ..recipes.scaling import DelayedScaling
from .arrays_outside import arrays_outside
from .calls import with_calls_of_loss
from .config import Fp8Config, as_config
from .convert import decide
from .description_result import ModelDescription
from .layer_description import LayerDescription
from .model_argument import require_layers
from .only_if_named import OnlyIfNamed
from .only_where_faster import FasterOn
from .ops import all_ops
from .own_state import require_own_state
from .rematerialization import find_rematerialized
from .rule import LayerRule
from .served import AbstractServedLayer
from .uncalibrated import uncalibrated_operands, unrecorded_operands


def describe(
    model: Any,
    config: Fp8Config | None = None,
    *,
    device: Device | str | None = None,
    predict: FasterOn | None = None,
    loss_fn: Callable[..., Any] | None = None,
    batch: Any = (),
) -> ModelDescription:
    """Lists every linear layer of a model with its recipe, or the reason why it stays in high precision.

    Args:
        model: A converted model, or any other tree.
        config: Another configuration than the model was converted with, to see what that would do; needed for layers of
            custom rules.
        device: The device, or its name such as `"h100"`, for which to report whether each layer's products are native
            or emulated; by default the local one.
        predict: The device and tokens for which to predict the gain of FP8, such as `FasterOn("h100", tokens=8192)`;
            by default those of the configuration's `only_if`, if any. A layer in high precision is predicted with the
            recipe that it would get.
        loss_fn: `loss_fn(model, *batch)`, to find layers that it never calls: a model may multiply by a layer's weight
            itself. It is traced, not run. Without it, a training step or `calibrate` has found those whose recipe
            keeps state.
        batch: The arguments of `loss_fn` after the model, as in `calibrate`: one, or a tuple of several. Their shapes,
            `jax.ShapeDtypeStruct`, are enough.

    Returns:
        The layers; `print` shows them as a table, and `summary` is one line for the start of a program.

    Raises:
        ValueError: If `model` is not a tree of layers, the device's name is unknown, or `config` is not an `Fp8Config`;
            if `loss_fn` is not a function, or there is a batch without one; or if anything but its own update changed
            the FP8 state of the model.

    Example:
        >>> In, Out = hax.Axis("in", 8), hax.Axis("out", 4)
        >>> layer = hax.nn.Linear.init(In, Out, key=jax.random.key(0))
        >>> describe({"up": layer})["up"].reason
        'not converted'
    """
    require_layers(model, "describe(model)")
    _require_no_device(config)
    require_own_state(model)
    named = None if device is None else Device.of(device, of="describe")
    chosen = Device.default() if named is None else named
    given = as_config(config)
    predict = given.only_if if predict is None else predict
    kept = _kept_reasons(model) if config is None else {}
    if loss_fn is not None:
        _require_loss(loss_fn)
        model = with_calls_of_loss(model, loss_fn, batch if isinstance(batch, tuple) else (batch,), given.rules)
    elif not (isinstance(batch, tuple) and not batch):
        raise ValueError("batch was given without loss_fn; use describe(model, loss_fn=loss_fn, batch=(x, y))")
    rows = []
    for path, decision in decide(model, given).items():
        layer, rule, stack = decision.layer, decision.rule, decision.stack
        op, kernel = rule.op(layer), rule.kernel(layer)
        recipe, residual = decision.selected, given.kernel_residual
        text, multiplied = None, None
        if op is not None:
            recipe, residual = op.recipe, op.kernel_residual
            text, multiplied = str(op.recipe), op.recipe
        elif isinstance(layer, AbstractServedLayer):
            text, multiplied = layer.kernel.text, layer.kernel.recipe
        rows.append(
            LayerDescription(
                path=path,
                shape=kernel.text,
                stacked=_sizes(stack),
                recipe=text,
                reason="" if text is not None else kept.get(path) or decision.reason or "not converted",
                support=None if multiplied is None else kernel.support(multiplied, chosen),
                prediction=predict and recipe and predict.predict(rule, layer, stack, recipe, residual),
                uncalibrated=() if op is None else uncalibrated_operands(op.state),
                **({} if op is None else _recorded(op, is_traced=loss_fn is not None)),
                is_fp4=multiplied is not None and multiplied.kernel.format.bits <= 4,
                scales="" if op is None else op.recipe.scales,
                is_linear=text is not None or not _is_of_another_kind(layer, rule),
            )
        )
    if not any(row.recorded for row in rows):
        # Before the first step, no operand is worth a word.
        rows = [dataclasses.replace(row, unrecorded=()) for row in rows]
    others = tuple(arrays_outside(model, given.rules))
    head = _head(rows) if all_ops(model) else ""
    return ModelDescription(tuple(rows), named, predict, dict(find_rematerialized(model)), others, head)


def _is_of_another_kind(layer: Any, rule: LayerRule) -> bool:
    """Whether a layer in high precision does not count as a linear one, such as an embedding."""
    return isinstance(layer, hnn.Embedding) or isinstance(rule.refusal(layer), OnlyIfNamed)


_HEADS = ("head", "lm_head", "classifier", "logits", "to_logits", "unembed", "output", "output_layer", "out_layer")
_LAST_OF_A_LIST = re.compile(r"[^\d.][^.]*\.\d+")


def _head(rows: Sequence[LayerDescription]) -> str:
    """The path of the converted layer whose output the loss seems to read, by its name or its place; or nothing."""
    alone = [row for row in rows if row.is_linear and not row.stacked]
    named = [row for row in alone if row.path.rpartition(".")[2] in _HEADS]
    above = [row.path.rpartition(".")[0] for row in alone]
    # The last layer of a list of layers, as in an MLP.
    in_list = len(alone) > 1 and above[-1] == above[-2] and _LAST_OF_A_LIST.fullmatch(alone[-1].path)
    last = named[-1:] or (alone[-1:] if in_list and alone[-1] is rows[-1] else [])
    return last[0].path if last and last[0].is_fp8 else ""


def _require_loss(loss_fn: Any) -> None:
    if isinstance(loss_fn, eqx.Module) or not callable(loss_fn):
        raise ValueError(
            f"loss_fn is of type {type(loss_fn).__name__}, but must be a function: describe(model, loss_fn=loss_fn, "
            "batch=(x, y)), which calls loss_fn(model, x, y)"
        )


def _kept_reasons(model: Any) -> dict[str, str]:
    """Why layers stay in high precision, by path, as far as the model's conversions said."""
    # All ops of a conversion keep one object.
    found = {id(op.left_out): op.left_out.reasons for op in all_ops(model) if op.left_out is not None}
    return {path: reason for reasons in found.values() for path, reason in reasons.items()}


def _recorded(op: Fp8DotGeneral, *, is_traced: bool) -> dict[str, Any]:
    """What is known of an op's amaxes, as far as they can be read, and of its calls."""
    uncalled = None if op.left_out is None else op.left_out.uncalled
    if not isinstance(op.state, OpState):
        return {"uncalled": uncalled}
    named = zip(OPERAND_NAMES, op.state.scalings, strict=False)
    delayed = {operand for operand, scaling in named if isinstance(scaling, DelayedScaling)}
    # An output gradient of zeros leaves its history empty, even in training.
    expected = delayed - {"output_grad"} or delayed
    unrecorded = tuple(operand for operand in unrecorded_operands(op.state) if operand in expected)
    recorded = len(unrecorded) < len(expected) if delayed else None
    if recorded and uncalled and not is_traced:
        uncalled = None  # another loss than the last one calls it
    return {"recorded": recorded, "unrecorded": unrecorded, "uncalled": uncalled}


def _require_no_device(config: Any) -> None:
    if isinstance(config, Device) or (isinstance(config, str) and is_device_name(config)):
        shown = repr(config) if isinstance(config, str) else "..."
        raise ValueError(f"config is a device; use describe(model, device={shown})")


def recipes_of(model: Any) -> list[Recipe]:
    """The recipes of a model's FP8 products, each once.

    Args:
        model: A converted model, or any other tree.
    """
    return list(dict.fromkeys(op.recipe for op in all_ops(model)))


def _sizes(stack: tuple[hax.Axis, ...]) -> str:
    return " × ".join(f"{axis.name} {axis.size}" for axis in stack)
