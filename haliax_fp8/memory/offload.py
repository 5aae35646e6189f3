"""HostOptimizer: float32 masters and an optimizer's state in host memory, updated layer by layer."""

from collections.abc import Iterator, Mapping
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Float32

from ..layers.walk import path_string


type Named = Mapping[str, Float[Array, "..."]]


class HostState(eqx.Module):
    """The state of `HostOptimizer`: masters by name, and the optimizer's state, for each stack and for the rest.

    Args:
        masters: The parameters in float32, by the size of their stack (0 outside stacks), then by path.
        optimizer: The optimizer's state for each of these dicts.
    """

    masters: dict[int, dict[str, Array]]
    optimizer: dict[int, Any]


class HostOptimizer(eqx.Module):
    """An Optax optimizer whose float32 masters and moments are in `pinned_host`, not on the device.

    The device keeps the parameters in the dtype of the model, such as bfloat16. In a `lax.scan` over the layers of a
    stack, an update moves one layer's masters and moments to the device, updates them, and moves them back. Parameters
    outside stacks are updated together after that.

    The device then holds 2 bytes per weight for parameters, 2 for gradients, and a few layers, instead of 16 with
    float32 masters and Adam. Every step moves 12 bytes per weight to the device and back. See `docs/many-devices.md`.

    Args:
        optimizer: It sees dicts of float32 arrays by path, `{"blocks.stacked.mlp.up.weight": ...}`: those of one layer
            of a stack at a time, without the stack's axis, then all that are outside stacks. So it must update each
            parameter independently, as SGD, Adam, AdamW and Lion do. Clip the global norm of the gradients beforehand.
        layers: The name of the axis that stacks layers, the first axis of stacked parameters.

    Example:
        >>> host = HostOptimizer(optax.sgd(0.5))
        >>> params = {"weight": jnp.ones(3, jnp.bfloat16)}
        >>> state = host.init(params)
        >>> state.masters[0]["weight"].sharding.memory_kind
        'pinned_host'
        >>> params, state = host.update({"weight": jnp.ones(3, jnp.bfloat16)}, state, params)
        >>> params["weight"]
        Array([0.5, 0.5, 0.5], dtype=bfloat16)
    """

    optimizer: optax.GradientTransformation
    layers: str = eqx.field(static=True, default="layers")

    def __check_init__(self) -> None:
        if not (hasattr(self.optimizer, "init") and hasattr(self.optimizer, "update")):
            raise ValueError(
                f"optimizer={self.optimizer!r} of HostOptimizer is not an optimizer; use optax.adamw(1e-3)"
            )

    def init(self, params: Any) -> HostState:
        """Masters that equal the parameters, and the optimizer's initial state, in host memory.

        Args:
            params: `trainable(model)`, with arrays; without FP8 state.

        Raises:
            ValueError: If there is nothing to train.
        """
        groups = self._groups(params)
        if not groups:
            raise ValueError(
                "params hold no arrays; pass trainable(model) of a model with arrays, inside eval_shape too"
            )
        masters = {size: _to_host({name: _widened(x) for name, x in group.items()}) for size, group in groups.items()}
        states = {}
        for size, group in groups.items():
            first = self.optimizer.init({name: _widened(x) for name, x in group.items()})
            states[size] = _to_host(first) if size == 0 else self._with_layers_on_host(size, group, first)
        return HostState(masters, states)

    def update[P](self, gradients: P, state: HostState, params: P) -> tuple[P, HostState]:
        """New parameters, and the new state in host memory. Call it inside `jit`, with parameters and state donated.

        Let the jitted function return model and state in the order of its arguments: JAX assigns donated memory to
        results of the same shape and dtype in order, without checking whether it is host memory.

        Args:
            gradients: The second part of `partition_for_grad_overwrite(gradients)`.
            state: From `init` or the previous step.
            params: `trainable(model)`, for the structure and the dtypes.

        Returns:
            The parameters, rounded from the masters: put them into the model with `eqx.combine(params, model)`.

        Raises:
            ValueError: If gradients or state belong to other parameters.
        """
        param_groups, gradient_groups = self._groups(params), self._groups(gradients)
        same = {size: group.keys() for size, group in param_groups.items()}
        for name, other in (("gradients", gradient_groups), ("state", state.masters)):
            if {size: group.keys() for size, group in other.items()} != same:
                raise ValueError(f"{name} belong to other parameters; start with host.init(trainable(model))")
        masters, states, new = {}, {}, {}
        for size in sorted(param_groups, reverse=True):
            args = gradient_groups[size], state.masters[size], state.optimizer[size]
            dtypes = {name: x.dtype for name, x in param_groups[size].items()}
            run = self._whole if size == 0 else self._in_layers
            narrow, masters[size], states[size] = run(*args, dtypes)
            new |= narrow
        return _with_arrays(params, new), HostState(masters, states)

    def _groups(self, tree: Any) -> dict[int, dict[str, Array]]:
        groups: dict[int, dict[str, Array]] = {}
        for name, node in _named(tree):
            stacked = isinstance(node, hax.NamedArray) and node.axes and node.axes[0].name == self.layers
            array = node.array if isinstance(node, hax.NamedArray) else node
            groups.setdefault(array.shape[0] if stacked else 0, {})[name] = array
        return groups

    def _stacked(self, size: int, group: Mapping[str, Any], state: Any) -> Any:
        """Which leaves of a stack's state have an entry per layer: those with one more axis than a layer's own."""
        layer = {name: jax.ShapeDtypeStruct(x.shape[1:], jnp.float32) for name, x in group.items()}
        layer_state = jax.eval_shape(self.optimizer.init, layer)
        if jax.tree.structure(state) != jax.tree.structure(layer_state):
            raise ValueError(
                "optimizer stores the state of one layer otherwise than that of a stack, as quantized_state does if "
                "min_size lies between their numbers of elements; use quantized_state(..., min_size=0) and choose with "
                "where="
            )
        return jax.tree.map(lambda whole, part: whole.shape == (size, *part.shape), state, layer_state)

    def _with_layers_on_host(self, size: int, group: Mapping[str, Any], state: Any) -> Any:
        """The state with leaves that have an entry per layer in host memory; counters stay on the device."""
        is_stacked = self._stacked(size, group, state)
        return jax.tree.map(lambda x, on_host: _to_host(x) if on_host else x, state, is_stacked)

    def _step(self, gradients: Named, masters: Named, state: Any, dtypes: Mapping[str, Any]) -> tuple[Any, Any, Any]:
        wide = {name: _widened(g) for name, g in gradients.items()}
        # Optax's types allow trees, not dictionaries.
        updates: Any
        updates, state = self.optimizer.update(wide, state, masters)
        masters = {name: master + updates[name] for name, master in masters.items()}
        return {name: x.astype(dtypes[name]) for name, x in masters.items()}, masters, state

    def _whole(self, gradients: Any, masters: Any, state: Any, dtypes: Any) -> tuple[Any, Any, Any]:
        narrow, masters, state = self._step(gradients, _to_device(masters), _to_device(state), dtypes)
        return narrow, _to_host(masters), _to_host(state)

    def _in_layers(self, gradients: Any, masters: Any, state: Any, dtypes: Any) -> tuple[Any, Any, Any]:
        size = next(iter(masters.values())).shape[0]
        is_stacked = self._stacked(size, masters, state)
        stacked, shared = eqx.partition(state, is_stacked)

        host = jax.memory.Space.Host

        def layer(newest: Any, slices: Any) -> tuple[Any, Any]:
            gradients, masters, stacked = slices
            whole = eqx.combine(_to_device(stacked), shared)
            narrow, masters, state = self._step(gradients, _to_device(masters), whole, dtypes)
            stacked, newest = eqx.partition(state, is_stacked)
            return newest, (narrow, _to(masters, host), _to(stacked, host))

        # All layers count the same step.
        shared_after, (narrow, masters, stacked) = jax.lax.scan(layer, shared, (gradients, masters, stacked))
        return narrow, masters, eqx.combine(stacked, shared_after)


def _named(tree: Any) -> Iterator[tuple[str, Any]]:
    is_named = lambda node: isinstance(node, hax.NamedArray)
    for path, node in jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_named)[0]:
        if not is_named(node) or node.array is not None:
            yield path_string(path), node


def _with_arrays[P](tree: P, arrays: Mapping[str, Array]) -> P:
    flat = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda node: isinstance(node, hax.NamedArray))
    names = [path_string(path) for path, node in flat if not isinstance(node, hax.NamedArray) or node.array is not None]
    return jax.tree.unflatten(jax.tree.structure(tree), [arrays[name] for name in names])


def _widened(x: Float[Array, "*shape"]) -> Float32[Array, "*shape"]:
    return x.astype(jnp.float32)


def _to(tree: Any, space: Any) -> Any:
    return jax.tree.map(lambda x: jax.device_put(x, space), tree)


def _to_device(tree: Any) -> Any:
    return _to(tree, jax.memory.Space.Device)


def _to_host(tree: Any) -> Any:
    """Moves arrays to the host, but not scalars: JAX may reuse a donated scalar's memory for the loss."""
    return jax.tree.map(lambda x: jax.device_put(x, jax.memory.Space.Host) if x.ndim else x, tree)
