"""The first use on a device: known numbers, quantized by the kernels and multiplied by cuDNN."""

import functools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ..._numerics.quantized_array import QuantizedArray
from ..._numerics.rounding import Rotation, Rounding
from ...devices.device import Device
from ...formats import E2M1, E4M3
from ...recipes.scaling import HadamardScaling, MXFP8Scaling, NVFP4Scaling
from ..blocks import block_scaled_dot
from ..dimensions import DotDimensions
from .primitive import BlockUse, as_quantized, quantize_blocks_p


type Quantize = Callable[[Array, tuple], list[QuantizedArray]]
type Multiply = Callable[[QuantizedArray, QuantizedArray, DotDimensions], Array]

_ROWS, _COLUMNS, _OTHER = 256, 384, 128


@functools.cache
def check_once(device: Device) -> None:
    """Raises unless kernels and cuDNN multiply known numbers correctly; does nothing if the device is not this one's.

    Args:
        device: The one that a program is made for.

    Raises:
        RuntimeError: If a product comes out wrong.
    """
    if Device.local() != device:
        return
    # In a thread of its own, which knows nothing of what is traced here.
    with ThreadPoolExecutor(1) as pool:
        wrong = pool.submit(lambda: list(wrong_products(_quantized, _multiplied))).result()
    if wrong:
        raise RuntimeError(
            f"one_pass=True: on this {device.kind}, GPU kernels and cuDNN multiply known numbers incorrectly in "
            f"{', '.join(wrong)}. Use Fp8Config(one_pass=False), with which XLA quantizes, and report the versions of "
            "JAX and cuDNN"
        )


def wrong_products(quantize: Quantize, multiply: Multiply) -> Iterator[str]:
    """The products of known numbers that are not what they should be: every number is exact in its format.

    Args:
        quantize: Quantizes a matrix in bfloat16 for some uses, as `quantize_blocks_p` does.
        multiply: Multiplies two such matrices.
    """
    rows = DotDimensions.of((((1,), (1,)), ((), ())), (_ROWS, _COLUMNS), (_OTHER, _COLUMNS))
    columns = DotDimensions.of((((0,), (0,)), ((), ())), (_ROWS, _COLUMNS), (_ROWS, _OTHER))
    nearest, drawn, nv, mx = Rounding.TO_NEAREST, Rounding.STOCHASTIC, NVFP4Scaling(), MXFP8Scaling()
    square = NVFP4Scaling(square=True)
    for name, dimensions, uses in (
        ("mxfp8 along rows", rows, (BlockUse(mx, E4M3, nearest, (1,), 24),)),
        ("mxfp8 along columns", columns, (BlockUse(mx, E4M3, nearest, (0,), 24),)),
        ("nvfp4 along rows", rows, (BlockUse(nv, E2M1, nearest, (1,), 1), BlockUse(nv, E2M1, drawn, (1,), 1))),
        ("nvfp4 in squares", columns, (BlockUse(square, E2M1, nearest, (0,), 1),)),
        ("nvfp4, rotated", columns, (BlockUse(HadamardScaling(nv), E2M1, nearest, (0,), 1),)),
    ):
        shapes = (_ROWS, _COLUMNS), (_OTHER, _COLUMNS) if dimensions is rows else (_ROWS, _OTHER)
        operands, exact = [], []
        for seed, shape in enumerate(shapes):
            values = _known(shape, seed)
            if name.endswith("rotated"):
                values = np.asarray(Rotation(0, shape[0]).undo(jnp.asarray(4.0 * values)))
            use = uses[seed % len(uses)]
            operands += quantize(jnp.asarray(values, jnp.bfloat16), (use,))
            exact.append(values.astype(np.float64))
        expected = exact[0] @ exact[1].T if dimensions is rows else exact[0].T @ exact[1]
        actual = np.asarray(multiply(operands[0], operands[1], dimensions)).astype(np.float64)
        if not np.array_equal(actual, np.asarray(jnp.asarray(expected, jnp.bfloat16)).astype(np.float64)):
            yield name


def _known(shape: tuple[int, int], seed: int) -> Float[np.ndarray, "rows columns"]:
    """Values of E2M1 times a power of two for each square of 16, whose largest values are in each row and column."""
    random = np.random.default_rng(seed)
    values = random.choice([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], shape) * random.choice([-1.0, 1.0], shape)
    row, column = np.indices(shape)
    values[(row + column) % 16 == 0] = 6.0
    powers = random.integers(0, 4, (shape[0] // 16, shape[1] // 16))
    return values * 2.0 ** np.kron(powers, np.ones((16, 16)))


@functools.partial(jax.jit, static_argnums=1)
def _quantized(x: Array, uses: tuple[BlockUse, ...]) -> list[QuantizedArray]:
    """An operand as it is quantized for some uses on this device; random rounding has the key 0."""
    words = [jax.random.key_data(jax.random.key(0, impl="threefry2x32")) for use in uses if use.rounding.needs_key]
    return as_quantized(quantize_blocks_p.bind(x, *words, uses=uses, device=Device.default()), uses)


@functools.partial(jax.jit, static_argnums=2)
def _multiplied(a: QuantizedArray, b: QuantizedArray, dimensions: DotDimensions) -> Array:
    """Their product in bfloat16."""
    return block_scaled_dot(a, b, dimensions, None, np.dtype(jnp.bfloat16))
