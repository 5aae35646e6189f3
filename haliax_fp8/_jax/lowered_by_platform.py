"""A primitive that becomes something else on each kind of device."""

from collections.abc import Callable
from typing import Any

from jax.extend.core import Primitive
from jax.interpreters import mlir


def lower_by_platform(primitive: Primitive, elsewhere: Callable[..., Any], **by_platform: Callable[..., Any]) -> None:
    """Registers what a primitive is lowered to, by the platform that a program is for.

    It is for primitives what `on_cuda` and `on_cpu` of `xla.py` are for functions.

    Args:
        primitive: The primitive.
        elsewhere: The lowering rule on platforms that have none of their own.
        **by_platform: Further rules by JAX's names for platforms, such as `cpu`, `cuda`, `rocm` and `tpu`.
    """
    mlir.register_lowering(primitive, elsewhere)
    for platform, rule in by_platform.items():
        mlir.register_lowering(primitive, rule, platform=platform)
