"""Two blocks in a checkpointed scan, for tests of what looks into layers."""

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax


Layers, Embed = hax.make_axes(layers=2, embed=32)


class Block(eqx.Module):
    up: hnn.Linear

    @staticmethod
    def init(key):
        return Block(hnn.Linear.init(Embed, Embed.alias("out"), key=key))

    def __call__(self, x):
        return x + hax.tanh(self.up(x)).rename({"out": "embed"})


def residual_stack() -> hnn.Stacked[Block]:
    """The blocks; `embed` in, `embed` out."""
    keys = jax.random.split(jax.random.key(0), Layers.size)
    return hnn.Stacked.init(Layers, Block, gradient_checkpointing=True)(key=keys)
