"""DotDimensions: the axes that `lax.dot_general`, `jax.vjp` and `jax.vmap` find, for any dimension numbers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import dimension_numbers
from hypothesis import example, given, settings
from jax import lax

from haliax_fp8._product.dimensions import DotDimensions


PLAIN = ((((1,), (0,)), ((), ())), (2, 3), (3, 4))
UNSORTED = ((((3, 0), (1, 2)), ((2,), (3,))), (2, 3, 4, 5), (6, 5, 2, 4))
OUTER = ((((), ()), ((), ())), (2, 3), (4,))
ALL_CONTRACTED = ((((1, 0), (0, 1)), ((), ())), (2, 3), (3, 2))
ALL_BATCHED = ((((), ()), ((1, 0), (0, 1))), (2, 3), (3, 2))
EMPTY = ((((1,), (0,)), ((), ())), (2, 0), (0, 3))


def for_any_dimension_numbers(count: int):
    """Random ones, and those with a name of their own."""

    def decorate(test):
        test = settings(max_examples=count, deadline=None, derandomize=True)(given(dimension_numbers())(test))
        return functools.reduce(
            lambda test, case: example(case)(test), (PLAIN, UNSORTED, OUTER, ALL_CONTRACTED, ALL_BATCHED, EMPTY), test
        )

    return decorate


def integers(seed: int, shape: tuple[int, ...]) -> jax.Array:
    """Small integers, whose sums of products are exact in float32."""
    return jnp.asarray(np.random.default_rng(seed).integers(-3, 4, shape), jnp.float32)


def dot(dims: DotDimensions, lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    return lax.dot_general(lhs, rhs, dims.numbers)


@for_any_dimension_numbers(60)
def test_shapes_and_axes(case):
    numbers, lhs_shape, rhs_shape = case
    dims = DotDimensions.of(numbers, lhs_shape, rhs_shape)
    operands = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in (lhs_shape, rhs_shape))
    expected = jax.eval_shape(functools.partial(lax.dot_general, dimension_numbers=numbers), *operands).shape
    assert dims.numbers == numbers
    assert dims.out_shape(lhs_shape, rhs_shape) == expected
    assert sorted((*dims.lhs_batch, *dims.lhs_contract, *dims.lhs_free)) == list(range(len(lhs_shape)))
    assert sorted((*dims.rhs_batch, *dims.rhs_contract, *dims.rhs_free)) == list(range(len(rhs_shape)))
    assert dims.swapped.swapped == dims
    assert DotDimensions.of(dims.swapped.numbers, rhs_shape, lhs_shape) == dims.swapped
    assert hash(dims) == hash(DotDimensions.of(numbers, lhs_shape, rhs_shape))


@pytest.mark.more
@for_any_dimension_numbers(15)
def test_gradients_are_those_of_vjp(case):
    numbers, lhs_shape, rhs_shape = case
    dims = DotDimensions.of(numbers, lhs_shape, rhs_shape)
    lhs, rhs = integers(0, lhs_shape), integers(1, rhs_shape)
    grad = integers(2, dims.out_shape(lhs_shape, rhs_shape))
    expected = jax.jit(lambda lhs, rhs, grad: jax.vjp(functools.partial(dot, dims), lhs, rhs)[1](grad))(lhs, rhs, grad)

    @jax.jit
    def gradients(lhs, rhs, grad):
        of_lhs, lhs_layout = dims.gradient_of_lhs()
        of_rhs, rhs_layout = dims.gradient_of_rhs()
        return (
            jnp.transpose(dot(of_lhs, grad, rhs), lhs_layout),
            jnp.transpose(dot(of_rhs, grad, lhs), rhs_layout),
        )

    for actual, exact in zip(gradients(lhs, rhs, grad), expected, strict=True):
        np.testing.assert_array_equal(actual, exact, strict=True)


@pytest.mark.more
@for_any_dimension_numbers(10)
def test_new_axes_are_those_of_vmap(case):
    numbers, lhs_shape, rhs_shape = case
    dims = DotDimensions.of(numbers, lhs_shape, rhs_shape)
    lhs, rhs = integers(0, lhs_shape), integers(1, rhs_shape)
    many_lhs, many_rhs = integers(2, (5, *lhs_shape)), integers(3, (5, *rhs_shape))
    cases = [
        (dims.with_axis_in_lhs(), many_lhs, rhs, (0, None)),
        (dims.with_axis_in_rhs(), lhs, many_rhs, (None, 0)),
        (dims.with_batch_axis(), many_lhs, many_rhs, (0, 0)),
    ]
    for (mapped, out_axis), *operands, in_axes in cases:
        expected = jax.vmap(functools.partial(dot, dims), in_axes, out_axis)(*operands)
        np.testing.assert_array_equal(dot(mapped, *operands), expected, strict=True)
        assert mapped == DotDimensions.of(mapped.numbers, *(x.shape for x in operands))


def test_several_batch_axes_lead():
    numbers, lhs_shape, rhs_shape = UNSORTED
    dims = DotDimensions.of(numbers, lhs_shape, rhs_shape)
    lhs, rhs = integers(0, (2, 3, *lhs_shape)), integers(1, (2, 3, *rhs_shape))
    expected = jax.vmap(jax.vmap(functools.partial(dot, dims)))(lhs, rhs)
    np.testing.assert_array_equal(dot(dims.with_batch_axes(2), lhs, rhs), expected, strict=True)
    assert dims.with_batch_axes(0) == dims


@pytest.mark.parametrize(
    "numbers, message",
    [
        ((((2,), (0,)), ((), ())), r"axes \[2\] of lhs.*\(2, 3\), in a product"),
        ((((-1,), (0,)), ((), ())), r"axes \[-1\] of lhs"),
        ((((1,), (2,)), ((), ())), r"axes \[2\] of rhs.*\(3, 2\), in a product"),
        ((((1, 1), (0, 1)), ((), ())), r"axes \[1, 1\] of lhs"),
        ((((1,), (0,)), ((0,), (0,))), r"axes \[0, 0\] of rhs"),
        ((((0,), (0,)), ((), ())), r"contracted axes differ in size: \[2\] in lhs"),
        ((((), ()), ((1,), (1,))), r"batched axes differ in size: \[3\] in lhs"),
        ((((0, 1), (0,)), ((), ())), r"contracted axes differ in size.*\[3\] in rhs"),
    ],
)
def test_errors_name_the_axes_and_the_shapes(numbers, message):
    with pytest.raises(ValueError, match=message):
        DotDimensions.of(numbers, (2, 3), (3, 2))
    # No stricter than JAX: what is refused here is refused there too.
    with pytest.raises((TypeError, ValueError)):
        lax.dot_general(jnp.ones((2, 3)), jnp.ones((3, 2)), numbers)
