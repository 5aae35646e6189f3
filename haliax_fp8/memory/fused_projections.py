"""FusedProjections: a module whose projections of one input are one layer, and one product."""

import dataclasses
import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
from haliax.state_dict import (
    ModuleWithStateDictSerialization,
    StateDict,
    from_state_dict,
    to_state_dict,
    unflatten_modules_from_export,
)
from jaxtyping import Array

from .._op import Fp8DotGeneral
from .._state.op_state import OpState
from ..layers.rule import LayerRule
from ..layers.walk import rule_of
from .merge import Kernels, merge_products


class Projection(eqx.Module):
    """Stands in a module where a layer was that is joined with others."""

    name: str = eqx.field(static=True)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Raises a ValueError: its weights are elsewhere."""
        raise ValueError(
            f"{self.name} is part of a joined layer; call the module that contains it, or separate_projections(model)"
        )


class FusedProjections(ModuleWithStateDictSerialization):
    """A module whose layers with the same input are joined: one weight, one scale, one product. By `fuse_projections`.

    Calling it calls the module, whose layers are parts of the joined weight; products of the same value with several
    parts become one (`memory/merge.py`), whose result is split. This covers the module's own `__call__` and the
    functions that it calls directly. Inside the module's own `scan` or checkpoint, layers multiply one by one, with the
    same weights.

    Attributes are those of the module with separate layers: `fused.q_proj.weight` is the layer's part (to change it,
    change `fused.joined`). State dicts are also those of the module, so the fusion does not show in checkpoints. Code
    that recognizes a module by its class does not recognize this one. A call is always traced, so Python's `if` on an
    array fails in it as under `jit`.

    Args:
        module: The module, with a `Projection` for each joined layer.
        joined: The layers, by the names of their parts, `"q_proj+k_proj+v_proj"`.
        parts: For each joined layer, what its rule needs to split it.
        rules: The rules of the layer classes.
    """

    module: Any
    joined: dict[str, Any]
    parts: tuple[tuple[str, tuple[Hashable, ...]], ...] = eqx.field(static=True)
    rules: tuple[LayerRule, ...] = eqx.field(static=True)

    @staticmethod
    def of(module: Any, groups: Sequence[Sequence[str]], rules: tuple[LayerRule, ...]) -> "FusedProjections":
        """The module with layers joined.

        Args:
            module: The module.
            groups: The names of its layers, in groups that read the same tensor.
            rules: The rules of the layer classes.

        Raises:
            ValueError: If layers of a group differ in more than their outputs, or in their recipes.
        """
        joined: dict[str, Any] = {}
        parts: dict[str, tuple[Hashable, ...]] = {}
        for group in groups:
            layers, name = [getattr(module, member) for member in group], "+".join(group)
            rule = rule_of(layers[0], rules)
            try:
                joined[name] = _join(layers, rule)
            except ValueError as error:
                raise ValueError(f"groups contain {list(group)}, whose layers cannot be joined: {error}") from error
            parts[name] = tuple(rule.part(layer) for layer in layers)
            module = _with(module, {member: Projection(member) for member in group})
        return FusedProjections(module, joined, tuple(parts.items()), rules)

    def separated(self) -> Any:
        """The module with its layers apart, each with its part of the weight and with the state of the joined one."""
        return _with(self.module, {name: layer for group in self._split() for name, layer in group.items()})

    def rejoined(self, module: Any) -> "FusedProjections":
        """A module like the separated one, with the same layers joined."""
        return FusedProjections.of(module, [name.split("+") for name, _ in self.parts], self.rules)

    def _split(self) -> list[dict[str, Any]]:
        groups = []
        for name, parts in self.parts:
            layer = self.joined[name]
            layers = _split(layer, parts, rule_of(layer, self.rules))
            groups.append(dict(zip(name.split("+"), layers, strict=True)))
        return groups

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the module returns."""
        groups = self._split()
        module = _with(self.module, {name: layer for group in groups for name, layer in group.items()})
        kernels = [
            _kernels(self.joined[name].weight, [layer.weight for layer in group.values()])
            for (name, _), group in zip(self.parts, groups, strict=True)
        ]
        return _flat(lambda module, args, kwargs: module(*args, **kwargs), kernels)(module, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        # For what is neither a field nor a method here. Fields are missing while a module is being made.
        if name.startswith("__") or name in ("module", "joined", "parts", "rules"):
            raise AttributeError(name)
        if any(name in group.split("+") for group, _ in self.parts):
            return next(group[name] for group in self._split() if name in group)
        is_field = any(field.name == name for field in dataclasses.fields(self.module))
        # A method, or a property, has to see the layers.
        needs_layers = not is_field and hasattr(type(self.module), name)
        return getattr(self.separated() if needs_layers else self.module, name)

    def to_state_dict(self, prefix: str | None = None) -> StateDict:
        """That of the module with its layers apart."""
        return to_state_dict(self.separated(), prefix)

    def from_state_dict(self, state_dict: StateDict, prefix: str | None = None) -> "FusedProjections":
        """Reads what `to_state_dict` wrote, or what the module without fusion did."""
        return self.rejoined(from_state_dict(self.separated(), state_dict, prefix))

    def flatten_for_export(self) -> "_Exported":  # pyright: ignore[reportIncompatibleMethodOverride]
        """The module with its layers apart, each of which Haliax flattens as it would without fusion."""
        return _Exported(self.separated())


class _Exported(ModuleWithStateDictSerialization):
    """What stands for a `FusedProjections` while Haliax flattens layers for a state dict of PyTorch's."""

    module: Any

    def to_state_dict(self, prefix: str | None = None) -> StateDict:
        return to_state_dict(self.module, prefix)

    def from_state_dict(self, state_dict: StateDict, prefix: str | None = None) -> "_Exported":
        return _Exported(from_state_dict(self.module, state_dict, prefix))

    def unflatten_from_export(self, template: FusedProjections) -> FusedProjections:  # pyright: ignore
        return template.rejoined(unflatten_modules_from_export(self.module, template.separated()))


def _abstractly(function: Callable[..., Any], *args: Any) -> Any:
    """Calls a function, for shapes alone where the arguments are."""
    abstract = any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(args))
    return eqx.filter_eval_shape(function, *args) if abstract else function(*args)


def _with(module: Any, attributes: dict[str, Any]) -> Any:
    """The module with other attributes; as JAX rebuilds one from its leaves, without its constructor."""
    new = object.__new__(type(module))
    for field in dataclasses.fields(module):
        if hasattr(module, field.name):
            object.__setattr__(new, field.name, attributes.get(field.name, getattr(module, field.name)))
    return new


def _join(layers: Sequence[Any], rule: LayerRule) -> Any:
    """One layer of several; the state of a converted one is the largest of theirs, in scales and histories."""
    ops = [rule.op(layer) for layer in layers]
    if all(op is None for op in ops):
        return _abstractly(rule.join, layers)
    first = ops[0]
    if first is None or any(op is None or _kind(op) != _kind(first) for op in ops):
        raise ValueError(f"their products differ: {[None if op is None else str(op.recipe) for op in ops]}")
    joined = _abstractly(rule.join, [rule.restore(layer) for layer in layers])
    joined = rule.convert(joined, first.recipe, first.compute_dtype, first.stack)
    op = rule.op(joined)
    assert op is not None
    states = [op.state for op in ops if op is not None and isinstance(op.state, OpState)]
    state = None
    if states:
        apart = [dataclasses.replace(state, input_group=None) for state in states]
        largest = lambda *tables: functools.reduce(jnp.maximum, tables)
        state = _abstractly(functools.partial(jax.tree.map, largest), *apart)
    return rule.with_op(joined, dataclasses.replace(op, state=state, kernel_residual=first.kernel_residual))


def _kind(op: Fp8DotGeneral) -> Hashable:
    shape = op.state.table.array.shape if isinstance(op.state, OpState) else None
    return op.recipe, op.compute_dtype, op.kernel_residual, op.stack, shape


def _split(joined: Any, parts: Sequence[Hashable], rule: LayerRule) -> list[Any]:
    """The layers of a joined one; those of a converted one share its state."""
    split, op = functools.partial(rule.split, parts=parts), rule.op(joined)
    if op is None:
        return _abstractly(split, joined)
    # The state goes past: it may be abstract where the weights are loaded already.
    layers = _abstractly(split, rule.with_op(joined, dataclasses.replace(op, state=None, key=None)))
    ops = [rule.op(layer) for layer in layers]
    return [
        rule.with_op(layer, dataclasses.replace(its, state=op.state, key=op.key))
        for layer, its in zip(layers, ops, strict=True)
        if its is not None
    ]


def _kernels(joined: Any, parts: Sequence[Any]) -> Kernels:
    array = lambda weight: weight.array if isinstance(weight, hax.NamedArray) else weight
    whole, arrays = array(joined), tuple(map(array, parts))
    axis = next(i for i in range(whole.ndim) if whole.shape[i] != arrays[0].shape[i])
    return Kernels(whole, arrays, axis)


def _flat(function: Callable[..., Any], groups: Sequence[Kernels]) -> Callable[..., Any]:
    """The function of trees with its products merged."""

    def call(*args: Any) -> Any:
        arrays, static = eqx.partition(args, eqx.is_array)
        leaves, structure = jax.tree.flatten(arrays)
        of_result: list[Any] = []

        def of_arrays(*leaves: Array) -> list[Array]:
            result = function(*eqx.combine(jax.tree.unflatten(structure, leaves), static))
            arrays, rest = eqx.partition(result, eqx.is_array)
            leaves_of_result, structure_of_result = jax.tree.flatten(arrays)
            of_result[:] = [structure_of_result, rest]
            return leaves_of_result

        results = merge_products(of_arrays, leaves, groups)
        return eqx.combine(jax.tree.unflatten(of_result[0], results), of_result[1])

    return call
