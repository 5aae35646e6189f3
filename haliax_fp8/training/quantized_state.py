"""quantized_state: an optimizer's moments in FP8, with a scale for every 128 elements."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeGuard, cast

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.core import Tracer
from jax.extend.core import Literal
from jaxtyping import Array, Bool, Float32, Shaped, UInt8, UInt32
from rich.console import RenderableType

from .._jax.xla import once_computed
from .._numerics.casts import spacing_of
from .._numerics.rounding import hashed, random_bits
from .._printing.printable import Printable, new_table
from ..formats import E4M3
from ..layers.roles import is_embedding
from ..layers.walk import path_string


BLOCK = 128
"""How many elements along the last axis share a scale."""

# Beyond this, values in a block differ so little that float32's own rounding counts.
_MAX_EXPONENT = 16.0

# The largest number whose square float32 holds.
_SQUARE_ROOT_OF_MAX = np.nextafter(np.float32(2.0**64), np.float32(0.0))

# Each mini-step adds to these; they are zero again after an update.
_SUMS = ("acc_grads", "grad_acc")


class QuantizedState(Printable, eqx.Module):
    """The state of `quantized_state`. Printed, it says what is stored in FP8, and why the rest is not.

    Args:
        step: How many updates there were; the random bits of the rounding follow from it.
        optimizer: The wrapped optimizer's state, which has the bits of E4M3 values in place of moments. They are bytes,
            not floating-point numbers, so that what casts or filters the floating-point arrays of a tree leaves them
            alone.
        scales: For each array of that state, the largest magnitude of each block of 128 elements, NaN if the block
            holds an infinity or NaN; None if the array is not quantized.
        exponents: For each array, the exponents of its blocks, see `quantized_state`; None as in `scales`.
        unquantized: The path and the reason for each array that belongs to a parameter and stays in float32.
    """

    step: UInt32[Array, ""]
    optimizer: Any
    scales: tuple[Any, ...]
    exponents: tuple[Any, ...]
    unquantized: tuple[tuple[str, str], ...] = eqx.field(static=True)

    def dequantize(self) -> Any:
        """The wrapped optimizer's state, its moments in float32."""
        leaves, structure = jax.tree.flatten(self.optimizer)
        blocks = zip(leaves, self.scales, self.exponents, strict=True)
        return structure.unflatten([x if scale is None else _dequantized(x, scale, k) for x, scale, k in blocks])

    def __rich__(self) -> RenderableType:
        table = new_table("optimizer state")
        for column in ("array", "stored as", "why"):
            table.add_column(column)
        leaves = jax.tree_util.tree_flatten_with_path(self.optimizer)[0]
        for (path, x), scale in zip(leaves, self.scales, strict=True):
            if scale is not None:
                table.add_row(path_string(path), f"E4M3{list(x.shape)}", "")
        for path, reason in self.unquantized:
            table.add_row(path, "float32", reason)
        return table


def quantized_state(
    optimizer: optax.GradientTransformation | optax.MultiSteps,
    *,
    min_size: int = 4096,
    where: Callable[[str, Any], bool] | None = None,
) -> optax.GradientTransformationExtraArgs:
    """An Optax optimizer whose moments are stored in FP8: 1.06 bytes per element instead of 4.

    Each update dequantizes the moments, lets the optimizer compute in float32, and quantizes the new ones. With AdamW
    the state takes 2.13 bytes per parameter instead of 8.

    **What is quantized.** Arrays of the state that have the path and the shape of a parameter, and whose elements start
    as one number: the moments of Adam, AdamW, Lion and Muon, those that Adafactor does not factor, and others alike. In
    float32 stay copies of parameters (schedule-free), the sums of gradients of `optax.MultiSteps`, what `min_size` and
    `where` exclude, and arrays whose last axis, or each device's part of it, is not a multiple of 128. Print the state
    to see why. Initialise outside `jit` if parameters are divided over devices: inside, the parts are known only on a
    mesh with explicit axes.

    **How.** COAT (arXiv:2410.19313, "dynamic range expansion"), for first and second moments alike: each block of 128
    elements along the last axis has a `scale`, its largest magnitude, and an exponent `k`, and stores
    `q = sign(x) * (|x| / scale)**k * 448` in E4M3. The exponent maps the block's range to E4M3's:

        k = log(448 / 2**-6) / log(max |x| / min |x|), at most 16

    Scale and exponent keep the array's rank, with one element per block, so that they can have its sharding. This
    differs from COAT in two points:

    - The minimum is over nonzero elements, and E4M3's range is that of its normal values. So no nonzero element becomes
      zero, not even a second moment `1e-30` beside one of 1, and neighboring values of `q` stand for values of `x` at
      most a factor of `1.125**(1 / k)` apart. With the subnormal values, which COAT includes, it would be `2**(1 / k)`.
      Magnitudes below 1.2e-38 count as zero.
    - Rounding is stochastic: an `x` between its neighbors `lo` and `hi` becomes `hi` with probability
      `(x - lo) / (hi - lo)`, so its mean is `x`. To nearest, `0.999 * v` would round to `v` again, and a second moment
      could change only with the scale of its block. Random bits are a hash of the step, the array and the element, so a
      resumed run takes the same ones.

    **While an update runs**, no moments are in float32 in memory: compiled for an NVIDIA GPU, an elementwise optimizer
    takes two launches for each array, one that measures the blocks and one that computes the update and rounds. Both
    read gradient and moments, and compute the optimizer's arithmetic. Where that is not elementwise in the
    moments, XLA computes it again for each of them, and may keep arrays in float32; the numbers are the same.

    Args:
        optimizer: Any Optax optimizer, also one made of `optax.chain`, `optax.masked` or `optax.multi_transform`; it
            can be inside these too. It gets gradients and parameters in float32, finite gradients up to 1.8e19, whose
            square float32 holds; its updates are cast to the dtype of the gradients.
        min_size: Moments of parameters with fewer elements stay in float32.
        where: `where(path, parameter)`, with a path such as `"layers.0.weight"`, says whether the moments of a
            parameter may be in FP8. By default all may except those of `haliax.nn.Embedding` and
            `equinox.nn.Embedding`. `HostOptimizer` shows its optimizer the arrays alone, so name embeddings here, as in
            `where=lambda path, _: "embed" not in path`.

    Returns:
        The optimizer. Its state is a `QuantizedState`; `transfer_optimizer_state` makes one from the state in float32,
        and the reverse.

    Raises:
        ValueError: If `optimizer` is not one. `update`, if the state is not a `QuantizedState`.

    Example:
        >>> optimizer = quantized_state(optax.adamw(1e-3))
        >>> params = {"weight": jnp.ones((64, 128)), "bias": jnp.ones(128)}
        >>> state = optimizer.init(params)
        >>> adam = state.optimizer[0]
        >>> adam.mu["weight"].dtype, adam.mu["bias"].dtype
        (dtype('uint8'), dtype('float32'))
        >>> updates, state = optimizer.update(params, state, params)
        >>> jnp.allclose(state.dequantize()[0].mu["weight"], 0.1)
        Array(True, dtype=bool)
    """
    if not (hasattr(optimizer, "init") and hasattr(optimizer, "update")):
        raise ValueError(f"optimizer={optimizer!r} of quantized_state is not an optimizer; use optax.adamw(1e-3)")
    inner = optax.with_extra_args_support(cast(Any, optimizer))

    # Optax's types allow trees of its own kinds alone.
    def init(params: Any) -> Any:
        start = lambda params: optimizer.init(optax.tree.cast(params, jnp.float32))
        leaves, structure = _planned(start, params, min_size, where)
        # Moments never exist in float32: what this program does not return, it does not make.
        rest = lambda params: [
            x for x, leaf in zip(structure.flatten_up_to(start(params)), leaves, strict=True) if not leaf.is_quantized
        ]
        others = iter(jax.jit(rest)(params))
        stored = [leaf.first() if leaf.is_quantized else (leaf.placed(next(others)), None, None) for leaf in leaves]
        data, scales, exponents = zip(*stored, strict=True) if stored else ((), (), ())
        unquantized = tuple((path_string(leaf.path), leaf.reason) for leaf in leaves if leaf.reason)
        return QuantizedState(jnp.zeros((), jnp.uint32), structure.unflatten(data), scales, exponents, unquantized)

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        if not _is_state(state):
            raise ValueError(
                f"state is a {type(state).__name__}, not a QuantizedState: it is the wrapped optimizer's own. Put it "
                "into FP8 with transfer_optimizer_state(opt_state, model, model, optimizer=optimizer)"
            )
        dtypes = jax.tree.map(lambda x: x.dtype, updates)
        wide = None if params is None else optax.tree.cast(params, jnp.float32)
        updates = jax.tree.map(_square_is_finite, optax.tree.cast(updates, jnp.float32))
        of = lambda state: inner.update(updates, state.dequantize(), wide, **extra)
        # XLA keeps in memory what is computed once and read several times, which would be all new moments in float32.
        # So each reduction and the rest have their own copy of the optimizer's arithmetic, and XLA computes it in two
        # launches: both reductions, and the rest.
        largest = _reduced(_largest, state, of(state)[1])
        state = _read_again(state, state.scales)
        smallest = _reduced(_smallest, state, of(state)[1])
        blocks = _blocks(largest, smallest)
        updates, new = of(_read_again(state, blocks))
        updates = jax.tree.map(lambda x, dtype: x.astype(dtype), updates, dtypes)
        return updates, _stored(state, new, state.step + np.uint32(1), blocks)

    return optax.GradientTransformationExtraArgs(init, update)


def with_moments_of(optimizer: Any, opt_state: Any, params: Any) -> Any:
    """An optimizer's state with its moments in the precision in which `optimizer` stores them.

    Args:
        optimizer: The optimizer that goes on, with or without `quantized_state` around any of its parts.
        opt_state: A state of the same optimizer, with or without `quantized_state`.
        params: The parameters.

    Raises:
        ValueError: If the state is not that of such an optimizer.
    """
    wide = jax.tree.map(lambda node: node.dequantize() if _is_state(node) else node, opt_state, is_leaf=_is_state)

    def stored(node: Any, new: Any) -> Any:
        if not _is_state(node):
            return new
        blocks = _blocks(_reduced(_largest, node, new), _reduced(_smallest, node, new))
        return _stored(node, new, node.step, blocks)

    try:
        return jax.tree.map(stored, optimizer.init(params), wide, is_leaf=_is_state)
    except (ValueError, TypeError) as error:
        raise ValueError(
            "opt_state does not belong to optimizer: the optimizer that goes on may differ from the one that made the "
            "state only in quantized_state"
        ) from error


def _square_is_finite(gradient: Float32[Array, "*shape"]) -> Float32[Array, "*shape"]:
    """A gradient within the numbers whose squares are finite; infinities and NaN as they are.

    A second moment that is infinite would take its block along. Saturated itself, it would be too small for the first
    moment: updates of 1e10 learning rates follow from a gradient of 1e30.
    """
    limit = _SQUARE_ROOT_OF_MAX
    return jnp.where(jnp.isfinite(gradient), lax.clamp(-limit, gradient, limit), gradient)


class _Leaf(NamedTuple):
    """What becomes of an array of the state.

    Args:
        path: Where it is.
        parameter: The parameter that it belongs to; None if there is none.
        reason: Why it stays in float32; None if it does not, or belongs to no parameter.
        value: What all of its elements are at first; None if it is not one number.
    """

    path: tuple[Any, ...]
    parameter: Any = None
    reason: str | None = None
    value: float | None = None

    @property
    def is_quantized(self) -> bool:
        return self.parameter is not None and self.reason is None

    def first(self) -> tuple[Array, Array, Array]:
        """Its first data, scales and exponents, divided over devices as the parameter is."""
        assert self.value is not None
        bits = np.asarray(math.copysign(E4M3.max, self.value) if self.value else 0.0, E4M3.dtype).view(np.uint8)
        data = jnp.full_like(self.parameter, bits, jnp.uint8)
        blocks = jnp.max(_in_blocks(data), axis=-1)
        scale, exponent = (jnp.full_like(blocks, x, jnp.float32) for x in (abs(self.value), _MAX_EXPONENT))
        return data, scale, exponent

    def placed(self, x: Array) -> Array:
        """An array that is not quantized, divided over devices as its parameter is."""
        is_known = isinstance(self.parameter, jax.Array) and not isinstance(self.parameter, Tracer)
        return jax.device_put(x, self.parameter.sharding) if is_known and self.parameter.committed else x


def _planned(
    start: Callable[[Any], Any], params: Any, min_size: int, where: Callable[[str, Any], bool] | None
) -> tuple[list[_Leaf], Any]:
    """What becomes of each array of the state that `start` makes, and the state's structure."""
    nodes = jax.tree_util.tree_flatten_with_path(params, is_leaf=is_embedding)[0]
    embeddings = tuple(path for path, node in nodes if is_embedding(node))
    parameters = {tuple(path): x for path, x in jax.tree_util.tree_flatten_with_path(params)[0]}

    def of_parameter(path: tuple[Any, ...], x: Any) -> str | None:
        if x.size < min_size:
            return f"fewer than min_size={min_size} elements"
        if where is not None:
            is_chosen = where(path_string(path), x)
            if not isinstance(is_chosen, bool | np.bool_):
                raise ValueError(
                    f"where of quantized_state returned {is_chosen!r} for {path_string(path)!r}; it must return True "
                    "for a parameter whose moments may be in FP8, or False"
                )
            return None if is_chosen else "left out by where"
        return "an embedding" if any(path[: len(one)] == one for one in embeddings) else None

    def planned(path: tuple[Any, ...], x: Any, value: float | None) -> _Leaf:
        # The longest end of the path that is a parameter's.
        ends = (path[start:] for start in range(len(path) + 1))
        name = next((end for end in ends if end in parameters and parameters[end].shape == x.shape), None)
        if name is None or x.dtype != jnp.float32 or x.ndim == 0:
            return _Leaf(path)
        parameter = parameters[name]
        last, part = x.shape[-1], _shape_of_part(parameter)[-1]
        reason = of_parameter(name, parameter)
        if value is None:
            reason = "starts as more than one number, unlike a moment"
        elif any(getattr(key, "name", None) in _SUMS for key in path):
            reason = "a sum of gradients"
        elif reason is None and part % BLOCK:
            of_device = "" if part == last else f" of which each device has {part},"
            reason = f"the last axis, {last},{of_device} is not a multiple of {BLOCK}"
        return _Leaf(path, parameter, reason, value)

    jaxpr, abstract = jax.make_jaxpr(start, return_shape=True)(params)
    flat, structure = jax.tree_util.tree_flatten_with_path(abstract)
    return [planned(path, x, value) for (path, x), value in zip(flat, _numbers(jaxpr.jaxpr), strict=True)], structure


def _numbers(jaxpr: Any) -> list[float | None]:
    """For each result of a program, the number that all of its elements are; None if the program does not say so."""
    numbers = {
        equation.outvars[0]: float(equation.invars[0].val)
        for equation in jaxpr.eqns
        if equation.primitive is lax.broadcast_in_dim_p and isinstance(equation.invars[0], Literal)
    }
    return [None if isinstance(x, Literal) else numbers.get(x) for x in jaxpr.outvars]


def _shape_of_part(x: Any) -> tuple[int, ...]:
    """The shape of a device's part of an array, as far as it is known."""
    sharding = jax.typeof(x).sharding if isinstance(x, Tracer) else getattr(x, "sharding", None)
    return x.shape if sharding is None else sharding.shard_shape(x.shape)


def _is_state(node: Any) -> TypeGuard[QuantizedState]:
    return isinstance(node, QuantizedState)


class _Blocks(NamedTuple):
    """What the blocks of an array share; see `quantized_state` for the formulas.

    Args:
        largest: Their largest magnitudes, infinite or NaN as they are.
        exponent: Their exponents.
    """

    largest: Float32[Array, "*blocks"]
    exponent: Float32[Array, "*blocks"]

    @staticmethod
    def of(largest: Float32[Array, "*blocks"], smallest: Float32[Array, "*blocks"]) -> "_Blocks":
        """From the largest magnitudes and the smallest of nonzero elements."""
        range_of_block = jnp.log(largest) - jnp.log(smallest)
        exponent = jnp.minimum(_LOG_RANGE / range_of_block, np.float32(_MAX_EXPONENT))
        # Blocks of zeros, and those with an infinity or NaN, whose data do not matter.
        exponent = jnp.where(exponent > 0.0, exponent, np.float32(1.0))
        return _Blocks(largest, exponent)


def _reduced(reduction: Callable[[Array], Array], state: QuantizedState, new: Any) -> list[Array | None]:
    """For each array of an optimizer's new state a number for each block; None where the old one is not quantized."""
    pairs = zip(jax.tree.leaves(new), state.scales, strict=True)
    return [None if scale is None else reduction(jnp.abs(_in_blocks(x))) for x, scale in pairs]


def _largest(magnitude: Float32[Array, "*blocks block"]) -> Float32[Array, "*blocks"]:
    """As bits, in which NaN is larger than any number: some versions of XLA leave it out of a maximum on CPUs."""
    return lax.bitcast_convert_type(jnp.max(lax.bitcast_convert_type(magnitude, jnp.uint32), axis=-1), jnp.float32)


def _smallest(magnitude: Float32[Array, "*blocks block"]) -> Float32[Array, "*blocks"]:
    """Of elements that count as nonzero; 0 or subnormal if there are none."""
    # Bits are in the order of the numbers, and wrap around for those below the smallest normal one. XLA keeps in memory
    # what a selection would read twice.
    tiny = lax.bitcast_convert_type(np.finfo(np.float32).tiny, jnp.uint32)
    smallest = jnp.min(lax.bitcast_convert_type(magnitude, jnp.uint32) - tiny, axis=-1)
    return lax.bitcast_convert_type(smallest + tiny, jnp.float32)


def _blocks(largest: list[Array | None], smallest: list[Array | None]) -> list[_Blocks | None]:
    pairs = zip(largest, smallest, strict=True)
    return [None if a is None or b is None else _Blocks.of(a, b) for a, b in pairs]


def _read_again(state: QuantizedState, first: Sequence[Any]) -> QuantizedState:
    """The state, which XLA reads again after something else was computed, for each array.

    Args:
        state: The state.
        first: What is computed before an array is read again; None for arrays that are not quantized.
    """
    leaves, structure = jax.tree.flatten(state.optimizer)
    stored = zip(leaves, state.scales, state.exponents, first, strict=True)
    again = [(x, s, k) if s is None else once_computed((x, s, k), after) for x, s, k, after in stored]
    data, scales, exponents = zip(*again, strict=True) if again else ((), (), ())
    return QuantizedState(state.step, structure.unflatten(data), scales, exponents, state.unquantized)


def _stored(state: QuantizedState, new: Any, step: UInt32[Array, ""], blocks: list[_Blocks | None]) -> QuantizedState:
    """An optimizer's new state, quantized where the old one is."""
    leaves, structure = jax.tree.flatten(new)
    of_step = hashed(step)
    data = [
        x if of is None else _rounded(x, of, hashed(of_step ^ np.uint32(index)))
        for index, (x, of) in enumerate(zip(leaves, blocks, strict=True))
    ]
    scales = tuple(None if of is None else jnp.where(jnp.isfinite(of.largest), of.largest, jnp.nan) for of in blocks)
    exponents = tuple(None if of is None else of.exponent for of in blocks)
    return QuantizedState(step, structure.unflatten(data), scales, exponents, state.unquantized)


def _dequantized(
    data: UInt8[Array, "*shape"], scale: Float32[Array, "*blocks"], exponent: Float32[Array, "*blocks"]
) -> Float32[Array, "*shape"]:
    q = lax.bitcast_convert_type(data, E4M3.dtype).astype(jnp.float32)
    # In two factors: one may be too small for float32 where its product with the scale is not.
    exponent, scale = _of_elements(np.float32(2.0) * exponent), _of_elements(scale)
    root = jnp.exp(jnp.log(jnp.abs(q) / np.float32(E4M3.max)) / exponent)
    return jnp.sign(q) * (scale * root * root)


def _is_zero(magnitude: Float32[Array, "*shape"]) -> Bool[Array, "*shape"]:
    """Compilers flush subnormal numbers to zero, some of them and in some places."""
    return magnitude < np.finfo(np.float32).tiny


def _rounded(x: Float32[Array, "*shape"], of: _Blocks, seed: UInt32[Array, ""]) -> UInt8[Array, "*shape"]:
    """An array's data: the bits of E4M3 values."""
    largest, exponent = _of_elements(of.largest), _of_elements(of.exponent)
    magnitude = jnp.abs(x)
    is_zero = _is_zero(magnitude)
    logs = jnp.log(jnp.where(is_zero, largest, magnitude)) - jnp.log(largest)
    limits = np.float32(E4M3.smallest_normal), np.float32(E4M3.max)
    q = lax.clamp(limits[0], jnp.exp(exponent * logs) * limits[1], limits[1])
    spacing = spacing_of(q, E4M3)
    lower = jnp.floor(q / spacing) * spacing
    # Both neighbors over the magnitude: the one may be too small for float32, and the other too large.
    below, above = (jnp.exp(jnp.log(n / limits[1]) / exponent - logs) for n in (lower, lower + spacing))
    is_up = _uniform(x.shape, seed) * (above - below) < np.float32(1.0) - below
    # What was measured may be an ulp below the largest element, whose upper neighbor would be the bits of NaN.
    rounded = jnp.minimum(jnp.where(is_up, lower + spacing, lower), limits[1])
    # Normal values of E4M3 all: the middle bits of a float32. XLA would copy the result of a cast to E4M3 once more to
    # read it as bytes.
    bits = lax.bitcast_convert_type(rounded, jnp.uint32) >> np.uint32(23 - E4M3.mantissa_bits)
    bits -= np.uint32((127 - _BIAS) << E4M3.mantissa_bits)
    sign = jnp.where(x < 0.0, np.uint32(0x80), np.uint32(0))
    return (jnp.where(is_zero, np.uint32(0), bits) | sign).astype(jnp.uint8)


# Of E4M3's exponents.
_BIAS = 7

_LOG_RANGE = np.float32(math.log(E4M3.max / E4M3.smallest_normal))


def _in_blocks(x: Shaped[Array, "*shape"]) -> Shaped[Array, "..."]:
    return x.reshape(*x.shape[:-1], x.shape[-1] // BLOCK, BLOCK)


def _of_elements(x: Float32[Array, "*blocks"]) -> Float32[Array, "..."]:
    """What blocks share, for each of their elements.

    XLA fuses what reads it with the optimizer's own arithmetic, which does not know of blocks; arrays in the shape of
    blocks it computes several times, or keeps.
    """
    return jnp.broadcast_to(x[..., None], (*x.shape, BLOCK)).reshape(*x.shape[:-1], x.shape[-1] * BLOCK)


def _uniform(shape: tuple[int, ...], seed: UInt32[Array, ""]) -> Float32[Array, "*shape"]:
    """Numbers in [0, 1), of 24 bits."""
    return (random_bits(shape, seed) >> np.uint32(8)).astype(jnp.float32) * np.float32(2.0**-24)
