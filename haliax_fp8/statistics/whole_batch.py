"""Where a product sees its operands whole: with every axis that `vmap` maps inside the function that is looked at."""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
from jax import lax
from jax.custom_batching import custom_vmap
from jaxtyping import Array


@dataclasses.dataclass(frozen=True)
class MappedAxis:
    """An axis that `vmap` maps, in front of the arrays that have it.

    Args:
        size: Its size.
        mapped: Whether each array has it.
    """

    size: int
    mapped: tuple[bool, ...]

    def over(self, function: Callable[..., Array]) -> Callable[..., Array]:
        """The function mapped over the axis; its result has it in front."""
        return jax.vmap(function, in_axes=tuple(0 if mapped else None for mapped in self.mapped))


@dataclasses.dataclass(frozen=True)
class Whole:
    """The arrays of a call, with all axes that are mapped inside the outermost.

    Args:
        axes: Those axes, the innermost first. An array has the last in front.
        mapped: Which arrays have the outermost axis, in front of all.
        size: The size of the outermost axis.
    """

    axes: tuple[MappedAxis, ...]
    mapped: tuple[bool, ...]
    size: int

    def over(self, function: Callable[..., Array]) -> Callable[..., Array]:
        """A function of one example, mapped over all axes but the outermost."""
        return functools.reduce(lambda mapped, axis: axis.over(mapped), self.axes, function)

    def member(self, arrays: tuple[Array, ...], index: int) -> tuple[Array, ...]:
        """The arrays without the outermost axis, at an index of it."""
        return tuple(x[index] if mapped else x for x, mapped in zip(arrays, self.mapped, strict=True))


def call_whole(
    outermost: str,
    example: Callable[..., Array],
    function: Callable[..., Array],
    *arrays: Array,
) -> Array:
    """Calls `function(whole, *arrays)` where `vmap` maps an outer axis, with all axes that are mapped inside of it.

    So what it computes is computed once, of all examples. JAX batches before it differentiates: a gradient that is
    taken around the outer axis is that of `function`.

    Args:
        outermost: The name of the outer axis.
        example: What the call returns for one example; only its shape and dtype are used.
        function: Gets a `Whole` and the arrays; its result has the axis `outermost` in front, then the others.
        *arrays: The arrays of one example.
    """
    return _call(example, function, ())(lax.axis_index(outermost), *arrays)


def _call(
    example: Callable[..., Array], function: Callable[..., Array], axes: tuple[MappedAxis, ...]
) -> Callable[..., Array]:
    @custom_vmap
    def call(index: Array, *arrays: Array) -> Array:
        del index
        return Whole(axes, (), 1).over(example)(*arrays)

    @call.def_vmap
    def batched(size: int, mapped: Sequence[bool], index: Array, *arrays: Array) -> tuple[Array, bool]:
        is_outermost, of_arrays = mapped[0], tuple(mapped[1:])
        if is_outermost:
            return function(Whole(axes, of_arrays, size), *arrays), True
        return _call(example, function, (*axes, MappedAxis(size, of_arrays)))(index, *arrays), True

    return call
