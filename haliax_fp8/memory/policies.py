"""Checkpoint policies: what a checkpointed block keeps for its backward pass."""

import abc
import dataclasses
from typing import Any

import equinox as eqx
import haliax as hax
import jax

from ..scopes import FP8_KERNEL, FP8_OPERAND, FP8_OUTPUT


class _Policy(hax.ScanCheckpointPolicy, abc.ABC):
    """A policy for `jax.checkpoint(policy=...)`, and for `gradient_checkpointing=` of Haliax's stacks."""

    @abc.abstractmethod
    def __call__(self, primitive: Any, /, *args: Any, **params: Any) -> Any:
        """Whether the result of an operation is kept, as JAX asks."""

    def checkpoint(self, carry_name: str, input_name: str, callable: Any) -> Any:
        """The body of the scan as a checkpoint."""
        del carry_name, input_name
        return eqx.filter_checkpoint(callable, policy=self, prevent_cse=self.prevent_cse)

    # JAX hashes policies, and one of Haliax's fields is a list.
    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and vars(other) == vars(self)

    def __hash__(self) -> int:
        return hash(type(self))


@dataclasses.dataclass(frozen=True, eq=False)
class SaveFp8Operands(_Policy):
    """A policy that keeps the FP8 inputs of products and recomputes norms and activations, and quantizes kernels again.

    For `jax.checkpoint(block, policy=SaveFp8Operands())`, and as `gradient_checkpointing=` of a `haliax.nn.Stacked`.

    Args:
        outputs: Whether the results of products are kept too, so that none is run again. Without them, inputs are not
            quantized again, but a product is run again if a nonlinear function reads its result.

    Example:
        >>> block = jax.checkpoint(lambda layer, x: jax.nn.gelu(layer(x).array), policy=SaveFp8Operands(outputs=False))
        >>> [x.dtype.name for x in jax.tree.leaves(jax.vjp(block, layer, x)[1]) if x.dtype == jnp.float8_e4m3fn]
        ['float8_e4m3fn']
    """

    outputs: bool = dataclasses.field(default=True, kw_only=True)

    def __call__(self, primitive: Any, /, *args: Any, **params: Any) -> Any:
        """Whether it has the name of an FP8 input, or of a result."""
        return (_OPERANDS_AND_OUTPUTS if self.outputs else _OPERANDS)(primitive, *args, **params)


class RecomputeElementwise(_Policy):
    """A policy that recomputes elementwise work, and keeps everything else that the backward pass reads.

    Products, reductions, gathers and kernels of others are not run again. FP8 products keep their FP8 inputs. The
    gradient functions of `haliax_fp8` and `TrainStep` give this policy to the bodies of scans. Use it if you take
    gradients with `eqx.filter_grad`: as `jax.checkpoint(body, policy=RecomputeElementwise(), prevent_cse=False)` in a
    scan of your own, or as `gradient_checkpointing=` of a `haliax.nn.Stacked`.

    Example:
        >>> Layers, Embed = hax.make_axes(layers=4, embed=16)
        >>> norms = hnn.Stacked.init(Layers, hnn.LayerNorm, gradient_checkpointing=RecomputeElementwise())(Embed)
    """

    def __call__(self, primitive: Any, /, *args: Any, **params: Any) -> Any:
        """Whether it is something else than elementwise work."""
        if primitive.name == "name":
            return _ALL_NAMED(primitive, *args, **params)
        return primitive.name not in _ELEMENTWISE


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
