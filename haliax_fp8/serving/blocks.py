"""A stack's blocks one after the other, with the same results as in a loop."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import haliax.nn as hnn
import jax
import jax.numpy as jnp

from .._jax.xla import force_cast


type Unroll = int | bool | None


class ServedBlocks(hnn.BlockSeq):
    """The blocks of a `haliax.nn.Stacked`, each with its own arrays, with the same results as in the loop, bit for bit.

    A loop rounds the values that it carries from one iteration to the next, and writes them to memory. Without the
    loop, XLA would keep them in float32 where it can, and then quantize different numbers. Here `unroll`, the number of
    blocks per iteration, only determines where values are rounded.
    """

    def fold(self, init: Any, *args: Any, unroll: Unroll = None, **kwargs: Any) -> Any:
        return self._with_turns(unroll, scans=False).fold(init, *args, **kwargs)

    def scan(self, init: Any, *extra_args: Any, unroll: Unroll = None, **extra_kwargs: Any) -> Any:
        return self._with_turns(unroll, scans=True).scan(init, *extra_args, **extra_kwargs)

    def fold_via(self, fn: Callable[..., Any], *, unroll: Unroll = None) -> Any:
        return self._with_turns(unroll, scans=False).fold_via(_in_turn(fn))

    def scan_via(self, fn: Callable[..., Any], *, unroll: Unroll = None) -> Any:
        return self._with_turns(unroll, scans=True).scan_via(_in_turn(fn))

    def _with_turns(self, unroll: Unroll, *, scans: bool) -> hnn.BlockSeq:
        count = len(self.blocks)
        turn = 1 if unroll is None else count if unroll is True else int(unroll)
        # As in `lax.scan`: the remaining blocks follow the loop, and a single iteration of several blocks is not one.
        in_loop = 0 if turn == count > 1 else count // turn * turn

        def in_turn(i: int, block: Any) -> "_InTurn":
            is_inside = i < in_loop
            starts, ends = is_inside and i % turn == 0, i == in_loop - 1
            return _InTurn(block, starts=starts, ends=ends, is_inside=is_inside, scans=scans)

        blocks = tuple(in_turn(i, block) for i, block in enumerate(self.blocks))
        return hnn.BlockSeq(blocks, self.Block, self.gradient_checkpointing)


class _InTurn(eqx.Module):
    """A block at its position in a loop.

    Args:
        block: The block.
        starts: Whether it is the first of an iteration.
        ends: Whether it is the last of the loop.
        is_inside: Whether it is in the loop.
        scans: Whether it returns an output to be stacked in addition to the carry.
    """

    block: Any
    starts: bool = eqx.field(static=True)
    ends: bool = eqx.field(static=True)
    is_inside: bool = eqx.field(static=True)
    scans: bool = eqx.field(static=True)

    def __call__(self, carry: Any, *args: Any, **kwargs: Any) -> Any:
        return self.call(lambda block, *args, **kwargs: block(*args, **kwargs), carry, *args, **kwargs)

    def call(self, fn: Callable[..., Any], carry: Any, *args: Any, **kwargs: Any) -> Any:
        if self.starts:
            carry = _rounded(carry)
        if self.is_inside:
            args, kwargs = _rounded((args, kwargs))
        result = fn(self.block, carry, *args, **kwargs)
        if not self.scans:
            return _rounded(result) if self.ends else result
        carry, output = result
        return _rounded(carry) if self.ends else carry, _rounded(output) if self.is_inside else output


def _in_turn(fn: Callable[..., Any]) -> Callable[..., Any]:
    return lambda block, carry, *args, **kwargs: block.call(fn, carry, *args, **kwargs)


def _rounded[T](tree: T) -> T:
    """Rounds 16-bit arrays to their own dtype, as storing them would."""

    def rounded(x: Any) -> Any:
        is_narrow = eqx.is_array(x) and jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize < 4
        return force_cast(x) if is_narrow else x

    return jax.tree.map(rounded, tree)
