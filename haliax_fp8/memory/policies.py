"""Checkpoint policies: what a checkpointed block keeps for its backward pass."""

from typing import Any

import equinox as eqx
import haliax as hax
import jax

from .._product.names import FP8_KERNEL, FP8_OPERAND, FP8_OUTPUT


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


def recompute_elementwise(primitive: Any, *args: Any, **params: Any) -> Any:
    """A policy that recomputes elementwise work, and keeps everything else that the backward pass reads.

    Products, reductions, gathers and kernels of others are not run again. FP8 products keep their FP8 inputs. The
    gradient functions of `haliax_fp8` and `TrainStep` give this policy to the bodies of scans. Use it if you take
    gradients with `eqx.filter_grad`: as `jax.checkpoint(body, policy=recompute_elementwise, prevent_cse=False)` in a
    scan of your own, or as `RecomputeElementwise()` in Haliax.

    Args:
        primitive: The operation that JAX asks about.
        *args: The other arguments that JAX passes to policies.
        **params: The keyword arguments that JAX passes to policies.
    """
    if primitive.name == "name":
        return _ALL_NAMED(primitive, *args, **params)
    return primitive.name not in _ELEMENTWISE


class RecomputeElementwise(hax.ScanCheckpointPolicy):
    """`recompute_elementwise` for the blocks of a `Stacked`.

    Example:
        >>> Layers, Embed = hax.make_axes(layers=4, embed=16)
        >>> norms = hnn.Stacked.init(Layers, hnn.LayerNorm, gradient_checkpointing=RecomputeElementwise())(Embed)
    """

    def checkpoint(self, carry_name: str, input_name: str, callable: Any) -> Any:
        """The body of the scan as a checkpoint."""
        del carry_name, input_name
        return eqx.filter_checkpoint(callable, policy=recompute_elementwise, prevent_cse=self.prevent_cse)


# A GPU computes these while it reads their operands. Any operation that is not listed is kept: it may be expensive, and
# so may one that JAX adds.
_ELEMENTWISE = frozenset(
    # Arithmetic and functions of numbers.
    "abs acos acosh add and asin asinh atan atan2 atanh cbrt ceil clamp cos cosh div eq erf erf_inv erfc exp exp2 "
    "expm1 floor ge gt integer_pow is_finite le log log1p logistic lt max min mul ne neg nextafter not or pow rem "
    "round rsqrt select_n shift_left shift_right_arithmetic shift_right_logical sign sin sinh sqrt square sub tan tanh "
    "xor "
    # Types and shapes.
    "bitcast_convert_type broadcast_in_dim concatenate convert_element_type copy copy_p dynamic_slice expand_dims iota "
    "optimization_barrier pad pcast pvary reduce_precision reshape rev slice split squeeze stop_gradient transpose "
    # Random numbers: the bits of a dropout mask take four times the bytes of the mask.
    "random_bits random_fold_in random_seed random_split random_unwrap random_wrap threefry2x32 "
    # An FP8 product, whose operands and result have names. Only what it measured is taken again: if that were kept, XLA
    # would measure in a launch of its own.
    "fp8_fprop fp8_kernel_to_send fp8_scales_of fp8_barrier".split()
)


_OPERANDS = jax.checkpoint_policies.save_only_these_names(FP8_OPERAND)


_OPERANDS_AND_OUTPUTS = jax.checkpoint_policies.save_only_these_names(FP8_OPERAND, FP8_OUTPUT)


_ALL_NAMED = jax.checkpoint_policies.save_only_these_names(FP8_OPERAND, FP8_KERNEL, FP8_OUTPUT)
