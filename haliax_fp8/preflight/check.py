"""The check of Flax's guide to FP8: does a program multiply in FP8?"""

import re
from typing import Any

import equinox as eqx
import jax

from ..devices.device import Device
from .hlo import parse_hlo
from .instruction import FORMATS
from .program import entry_sites, launches, opened
from .sizes import dimensions


STABLEHLO_FP8_PRODUCT = re.compile(r"stablehlo\.dot\w* .*: \(tensor<[\dx?]*f8E\w+>, tensor<[\dx?]*f8E\w+>\) ->")
"""For example `stablehlo.dot_general %0, %1, ... : (tensor<2x3xf8E4M3FN>, tensor<3x4xf8E5M2>) -> tensor<2x4xf32>`."""

TPU_LAYOUT = re.compile(r"\{[\d,]*:T\(\d")
"""For example `f32[512,512]{1,0:T(8,128)}`: arrays are in tiles on TPUs alone, and only once a program is compiled."""


def has_fp8_product(program: Any, device: Device | str | None = None) -> bool:
    """Whether a program has a matrix product of FP8 operands.

    Args:
        program: The result of `jax.jit(f).lower(...)` or `eqx.filter_jit(f).lower(...)`, or of its `.compile()`; or
            the text of either, as HLO or StableHLO.
        device: What a text was compiled for, such as `"tpu7x"`. Only TPUs need it: their compiled programs read FP8
            operands whether or not the TPU multiplies them. A `.compile()` result knows its device.

    Returns:
        For a compiled program, whether one will run: a CPU emulates FP8, as do TPUs before TPU7x, so they have no such
        product. For a lowered one, whether one was requested.

    Raises:
        ValueError: If the text of a program for a TPU has such a product, and the device was not given; or if the
            device's name is unknown.

    Example:
        >>> lowered = jax.jit(lambda x: jnp.dot(x, x, preferred_element_type=jnp.float32)).lower(
        ...     jnp.ones((16, 16), jnp.float8_e4m3fn))
        >>> has_fp8_product(lowered), has_fp8_product(lowered.compile())
        (True, False)
    """
    # Equinox wraps what JAX returns.
    if isinstance(program, eqx.Module):
        program = getattr(program, "lowered", None) or getattr(program, "compiled", program)
    if not (isinstance(program, str) or hasattr(program, "as_text")):
        raise ValueError(
            f"program is of type {type(program).__name__}; pass jax.jit(f).lower(*args), its .compile(), or the text "
            "of either"
        )
    hardware = _device_of(program) if device is None else Device.of(device, of="has_fp8_product")
    text = program if isinstance(program, str) else program.as_text()
    if not text.lstrip().startswith("HloModule"):
        return STABLEHLO_FP8_PRODUCT.search(text) is not None
    sites = (site for launch in launches(entry_sites(parse_hlo(text))) for site in opened(launch))
    operands = ((size.lhs.dtype, size.rhs.dtype) for size in filter(None, map(dimensions, sites)))
    of_fp8 = [dtypes for dtypes in operands if all(dtype.startswith("f8") for dtype in dtypes)]
    if not of_fp8 or TPU_LAYOUT.search(text) is None:
        return bool(of_fp8)
    if hardware is None:
        raise ValueError(
            "program is the text of one compiled for a TPU, and does not say whether that TPU multiplies FP8: pass the "
            "result of .compile() instead, or device='tpu7x'"
        )
    formats = ([FORMATS[dtype] for dtype in dtypes if dtype in FORMATS] for dtypes in of_fp8)
    return any(all(hardware.lacks(format) is None for format in both) for both in formats)


def _device_of(program: Any) -> Device | None:
    """What a program was compiled for; None if that is unknown, or if it is not compiled."""
    if not isinstance(program, jax.stages.Compiled):
        return None
    shardings = jax.tree.leaves((program.output_shardings, program.input_shardings))
    found = next((device for sharding in shardings for device in sharding.device_set), None)
    return None if found is None else Device.of_jax(found)


def check_fp8_call(lowered: Any) -> None:
    """Prints whether a lowered function will multiply in FP8 once compiled, like the function in Flax's guide.

    Args:
        lowered: The result of `jax.jit(f).lower(...)` or `eqx.filter_jit(f).lower(...)`.

    Raises:
        ValueError: If it is something else.

    References:
        The user guide "FP8 basics" of Flax, whose own version looks for the operands' types in the text of a custom
        call; XLA no longer prints them there.

    Example:
        >>> check_fp8_call(jax.jit(jnp.dot).lower(jnp.ones((16, 16)), jnp.ones((16, 16))))
        No Fp8 call!
    """
    if not hasattr(lowered, "compile"):
        raise ValueError(
            f"lowered is of type {type(lowered).__name__}; pass jax.jit(f).lower(*args) or "
            "eqx.filter_jit(f).lower(*args)"
        )
    print("Fp8 call detected!" if has_fp8_product(lowered.compile()) or has_fp8_product(lowered) else "No Fp8 call!")
