"""Checkpoint policies by name: what a rematerialized block keeps of its FP8 products."""

from collections.abc import Callable
from typing import Any

import jax


FP8_OPERAND = "fp8_operand"
"""The name of the input of a product in FP8, which its backward pass needs."""

FP8_KERNEL = "fp8_kernel"
"""The name of the FP8 copy of a kernel. No policy here keeps it: the kernel is there to be quantized again."""

FP8_OUTPUT = "fp8_output"
"""The name of a product's result."""

type Policy = Callable[..., Any]

save_nothing_but_fp8: Policy = jax.checkpoint_policies.save_only_these_names(FP8_OPERAND)
"""Keeps the FP8 operands of products and recomputes all else: results of products only where something asks for them.

For `jax.checkpoint(block, policy=save_nothing_but_fp8)`; in Haliax, `haliax.ScanCheckpointPolicy(
save_block_internals=["fp8_operand"])`. Quantization is not run again; a product is, if a nonlinear function reads its
result.
"""

save_fp8_operands: Policy = jax.checkpoint_policies.save_only_these_names(FP8_OPERAND, FP8_OUTPUT)
"""Keeps the FP8 operands of products and their results, and recomputes what lies between: norms and activations.

No product is run twice. In Haliax, `haliax.ScanCheckpointPolicy(save_block_internals=["fp8_operand", "fp8_output"])`.
"""
