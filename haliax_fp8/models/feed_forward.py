"""The feed-forward layers of a `Transformer`, and the functions between their products.

References:
    SwiGLU and GeGLU: arXiv:2002.05202; squared ReLU: arXiv:2109.08668; Mixtral: arXiv:2401.04088.
"""

from typing import Any

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray
from jaxtyping import PRNGKeyArray


type Config = Any
"""A `TransformerConfig`, whose file imports this one."""


def swiglu(gate: NamedArray, up: NamedArray) -> NamedArray:
    """`silu(gate) * up`."""
    return hnn.silu(gate) * up


def geglu(gate: NamedArray, up: NamedArray) -> NamedArray:
    """`gelu(gate) * up`, with the approximation by tanh."""
    return hnn.gelu(gate, approximate=True) * up


def squared_relu(x: NamedArray) -> NamedArray:
    """`relu(x)**2` (arXiv:2109.08668)."""
    return hax.square(hnn.relu(x))


class SwiGlu(eqx.Module):
    """`down(silu(gate(x)) * up(x))`."""

    gate: hnn.Linear
    up: hnn.Linear
    down: hnn.Linear
    config: Config = eqx.field(static=True)

    @staticmethod
    def init(config: Config, *, key: PRNGKeyArray) -> "SwiGlu":
        keys, scale = jax.random.split(key, 3), config.residual_scale
        return SwiGlu(
            gate=config.linear("gate", config.Hidden, config.Mlp, key=keys[0]),
            up=config.linear("up", config.Hidden, config.Mlp, key=keys[1]),
            down=config.linear("down", config.Mlp, config.Hidden, key=keys[2], init_scale=scale),
            config=config,
        )

    def __call__(self, x: NamedArray) -> NamedArray:
        """Maps `(..., hidden)` to the same axes."""
        activation = self.config.between(self.config.activation)
        return self.down(activation(self.gate(x), self.up(x)))


class JoinedSwiGlu(eqx.Module):
    """The same with one layer for gate and up."""

    gate_up: hnn.Linear
    down: hnn.Linear
    config: Config = eqx.field(static=True)

    @staticmethod
    def init(config: Config, *, key: PRNGKeyArray) -> "JoinedSwiGlu":
        keys, Both = jax.random.split(key, 2), (Axis("gate_up", 2), config.Mlp)
        return JoinedSwiGlu(
            gate_up=config.linear("gate_up", config.Hidden, Both, key=keys[0]),
            down=config.linear("down", config.Mlp, config.Hidden, key=keys[1], init_scale=config.residual_scale),
            config=config,
        )

    def __call__(self, x: NamedArray) -> NamedArray:
        """Maps `(..., hidden)` to the same axes."""
        both = self.gate_up(x)
        return self.down(self.config.between(self.config.activation)(both["gate_up", 0], both["gate_up", 1]))


class Mlp(eqx.Module):
    """`down(activation(up(x)))`, without a gate."""

    up: hnn.Linear
    down: hnn.Linear
    config: Config = eqx.field(static=True)

    @staticmethod
    def init(config: Config, *, key: PRNGKeyArray) -> "Mlp":
        keys = jax.random.split(key, 2)
        return Mlp(
            up=config.linear("up", config.Hidden, config.Mlp, key=keys[0]),
            down=config.linear("down", config.Mlp, config.Hidden, key=keys[1], init_scale=config.residual_scale),
            config=config,
        )

    def __call__(self, x: NamedArray) -> NamedArray:
        """Maps `(..., hidden)` to the same axes."""
        return self.down(self.config.between(self.config.activation)(self.up(x)))


class MixtureOfExperts(eqx.Module):
    """Sends each token through the experts that a router scores highest; each expert is a SwiGLU."""

    router: hnn.Linear
    gate: hnn.MoELinear
    up: hnn.MoELinear
    down: hnn.MoELinear
    Experts: Axis = eqx.field(static=True)
    Chosen: Axis = eqx.field(static=True)
    normalized: bool = eqx.field(static=True)

    @staticmethod
    def init(
        config: Config, *, experts: int, chosen: int, normalized: bool = True, key: PRNGKeyArray
    ) -> "MixtureOfExperts":
        """Random weights, with `chosen` of the `experts` for each token; `normalized` if their weights add up to 1."""
        keys, Experts = jax.random.split(key, 4), Axis("experts", experts)
        linear = lambda name, In, Out, key: hnn.MoELinear.init(
            Experts, In, Out, key=key, use_bias=name in config.biases
        )
        return MixtureOfExperts(
            config.linear("router", config.Hidden, Experts, key=keys[0]),
            linear("gate", config.Hidden, config.Mlp, keys[1]),
            linear("up", config.Hidden, config.Mlp, keys[2]),
            linear("down", config.Mlp, config.Hidden, keys[3]),
            Experts,
            Axis("chosen", chosen),
            normalized,
        )

    def __call__(self, x: NamedArray) -> NamedArray:
        """Maps `(..., hidden)` to the same axes."""
        leading = hax.axis.without_axes(x.axes, self.router.In)
        rows = x.flatten_axes(leading, "row")
        scores = self.router(rows).astype(jnp.float32)
        if not self.normalized:
            scores = hnn.softmax(scores, axis=self.Experts)
        weights, experts = hax.top_k(scores, self.Experts, self.Chosen.size, self.Chosen)
        if self.normalized:
            weights = hnn.softmax(weights, axis=self.Chosen)
        weights = weights.astype(x.dtype)
        # A copy of each row for each of its experts, sorted by expert.
        expert_of_copy = experts.rearrange((..., self.Chosen)).array.reshape(-1)
        order = jnp.argsort(expert_of_copy)
        sizes = hax.named(jnp.bincount(expert_of_copy, length=self.Experts.size), self.Experts)
        copies = rows["row", hax.named(order // self.Chosen.size, "copy")]
        out = self.down(hnn.silu(self.gate(copies, sizes)) * self.up(copies, sizes), sizes)
        out = out["copy", hax.named(jnp.argsort(order), "copy")]
        out = out.unflatten_axis("copy", (rows.resolve_axis("row"), self.Chosen))
        return hax.sum(out * weights, axis=self.Chosen).unflatten_axis("row", leading)
