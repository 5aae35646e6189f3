"""A stack's blocks one after the other, which compute what they compute in a loop."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import haliax.nn as hnn
import jax
import jax.numpy as jnp

from .._jax.xla import actually_rounded


class ServedBlocks(hnn.BlockSeq):
    """The blocks of a `haliax.nn.Stacked`, each with arrays of its own, and with the numbers of the loop, bit for bit.

    A loop writes what passes from block to block to memory, rounded. Without the loop, XLA keeps it in float32 where it
    can, and other numbers are quantized.
    """

    def fold(self, init: Any, *args: Any, **kwargs: Any) -> Any:
        """As `BlockSeq.fold`."""
        return self._rounding().fold(init, *args, **kwargs)

    def scan(self, init: Any, *extra_args: Any, **extra_kwargs: Any) -> Any:
        """As `BlockSeq.scan`."""
        return self._rounding().scan(init, *extra_args, **extra_kwargs)

    def fold_via(self, fn: Callable[..., Any], **kwargs: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """As `BlockSeq.fold_via`."""
        return self._plain(self.blocks).fold_via(_rounding(fn), **kwargs)

    def scan_via(self, fn: Callable[..., Any], **kwargs: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """As `BlockSeq.scan_via`."""
        return self._plain(self.blocks).scan_via(_rounding(fn), **kwargs)

    def _rounding(self) -> hnn.BlockSeq:
        return self._plain(tuple(map(_Rounding, self.blocks)))

    def _plain(self, blocks: Any) -> hnn.BlockSeq:
        return hnn.BlockSeq(blocks, self.Block, self.gradient_checkpointing)


class _Rounding(eqx.Module):
    """A block whose arguments and results are rounded to their dtypes."""

    block: Any

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _rounding(lambda block, *args, **kwargs: block(*args, **kwargs))(self.block, *args, **kwargs)


def _rounding(fn: Callable[..., Any]) -> Callable[..., Any]:
    def call(block: Any, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = jax.tree.map(_rounded, (args, kwargs))
        return jax.tree.map(_rounded, fn(block, *args, **kwargs))

    return call


def _rounded(x: Any) -> Any:
    is_narrow = eqx.is_array(x) and jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize < 4
    return actually_rounded(x) if is_narrow else x
