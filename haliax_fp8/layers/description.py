"""describe: what every linear layer of a model runs in."""

from typing import Any

import haliax as hax
import haliax.nn as hnn

from .._state.op_state import OpState
from ..devices.device import Device, is_device_name
from ..recipes.recipe import OPERAND_NAMES, Recipe
from ..recipes.scaling import DelayedScaling
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
from .rule import LayerRule, Refused
from .served import AbstractServedLayer
from .uncalibrated import uncalibrated_operands, unrecorded_operands


def describe(
    model: Any,
    config: Fp8Config | None = None,
    *,
    device: Device | str | None = None,
    predict: FasterOn | None = None,
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

    Returns:
        The layers; `print` shows them as a table, and `summary` is one line for the start of a program.

    Raises:
        ValueError: If `model` is not a tree of layers, the device's name is unknown, or `config` is not an `Fp8Config`;
            or if anything but its own update changed the FP8 state of the model.

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
                recorded=None if op is None else _recorded(op.state),
                scales="" if op is None else op.recipe.scales,
                is_linear=text is not None or not _is_of_another_kind(layer, rule),
            )
        )
    return ModelDescription(tuple(rows), named, predict, dict(find_rematerialized(model)))


def _is_of_another_kind(layer: Any, rule: LayerRule) -> bool:
    """Whether a layer in high precision does not count as a linear one, such as an embedding."""
    is_optional = isinstance(layer, hnn.Embedding) or isinstance(rule.refusal(layer), OnlyIfNamed)
    return is_optional or isinstance(rule, Refused)


def _kept_reasons(model: Any) -> dict[str, str]:
    """Why layers stay in high precision, by path, as far as the model's conversions said."""
    # All ops of a conversion keep one object.
    found = {id(op.left_out): op.left_out.reasons for op in all_ops(model) if op.left_out is not None}
    return {path: reason for reasons in found.values() for path, reason in reasons.items()}


def _recorded(state: Any) -> bool | None:
    """Whether the delayed scales of an op have seen a product, as far as they can be read; None if it has none."""
    if not isinstance(state, OpState):
        return None
    named = zip(OPERAND_NAMES, state.scalings, strict=False)
    delayed = {operand for operand, scaling in named if isinstance(scaling, DelayedScaling)}
    # An output gradient of zeros leaves its history empty, even in training.
    expected = delayed - {"output_grad"} or delayed
    return None if not delayed else expected.isdisjoint(unrecorded_operands(state))


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
