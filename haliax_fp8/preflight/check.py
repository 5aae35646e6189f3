"""The check of Flax's guide to FP8: does a program multiply in FP8?"""

from typing import Any

from .hlo.dimensions import dimensions
from .hlo.sites import entry_sites, launches, opened
from .hlo.text import parse_hlo
from .hlo.vocabulary import STABLEHLO_FP8_PRODUCT


def has_fp8_product(program: Any) -> bool:
    """Whether a program has a matrix product of FP8 operands.

    Args:
        program: The result of `jax.jit(f).lower(...)`, or of its `.compile()`; or the text of either, as HLO or
            StableHLO.

    Returns:
        For a compiled program, whether one will run: a CPU emulates FP8, so it has no such product. For a lowered one,
        whether one was requested.

    Example:
        >>> lowered = jax.jit(lambda x: jnp.dot(x, x, preferred_element_type=jnp.float32)).lower(
        ...     jnp.ones((16, 16), jnp.float8_e4m3fn))
        >>> has_fp8_product(lowered), has_fp8_product(lowered.compile())
        (True, False)
    """
    text = program if isinstance(program, str) else program.as_text()
    if not text.lstrip().startswith("HloModule"):
        return STABLEHLO_FP8_PRODUCT.search(text) is not None
    sites = (site for launch in launches(entry_sites(parse_hlo(text))) for site in opened(launch))
    sizes = filter(None, map(dimensions, sites))
    return any(size.lhs.dtype.startswith("f8") and size.rhs.dtype.startswith("f8") for size in sizes)


def check_fp8_call(lowered: Any) -> None:
    """Prints whether a lowered function will multiply in FP8 once compiled, like the function in Flax's guide.

    Args:
        lowered: The result of `jax.jit(f).lower(...)`.

    References:
        The user guide "FP8 basics" of Flax, whose own version looks for the operands' types in the text of a custom
        call; XLA no longer prints them there.

    Example:
        >>> check_fp8_call(jax.jit(jnp.dot).lower(jnp.ones((16, 16)), jnp.ones((16, 16))))
        No Fp8 call!
    """
    print("Fp8 call detected!" if has_fp8_product(lowered.compile()) or has_fp8_product(lowered) else "No Fp8 call!")
