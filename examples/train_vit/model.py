"""A small vision transformer in plain Equinox. Nothing here is about FP8."""

import equinox as eqx
import jax
import jax.numpy as jnp


SIDE, CLASSES = 8, 10  # of scikit-learn's digits


class Block(eqx.Module):
    """Attention and a two-layer perceptron, each after a LayerNorm and added to the residual stream."""

    attention_norm: eqx.nn.LayerNorm
    attention: eqx.nn.MultiheadAttention
    mlp_norm: eqx.nn.LayerNorm
    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, hidden: int, heads: int, mlp: int, *, key: jax.Array):
        keys = jax.random.split(key, 3)
        self.attention_norm = eqx.nn.LayerNorm(hidden)
        self.attention = eqx.nn.MultiheadAttention(heads, hidden, key=keys[0])
        self.mlp_norm = eqx.nn.LayerNorm(hidden)
        self.up = eqx.nn.Linear(hidden, mlp, key=keys[1])
        self.down = eqx.nn.Linear(mlp, hidden, key=keys[2])

    def __call__(self, x: jax.Array) -> jax.Array:
        normed = jax.vmap(self.attention_norm)(x)
        x = x + self.attention(normed, normed, normed)
        return x + jax.vmap(lambda token: self.down(jax.nn.gelu(self.up(self.mlp_norm(token)))))(x)


class VisionTransformer(eqx.Module):
    """Patches, blocks, the mean over patches, a classifier head (arXiv:2010.11929, without the class token)."""

    embed: eqx.nn.Linear
    positions: jax.Array
    blocks: list[Block]
    norm: eqx.nn.LayerNorm
    head: eqx.nn.Linear
    patch: int = eqx.field(static=True)

    def __init__(self, *, patch: int, layers: int, hidden: int, heads: int, mlp: int, key: jax.Array):
        keys = jax.random.split(key, 3 + layers)
        count = (SIDE // patch) ** 2
        self.embed = eqx.nn.Linear(patch**2, hidden, key=keys[0])
        self.positions = jax.random.normal(keys[1], (count, hidden))
        self.blocks = [Block(hidden, heads, mlp, key=k) for k in keys[3:]]
        self.norm = eqx.nn.LayerNorm(hidden)
        self.head = eqx.nn.Linear(hidden, CLASSES, key=keys[2])
        self.patch = patch

    def __call__(self, image: jax.Array) -> jax.Array:
        """The logits of one image `(8, 8)`."""
        across = SIDE // self.patch
        patches = image.reshape(across, self.patch, across, self.patch).transpose(0, 2, 1, 3)
        x = jax.vmap(self.embed)(patches.reshape(across**2, self.patch**2)) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(jnp.mean(x, axis=0)))
