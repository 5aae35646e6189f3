"""The check of Flax's guide to FP8: does a program multiply in FP8?"""

import re
from typing import Any

from .hlo import parse_hlo
from .program import entry_sites, launches, opened
from .sizes import dimensions


_FP8_PRODUCT = re.compile(r"stablehlo\.dot\w* .*: \(tensor<[\dx?]*f8E\w+>, tensor<[\dx?]*f8E\w+>\) ->")
"""For example `stablehlo.dot_general %0, %1, ... : (tensor<2x3xf8E4M3FN>, tensor<3x4xf8E5M2>) -> tensor<2x4xf32>`."""


def check_fp8_call(lowered: Any) -> None:
    """Prints whether a lowered function multiplies in FP8, like the function in Flax's guide.

    It is enough that FP8 was requested, as on a CPU, or that XLA multiplies in FP8 what was rounded to it and widened.
    `inspect_step(...).has_fp8_product` says whether a device will.

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
    lowered = getattr(lowered, "lowered", lowered)  # Equinox wraps what JAX returns.
    if not hasattr(lowered, "compile"):
        raise ValueError(
            f"lowered is of type {type(lowered).__name__}; pass jax.jit(f).lower(*args) or "
            "eqx.filter_jit(f).lower(*args)"
        )
    is_fp8 = _FP8_PRODUCT.search(lowered.as_text()) is not None or _multiplies_fp8(lowered.compile().as_text())
    print("Fp8 call detected!" if is_fp8 else "No Fp8 call!")


def _multiplies_fp8(text: str) -> bool:
    sites = (site for launch in launches(entry_sites(parse_hlo(text))) for site in opened(launch))
    sizes = (size for site in sites if (size := dimensions(site)) is not None)
    return any(size.lhs.dtype.startswith("f8") and size.rhs.dtype.startswith("f8") for size in sizes)
