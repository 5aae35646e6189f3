"""Parts of `TransformerConfig` for models other than a Llama: GPT-2's and Mixtral's."""

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray
from jaxtyping import PRNGKeyArray

from .transformer import Norm, TransformerConfig


def layer_norm(config: TransformerConfig) -> Norm:
    """LayerNorm in float32, whatever the weights' dtype."""
    return hnn.LayerNorm.init(config.Hidden, dtype=jnp.dtype(jnp.float32))


class Mlp(eqx.Module):
    """`down(gelu(up(x)))`."""

    up: hnn.Linear
    down: hnn.Linear

    @staticmethod
    def init(config: TransformerConfig, *, key: PRNGKeyArray) -> "Mlp":
        up, down = jax.random.split(key)
        return Mlp(
            hnn.Linear.init(config.Hidden, config.Mlp, key=up, use_bias=config.use_bias),
            hnn.Linear.init(config.Mlp, config.Hidden, key=down, use_bias=config.use_bias),
        )

    def __call__(self, x: NamedArray) -> NamedArray:
        """Maps `(..., hidden)` to the same axes."""
        return self.down(hnn.gelu(self.up(x)))


class MixtureOfExperts(eqx.Module):
    """Sends each token through the experts that a router scores highest; each expert is a SwiGLU."""

    router: hnn.Linear
    gate: hnn.MoELinear
    up: hnn.MoELinear
    down: hnn.MoELinear
    Experts: Axis = eqx.field(static=True)
    Chosen: Axis = eqx.field(static=True)

    @staticmethod
    def init(config: TransformerConfig, *, experts: int, chosen: int, key: PRNGKeyArray) -> "MixtureOfExperts":
        """Random weights, with `chosen` of the `experts` for each token."""
        keys, Experts = jax.random.split(key, 4), Axis("experts", experts)
        linear = lambda In, Out, key: hnn.MoELinear.init(Experts, In, Out, key=key, use_bias=config.use_bias)
        return MixtureOfExperts(
            hnn.Linear.init(config.Hidden, Experts, key=keys[0], use_bias=config.use_bias),
            linear(config.Hidden, config.Mlp, keys[1]),
            linear(config.Hidden, config.Mlp, keys[2]),
            linear(config.Mlp, config.Hidden, keys[3]),
            Experts,
            Axis("chosen", chosen),
        )

    def __call__(self, x: NamedArray) -> NamedArray:
        """Maps `(..., hidden)` to the same axes."""
        leading = hax.axis.without_axes(x.axes, self.router.In)
        rows = x.flatten_axes(leading, "row")
        likes, experts = hax.top_k(self.router(rows).astype(jnp.float32), self.Experts, self.Chosen.size, self.Chosen)
        weights = hnn.softmax(likes, axis=self.Chosen).astype(x.dtype)
        # A copy of each row for each of its experts, sorted by expert.
        expert_of_copy = experts.rearrange((..., self.Chosen)).array.reshape(-1)
        order = jnp.argsort(expert_of_copy)
        sizes = hax.named(jnp.bincount(expert_of_copy, length=self.Experts.size), self.Experts)
        copies = rows["row", hax.named(order // self.Chosen.size, "copy")]
        out = self.down(hnn.silu(self.gate(copies, sizes)) * self.up(copies, sizes), sizes)
        out = out["copy", hax.named(jnp.argsort(order), "copy")]
        out = out.unflatten_axis("copy", (rows.resolve_axis("row"), self.Chosen))
        return hax.sum(out * weights, axis=self.Chosen).unflatten_axis("row", leading)
