"""For several files: products in float64 to compare with, equal trees, SQNR, jaxprs. Imports nothing of the package."""

import contextlib
import dataclasses
import os
import pathlib
import string
import subprocess
import sys
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import jaxtyping
import ml_dtypes
import numpy as np
import pytest
from hypothesis import strategies as st
from jax.extend.core import JaxprEqn


E4M3, E5M2 = np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e5m2)
EPS = float(np.finfo(np.float32).eps)

# For tests that take the gradient of an FP8 layer's weight, and none of its state: that warns.
state_is_constant = pytest.mark.filterwarnings("ignore:the gradient of an FP8 layer's weight was taken without")


# --- Products, from the definition ------------------------------------------------------------------------------------


def float64(x) -> np.ndarray:
    """Any array, named or not, in any floating dtype."""
    return np.asarray(getattr(x, "array", x)).astype(np.float64)


def round_to(x, dtype) -> np.ndarray:
    """The nearest finite value of an FP8 type, ties to the even code, looked up in the list of all its codes."""
    values = np.arange(128, dtype=np.uint8).view(dtype).astype(np.float64)
    values = values[np.isfinite(values)]  # in the order of the codes, which is that of the values
    magnitude = np.minimum(np.abs(float64(x)), values[-1])
    above = np.clip(np.searchsorted(values, magnitude), 1, len(values) - 1)
    to_above, to_below = values[above] - magnitude, magnitude - values[above - 1]
    code = np.where((to_above < to_below) | ((to_above == to_below) & (above % 2 == 0)), above, above - 1)
    return np.copysign(values[code], float64(x))


def quantize(x, scale, dtype) -> np.ndarray:
    """What `round(x / scale) * scale` leaves of an operand, the division in float32 as the definition says."""
    with np.errstate(over="ignore"):
        quotient = np.asarray(getattr(x, "array", x)).astype(np.float32) / np.asarray(scale, np.float32)
    return round_to(quotient, dtype) * float64(scale)


def rounded_up(scale, bits: int) -> np.ndarray:
    """The least number of so many significant bits that is not below a positive number."""
    fraction, exponent = np.frexp(float64(scale))
    return np.ldexp(np.ceil(fraction * 2**bits) / 2**bits, exponent)


def letters(numbers, lhs_ndim: int, rhs_ndim: int) -> tuple[str, str, str]:
    """`lax.dot_general`'s dimension numbers as the subscripts of `np.einsum`: of lhs, of rhs, of the product."""
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = numbers
    lhs, rhs = list(string.ascii_lowercase[:lhs_ndim]), list(string.ascii_uppercase[:rhs_ndim])
    for left, right in [*zip(lhs_contract, rhs_contract, strict=True), *zip(lhs_batch, rhs_batch, strict=True)]:
        rhs[right] = lhs[left]
    batch = [lhs[axis] for axis in lhs_batch]
    free = [name for name in lhs if name not in rhs], [name for name in rhs if name not in lhs]
    return "".join(lhs), "".join(rhs), "".join([*batch, *free[0], *free[1]])


@dataclasses.dataclass
class Products:
    """A product with its two gradients, in float64."""

    out: np.ndarray
    grad_lhs: np.ndarray
    grad_rhs: np.ndarray

    def __iter__(self) -> Iterator[np.ndarray]:
        return iter((self.out, self.grad_lhs, self.grad_rhs))


def products(lhs, rhs, grad, numbers) -> Products:
    """`out = lhs·rhs`, and the gradients of lhs and rhs for the output's gradient."""
    lhs, rhs, grad = map(float64, (lhs, rhs, grad))
    a, b, c = letters(numbers, lhs.ndim, rhs.ndim)
    return Products(
        np.einsum(f"{a},{b}->{c}", lhs, rhs),
        np.einsum(f"{c},{b}->{a}", grad, rhs),
        np.einsum(f"{a},{c}->{b}", lhs, grad),
    )


def fp8_products(lhs, rhs, grad, numbers, scales) -> Products:
    """The same with operands quantized to E4M3, E4M3 and E5M2 by scales in the order lhs, rhs, output gradient."""
    dtypes = E4M3, E4M3, E5M2
    return products(*map(quantize, (lhs, rhs, grad), scales, dtypes), numbers)


def accumulation_error(lhs, rhs, grad, numbers, scales) -> Products:
    """How far products accumulated in float32 may be from `fp8_products`.

    Each sum of `n` exact terms is off by at most `n * eps` times the sum of magnitudes (Higham, "Accuracy and Stability
    of Numerical Algorithms", section 3.1). Scaling rounds twice more: the product of the scales, and the result.
    """
    quantized = map(quantize, (lhs, rhs, grad), scales, (E4M3, E4M3, E5M2))
    magnitudes = products(*map(np.abs, quantized), numbers)
    terms = max(np.size(float64(x)) for x in (lhs, rhs, grad))
    return Products(*((terms + 2) * EPS * x for x in magnitudes))


def rounding_error(x, dtype) -> np.ndarray:
    """How far rounding to a wider floating dtype may move each of these values."""
    finfo = jnp.finfo(dtype)
    return np.maximum(np.abs(x) * float(finfo.eps) / 2, float(finfo.smallest_subnormal))


def assert_within(actual, expected, tolerance) -> None:
    """Elementwise `|actual - expected| <= tolerance`."""
    actual = float64(actual)
    assert actual.shape == np.shape(expected)
    excess = np.abs(actual - expected) - tolerance
    assert np.all(excess <= 0), f"off by up to {np.max(np.abs(actual - expected))}, {np.max(excess)} more than allowed"


def assert_same(actual, expected) -> None:
    """The same trees: classes, static fields, dtypes and values; NaN equals NaN."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        if isinstance(a, jax.Array | np.ndarray | np.generic):
            assert a.dtype == b.dtype and isinstance(a, jax.Array) == isinstance(b, jax.Array)
            np.testing.assert_array_equal(*map(_readable_by_numpy, (a, b)), strict=True)
        else:
            assert type(a) is type(b) and a == b


def assert_same_bits(actual, expected, message: str = "") -> None:
    """Same structure, dtypes, shapes and bytes, so that 0 and -0 differ and NaN equals itself."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected), message
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape), message
        bits = (np.asarray(x).reshape(-1).view(np.uint8) for x in (a, b))
        np.testing.assert_array_equal(*bits, err_msg=message)


def _readable_by_numpy(x) -> np.ndarray:
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return np.asarray(jax.random.key_data(x))
    # NumPy compares no FP8.
    return np.asarray(x).astype(np.float64) if jnp.issubdtype(x.dtype, jnp.floating) else np.asarray(x)


def sqnr(reference, x) -> float:
    """Signal to quantization noise in dB: `20 log10(|ref| / |ref - x|)`."""
    reference, x = float64(reference), float64(x)
    with np.errstate(divide="ignore"):  # infinite where both are the same
        return float(20 * np.log10(np.linalg.norm(reference) / np.linalg.norm(reference - x)))


@contextlib.contextmanager
def unchecked() -> Iterator[None]:
    """What users see: without beartype, which refuses some arguments before the package can say what is wrong."""
    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        yield
    finally:
        jaxtyping.config.update("jaxtyping_disable", before)


def run_example(*arguments: str) -> None:
    """Runs Python in the repository's root as users run an example: with machine code that is made to be fast."""
    root = pathlib.Path(__file__).parents[2]
    subprocess.run([sys.executable, *arguments], cwd=root, env=os.environ | {"XLA_FLAGS": ""}, check=True)


# --- Dimension numbers ------------------------------------------------------------------------------------------------


@st.composite
def dimension_numbers(draw, max_axes: int = 2, max_size: int = 3):
    """`(numbers, lhs_shape, rhs_shape)`: any number of contracted, batched and free axes, in any order."""
    counts = {kind: draw(st.integers(0, max_axes)) for kind in ("contract", "batch", "lhs", "rhs")}
    size = st.integers(1, max_size)
    contract = [draw(size) for _ in range(counts["contract"])]
    batch = [draw(size) for _ in range(counts["batch"])]
    axes, shapes = [], []
    for free in (counts["lhs"], counts["rhs"]):
        sizes = [*contract, *batch, *(draw(size) for _ in range(free))]
        position = draw(st.permutations(range(len(sizes))))  # of each axis, in the operand
        shape = [0] * len(sizes)
        for axis, its_size in zip(position, sizes, strict=True):
            shape[axis] = its_size
        axes.append((tuple(position[: len(contract)]), tuple(position[len(contract) : len(contract) + len(batch)])))
        shapes.append(tuple(shape))
    (lhs_contract, lhs_batch), (rhs_contract, rhs_batch) = axes
    return ((lhs_contract, rhs_contract), (lhs_batch, rhs_batch)), *shapes


# --- Jaxprs -----------------------------------------------------------------------------------------------------------


def equations(jaxpr) -> Iterator[JaxprEqn]:
    """Every equation of a jaxpr and of the jaxprs in it, in order."""
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        yield equation
        for inner in inner_jaxprs(equation.params.values()):
            yield from equations(inner)


def inner_jaxprs(values) -> Iterator:
    """The jaxprs among the parameters of an equation."""
    for value in values:
        if hasattr(getattr(value, "jaxpr", value), "eqns"):
            yield value
        elif isinstance(value, Sequence) and not isinstance(value, str):
            yield from inner_jaxprs(value)


def products_in(jaxpr) -> list[JaxprEqn]:
    """Every product in a jaxpr; those in bfloat16 become a `dot_general` when they are lowered."""
    names = "dot_general", "fp8_scaled_product"
    return [equation for equation in equations(jaxpr) if equation.primitive.name in names]


def precisions_of(equation: JaxprEqn) -> set[jax.lax.Precision]:
    """The precisions of a product's operands: its primitives have one for both, or one for each."""
    return set(np.atleast_1d(equation.params["precision"]))


def dot_generals(function, *args) -> list[JaxprEqn]:
    """Every product that a function makes."""
    return products_in(jax.make_jaxpr(function)(*args))
