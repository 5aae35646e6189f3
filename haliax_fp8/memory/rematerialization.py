"""rematerialize: makes a model's norms and activations keep only their inputs for the backward pass."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from .._numerics.checks import require, require_bool
from ..devices.catalog import peaks
from ..devices.device import Device
from ..layers.checks import require_layers, require_model
from ..layers.walk import AbstractRematerialized, path_string
from .rematerialization_rules import (
    Rematerialization,
    RematerializationRule,
    default_rematerialization,
    with_rematerialization,
    without_rematerialization,
)


def rematerialize[M](
    model: M,
    *,
    device: Device | str | None = None,
    in_float32: bool | None = None,
    rules: tuple[RematerializationRule, ...] = default_rematerialization,
) -> M:
    """Makes a model's norms, and the activations between its linear layers, keep only their inputs.

    They are computed again in the backward pass, which costs little. `rematerialized` does this for one function; here
    the model's code does not change. Without it, a scan over layers stacks their intermediate values, often in
    float32, and XLA's default flags keep it from fusing the operations after a product. The model may be converted
    before or after this, or not at all.

    Each of these modules becomes an instance of a subclass of its class: attributes, parameters, paths and state dicts
    stay the same, and so do values and gradients, unless `in_float32`. One exception: under `jit`, XLA may then omit
    different roundings to bfloat16. Values are then quantized differently, with errors of the same size; set
    `xla_allow_excess_precision=False` to prevent it. `transfer_optimizer_state` carries an optimizer's state over.
    `describe` lists the modules.

    Args:
        model: The model.
        device: The device that the model will run on, or its name; by default the local one. It decides on float32.
        in_float32: Whether gated activations are computed in float32 and rounded once, which is more accurate. By
            default only on an H100, where compiled programs then move fewer bytes; on an H200 they move more.
        rules: Which classes are changed, and how. For your own feed-forward class, add a `BetweenLayers`.

    Returns:
        The model with these modules changed; `restore_rematerialized` undoes it.

    Raises:
        ValueError: If no rule matches, a module cannot be changed, or the device's name is unknown.

    References:
        Selective recomputation, arXiv:2205.05198, section 5.

    Example:
        >>> embed, key = hax.Axis("embed", 64), jax.random.key(0)
        >>> mlp = hnn.MLP.init(embed, embed, 256, 1, key=key)
        >>> model = {"norm": hnn.LayerNorm.init(embed), "mlp": mlp}
        >>> model = rematerialize(fp8_linear_layers(model))
        >>> describe(model).rematerialized
        {'mlp': 'MLP', 'norm': 'LayerNorm'}
        >>> isinstance(model["norm"], hnn.LayerNorm), model["norm"].weight.axes
        (True, (Axis(name='embed', size=64),))
    """
    require_layers(model, "rematerialize(model)")
    for rule in rules:
        require("rules", rule, RematerializationRule, "BetweenLayers(...) or WholeCall(...)", of="rematerialize")
    if in_float32 is not None:
        require_bool("in_float32", in_float32, of="rematerialize")
    else:
        chosen = Device.default() if device is None else Device.of(device, of="rematerialize")
        in_float32 = _gains_from_float32(chosen)
    dtype = np.dtype(jnp.float32) if in_float32 else None
    changed: list[str] = []

    def change(path: str, module: Any) -> Any:
        rule = next(rule for rule in rules if isinstance(module, rule.module_types))
        plain = without_rematerialization(module)
        refusal = rule.refusal(plain) if isinstance(plain, eqx.Module) else "it is not an eqx.Module"
        if refusal is not None:
            raise ValueError(
                f"rules of rematerialize match {path or 'the model itself'}, a {type(plain).__name__}, which cannot be "
                f"changed: {refusal}"
            )
        changed.append(path)
        return with_rematerialization(module, Rematerialization(rule, dtype if rule.is_gated else None))

    result = _map_modules(change, model, tuple(one for rule in rules for one in rule.module_types))
    if not changed:
        names = sorted({one.__name__ for rule in rules for one in rule.module_types})
        raise ValueError(
            f"model of class {type(model).__name__} has no module that rules of rematerialize match; they match "
            f"{', '.join(names)}. For your own class, add WholeCall((Norm,)) or BetweenLayers((Mlp,), "
            "before=('gate', 'up'), after=('down',), gated=True) to rules"
        )
    return result


def restore_rematerialized[M](model: M) -> M:
    """The inverse of `rematerialize`: gives every module its original class.

    Args:
        model: The model, which may have been converted and trained since.

    Example:
        >>> bool(eqx.tree_equal(restore_rematerialized(rematerialize(model)), model))
        True
    """
    require_model(model, "restore_rematerialized(model)")
    return _map_modules(lambda path, module: without_rematerialization(module), model, (AbstractRematerialized,))


def _gains_from_float32(device: Device) -> bool:
    """Whether XLA then computes a gated activation where its gradients are cast. `docs/performance.md` has the figures.

    XLA's cost model weighs computing the activation twice against storing it. With the bandwidth of an H100 it computes
    it twice, if that is in float32. With that of an H200 or a B200 it stores it, in float32 at twice the bytes.
    """
    return device.is_hopper and device.peaks is not None and device.peaks.bandwidth <= peaks["h100"].bandwidth


def _map_modules(change: Callable[[str, Any], Any], tree: Any, types: tuple[type, ...]) -> Any:
    """The tree with every module of these classes changed, innermost modules first."""

    def walk(prefix: tuple[Any, ...], tree: Any) -> Any:
        def visit(path: tuple[Any, ...], node: Any) -> Any:
            if not isinstance(node, types):
                return node
            path = (*prefix, *path)
            return change(path_string(path), walk(path, node))

        is_inner = lambda node: node is not tree and isinstance(node, types)
        return jax.tree_util.tree_map_with_path(visit, tree, is_leaf=is_inner)

    inner = walk((), tree)
    return change("", inner) if isinstance(tree, types) else inner
