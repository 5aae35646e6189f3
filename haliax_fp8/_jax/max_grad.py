"""`fp32_max_grad`: float32 whose gradients accumulate by maximum instead of by sum.

State travels from the backward pass to the next step as the state's cotangent. If a value is used several times, JAX
adds its cotangents, but amaxes have to be combined by maximum. JAX lets an element type define what "add" means to
automatic differentiation (`add_any` asks the type). So state that is cast to this type at the top of the differentiated
function returns as the exact maximum over all uses: in a layer called twice, a tied one, a constant of a `scan`, a
branch of a `cond`. Unused state returns `-inf`, the identity of the maximum. The idea comes from Flax
(google/flax#3623).

It needs JAX's internals; `tests/jax/test_max_grad.py` checks what it uses.
"""

import dataclasses
import functools
import operator
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import ShapedArray
from jax.interpreters import ad
from jaxtyping import Array

from .errors import NotDifferentiable
from .private import needs


with needs("the element type of FP8 state"):
    from jax._src.dtypes import ExtendedDType


class max_grad(jax.dtypes.prng_key):
    """The abstract type of `fp32_max_grad`, for `jnp.issubdtype`.

    It is not a floating type, so that a loss that casts floating arrays of its model (mixed precision) leaves state
    alone. It is a subtype of random keys because `haliax.take` and `haliax.unbind`, with which Haliax takes layers out
    of a stack, call `jnp.take` in its default mode. JAX fills in a number there for indices out of bounds, and has one
    for no other extended type. If both called `lax.dynamic_index_in_dim` for an integer instead, `jax.dtypes.extended`
    would do.
    """


class max_grad_beside_keys(jax.dtypes.extended):
    """The same under `jax_debug_key_reuse`, which takes every subtype of random keys for a key that is used up."""


class StateOutsideJit(TypeError):
    """State in `fp32_max_grad` was used outside a compiled program, where JAX has no arrays of that type."""

    def __init__(self) -> None:
        super().__init__(
            "FP8 state was cast to fp32_max_grad (with_max_gradients does so) outside of jax.jit, or in a program that "
            "JAX runs operation by operation, as checkify does; but JAX has arrays of this type only inside a compiled "
            "program. Put jax.jit or eqx.filter_jit around the function that takes the gradient. Called by itself, "
            "haliax_fp8.filter_grad compiles the gradient"
        )


class _MaxGradRules:
    """The rules that JAX requires of an element type that is not NumPy's."""

    # JAX asks dozens of times for each array.
    physical_element_aval = operator.attrgetter("element")

    @staticmethod
    def convert_from(from_dtype: "_MaxGradDType", to_dtype: np.dtype) -> bool:
        return from_dtype.float_dtype == to_dtype

    @staticmethod
    def convert_to(from_dtype: np.dtype, to_dtype: "_MaxGradDType") -> bool:
        return to_dtype.float_dtype == from_dtype

    @staticmethod
    def tangent_dtype(dtype: "_MaxGradDType") -> "_MaxGradDType":
        return dtype

    @staticmethod
    def add(dtype: "_MaxGradDType", x: Array, y: Array) -> Array:
        return _cast(lax.max(to_float32(x), to_float32(y)), dtype)

    @staticmethod
    def zero(dtype: "_MaxGradDType") -> Array:
        return _cast(lax.full((), -np.inf, dtype.float_dtype), dtype)

    @staticmethod
    def full(shape, fill_value, dtype: "_MaxGradDType") -> Array:
        if is_max_grad(fill_value):
            fill_value = to_float32(fill_value)
        elif type(fill_value) is int and fill_value == 0:
            # Automatic differentiation asks for the additive zero this way, for elements that an index leaves out.
            fill_value = -np.inf
        return _cast(lax.full(shape, fill_value, dtype.float_dtype), dtype)

    @staticmethod
    def global_sharded_result_handler(aval, out_sharding, committed):
        raise StateOutsideJit


@dataclasses.dataclass(frozen=True, eq=False)
class _MaxGradDType(ExtendedDType):
    """The element type.

    Args:
        float_dtype: The type that an element is stored in.
        scalar: The abstract type.
        devices: The mesh axes of a `shard_map` along which devices share the state, and along which whoever takes the
            gradient takes the maximum afterwards.
    """

    float_dtype: np.dtype
    scalar: type = max_grad
    devices: tuple[str, ...] = ()
    _rules: ClassVar = _MaxGradRules

    @functools.cached_property
    def element(self) -> ShapedArray:
        """A single element as XLA sees it."""
        return ShapedArray((), self.float_dtype)

    @property
    def type(self):
        return self.scalar

    # A data class's `__eq__` would leave it to NumPy to decide whether this is float32.
    def __eq__(self, other: object) -> bool:
        return isinstance(other, _MaxGradDType) and self._key == other._key

    # There are only a few of these types, and JAX hashes them dozens of times for each array: one hash serves all.
    __hash__ = (0).__hash__  # pyright: ignore[reportAssignmentType]

    @functools.cached_property
    def _key(self) -> tuple[Any, ...]:
        return self.float_dtype, self.scalar, self.devices

    @property
    def name(self) -> str:
        return f"{self.float_dtype.name}_max_grad"

    @property
    def itemsize(self) -> int:
        return self.float_dtype.itemsize

    def __repr__(self) -> str:
        return self.name


fp32_max_grad = _MaxGradDType(np.dtype(np.float32))
"""The element type: float32 whose cotangents JAX adds by maximum.

Cast to it and from it with `astype`, inside a function that `jax.jit` compiles.
"""


def is_max_grad(x: object) -> bool:
    """Whether an array's element type is `fp32_max_grad`."""
    return isinstance(getattr(x, "dtype", None), _MaxGradDType)


def reduced_later(x: Any) -> tuple[str, ...]:
    """The mesh axes along which whoever takes the gradient of state takes the maximum over devices afterwards."""
    return x.dtype.devices if is_max_grad(x) else ()


def to_max_grad(x: Array, devices: tuple[str, ...] = ()) -> Array:
    """Casts float32 to `fp32_max_grad`; returns `fp32_max_grad` unchanged.

    Args:
        x: The state.
        devices: The mesh axes along which the caller takes the maximum over devices once it has the gradient.
    """
    if is_max_grad(x):
        return x
    try:
        return _cast(x, _max_grad_dtype(max_grad_beside_keys if jax.config.jax_debug_key_reuse else max_grad, devices))
    except AssertionError as error:
        # Inside a `shard_map` that is not compiled JAX checks a sharding first, which fails for any extended type.
        raise StateOutsideJit from error


@functools.cache
def _max_grad_dtype(scalar: type, devices: tuple[str, ...]) -> _MaxGradDType:
    return dataclasses.replace(fp32_max_grad, scalar=scalar, devices=devices)


def to_dtype_of(x: Array, like: Any) -> Array:
    """Casts float32 to the element type of `like` if that is `fp32_max_grad`, and otherwise to float32."""
    return _cast(x, like.dtype) if is_max_grad(like) else to_float32(x)


def _cast(x: Array, dtype: Any) -> Array:
    return lax.convert_element_type(x, dtype)


def to_float32(x: Array) -> Array:
    """Casts to float32 from any floating element type, `fp32_max_grad` included."""
    return lax.convert_element_type(x, jnp.float32)


LOST_STATE = (
    "an FP8 layer was differentiated and its state was not, which would lose its amaxes: a function with a custom "
    "derivative of Equinox calls the layer, and takes state for a constant. Such are eqx.filter_custom_jvp and "
    "filter_custom_vjp, checkpointed loops, solvers of Optimistix, and all adjoints of Diffrax but "
    'diffrax.DirectAdjoint(), which is exact. Use that; for a loop, equinox.internal.while_loop with kind="bounded" or '
    'scan with kind="lax"; or take the gradient with eqx.filter_grad, where state is float32 like any parameter'
)
"""The message if JAX or Equinox treated state like integers."""


def require_differentiated_state(state: Any, is_linear: bool) -> None:
    """Raises if a kernel has a tangent but its state has none, although a gradient of both is taken."""
    if not is_linear and is_max_grad(state):
        raise NotDifferentiable(LOST_STATE)


def require_transposed_state(state: Any, others: Sequence[Any]) -> None:
    """The same check in reverse mode, where a missing tangent shows up as a constant.

    Args:
        state: The state's tangent, as a transposition gets it.
        others: The tangents of the operands; None if zero.
    """
    if any(map(ad.is_undefined_primal, others)) and not ad.is_undefined_primal(state):
        require_differentiated_state(state, False)
