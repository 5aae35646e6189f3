"""Checkpoint policies by name: what a rematerialized block keeps of its FP8 products."""

from typing import Any

import jax

from .._product.names import FP8_OPERAND, FP8_OUTPUT


def save_nothing_but_fp8(*args: Any, **params: Any) -> Any:
    """A policy that keeps the FP8 operands of products and recomputes everything else; kernels are quantized again.

    For `jax.checkpoint(block, policy=save_nothing_but_fp8)`; in Haliax,
    `haliax.ScanCheckpointPolicy(save_block_internals=["fp8_operand"])`. Inputs are not quantized again. A product is
    run again if a nonlinear function reads its result.

    Args:
        *args: The arguments that JAX passes to policies.
        **params: The keyword arguments that JAX passes to policies.
    """
    return _OPERANDS(*args, **params)


def save_fp8_operands(*args: Any, **params: Any) -> Any:
    """A policy that keeps the FP8 operands of products and their results, and recomputes norms and activations.

    No product is run again. In Haliax,
    `haliax.ScanCheckpointPolicy(save_block_internals=["fp8_operand", "fp8_output"])`.

    Args:
        *args: The arguments that JAX passes to policies.
        **params: The keyword arguments that JAX passes to policies.
    """
    return _OPERANDS_AND_OUTPUTS(*args, **params)


_OPERANDS = jax.checkpoint_policies.save_only_these_names(FP8_OPERAND)


_OPERANDS_AND_OUTPUTS = jax.checkpoint_policies.save_only_these_names(FP8_OPERAND, FP8_OUTPUT)
