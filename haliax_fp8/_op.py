"""Fp8DotGeneral: a recipe with its state, callable wherever `lax.dot_general` is."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, cast, final

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import wadler_lindig as wl
from haliax.state_dict import StateDict
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, DTypeLike, Float, Int

from ._jax.meshes import sharding_of_groups, sharding_of_product
from ._product.arguments import check_groups, check_key, check_operands, floating_dtype, precision_of
from ._product.contraction import AbstractContraction, DotContraction
from ._product.dimensions import DimensionNumbers
from ._product.grouped.contraction import RaggedContraction
from ._product.grouped.implementation import implementation_for
from ._product.kernel_for_products import KernelForProducts, dtype_of_scales, require_fit
from ._product.primitive import fp8_dot_general
from ._product.quantize_kernel import quantize_kernel
from ._product.spec import DgradKernel, KernelResidual, ProductSpec
from ._state.op_state import AbstractOp, OpState, leading_axes, require_state, require_stored_scales
from .recipes.catalog import RecipeLike, as_recipe
from .recipes.recipe import OPERAND_NAMES, Recipe
from .recipes.scaling import AmaxHistory, DelayedScaling, FolderScales
from .scopes import FP8_DOT_GENERAL, FP8_RAGGED_DOT


@final
@dataclasses.dataclass(frozen=True, eq=False)
class Skipped:
    """The layers that a conversion left in high precision.

    Equal to any other: models that differ in nothing else are the same program to JAX, and fit together in a tree map.
    So a `jit` of a user's own returns, for every model, the reasons of the one that it was traced with. `TrainStep` and
    `calibrate` return those of the model that they take.

    Args:
        reasons: Why each stays in high precision, by its path.
    """

    reasons: Mapping[str, str]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Skipped)

    def __hash__(self) -> int:
        return hash(Skipped)

    def __repr__(self) -> str:
        """Short: it stands in printed tree structures."""
        return f"Skipped({len(self.reasons)})"


# The words of a key of JAX's default generator.
_KEY = hax.Axis("fp8_key", 2)


class Fp8DotGeneral(AbstractOp):
    """A drop-in for `lax.dot_general` that multiplies in FP8 and remembers what its recipe needs.

    `out = dot(q(input), q(kernel)) * (scale_input * scale_kernel)`, and in the backward pass
    `dx = dot(q(g), q(kernel)) * ...`, `dw = dot(q(input), q(g)) * ...`: the three products run on FP8 operands and
    accumulate in float32. Gradients have the dtype of their operand. The gradient with respect to `state` is the state
    of the next step: split it off with `partition_for_grad_overwrite`, and write it back with `apply_updates`.

    Args:
        state: What the recipe remembers; None for a stateless recipe.
        key: Words of `with_rounding_keys`' key, for recipes that round stochastically; zeros before, None for others.
        recipe: Format and scaling of each operand. `init` also takes the name of a recipe, or a scaling to use for all.
        compute_dtype: Rounds operands, output and gradients to this dtype around the product, as a layer that computes
            in bfloat16 would. None does not round.
        kernel_shape: The sizes of the kernel's free axes, if known. `einsum` may swap the operands; these sizes tell
            the kernel from the input. If they do not decide (or are None), the kernel is the second operand.
        kernel_first: Whether the kernel is the first operand; None leaves that to `kernel_shape`.
        stack: The axes of the layer stack that the op's layer is in; these are the leading axes of state and key.
        has_key: Whether `key` was given one. Not None instead of zeros: a model keeps its structure when it gets keys.
        kernel_residual: What the backward pass keeps of the kernel; `fp8_linear_layers` sets it from its configuration.
        one_pass: Whether GPU kernels quantize operands in blocks, see `Fp8Config`; also set from the configuration.
        allow_dense_groups: Whether `ragged_dot` may multiply every row by the kernels of all groups where the device
            has no grouped products in FP8, or none for the recipe; also set from the configuration.
        state_per_group: Whether each group of `ragged_dot` has a state of its own; its axis is the last of `stack`.
        quantized_kernel: The kernel as its products take it, from `quantize_kernels`; else each product quantizes it.
        skipped: What the conversion that made it left in high precision, for `describe`; None without a conversion.
        folder_scales: The kernel's scales in a published folder, from `huggingface.with_folder_scales`.

    Raises:
        ValueError: If `recipe` or `compute_dtype` is of another kind; when called, if operands
            are not floating-point arrays, contracted axes differ in size, a key or the state is missing, or the state
            is that of several layers.

    References:
        `flax.linen.fp8_ops.Fp8DotGeneral`, whose numbers it reproduces bit for bit in float32.

    Example:
        >>> op = Fp8DotGeneral.init(DelayedScaling(amax_history_length=4))
        >>> x, w = jnp.full((2, 16), 0.5), jnp.full((16, 8), 2.0)
        >>> op(x, w, (((1,), (0,)), ((), ()))).shape
        (2, 8)
        >>> new = jax.grad(lambda op: op(x, w, (((1,), (0,)), ((), ()))).sum(), allow_int=True)(op)
        >>> new.amax_history("input")
        Array([0.5, 0. , 0. , 0. ], dtype=float32)
    """

    operand_names: ClassVar[tuple[str, ...]] = OPERAND_NAMES

    state: OpState | None = None
    key: hax.NamedArray | None = None
    # The default exists only for our message: `init` makes what the others need.
    recipe: Recipe = eqx.field(static=True, default=cast(Any, None))
    compute_dtype: np.dtype | None = eqx.field(static=True, default=None)
    kernel_shape: tuple[int, ...] | None = eqx.field(static=True, default=None)
    kernel_first: bool | None = eqx.field(static=True, default=None)
    stack: tuple[hax.Axis, ...] = eqx.field(static=True, default=())
    has_key: bool = eqx.field(static=True, default=False)
    kernel_residual: KernelResidual = eqx.field(static=True, default=KernelResidual.KEEP)
    one_pass: bool = eqx.field(static=True, default=False)
    allow_dense_groups: bool = eqx.field(static=True, default=False)
    state_per_group: bool = eqx.field(static=True, default=False)
    quantized_kernel: KernelForProducts[hax.NamedArray] | None = None
    skipped: Skipped | None = eqx.field(static=True, default=None)
    folder_scales: FolderScales[hax.NamedArray] | None = None

    def __check_init__(self) -> None:
        if self.recipe is None:
            raise ValueError("Fp8DotGeneral() has no recipe and no state; use Fp8DotGeneral.init(recipe='delayed')")

    @staticmethod
    def init(
        recipe: RecipeLike | None = None,
        *,
        compute_dtype: DTypeLike | None = None,
        kernel_shape: Sequence[int] | None = None,
        kernel_first: bool | None = None,
        stack: Sequence[hax.Axis] = (),
        groups: hax.Axis | None = None,
    ) -> "Fp8DotGeneral":
        """An op before its first step.

        Args:
            recipe: See the class; the default is delayed scaling.
            compute_dtype: See the class.
            kernel_shape: See the class.
            kernel_first: See the class.
            stack: The axes of the stack that the op's layer is in; its state gets them too.
            groups: The axis of groups that have a state of their own; None if they share one.
        """
        recipe = as_recipe(DelayedScaling() if recipe is None else recipe)
        if groups is not None:
            require_stored_scales(recipe)
        axes = (*stack, *([] if groups is None else [groups]))
        dtype = None if compute_dtype is None else floating_dtype("compute_dtype", compute_dtype)
        # A list would be equal to no shape, and leave it to the order of operands which one is the kernel.
        shape = None if kernel_shape is None else tuple(kernel_shape)
        if any(size < 0 for size in shape or ()):
            raise ValueError(f"kernel_shape={shape} has a negative size; it has the sizes of the kernel's free axes")
        state, key = OpState.init(recipe, axes), hax.zeros((*axes, _KEY), jnp.uint32) if recipe.needs_key else None
        per_group = groups is not None
        return Fp8DotGeneral(state, key, recipe, dtype, shape, kernel_first, axes, state_per_group=per_group)

    @jax.named_scope(FP8_DOT_GENERAL)
    def __call__(
        self,
        lhs: Float[Array, "..."],
        rhs: Float[Array, "..."],
        dimension_numbers: DimensionNumbers,
        precision: lax.PrecisionLike = None,
        preferred_element_type: DTypeLike | None = None,
        *,
        out_sharding: object = None,
    ) -> Float[Array, "..."]:
        """Multiplies as `lax.dot_general` does.

        Args:
            lhs: The first operand, by convention the input.
            rhs: The second operand, by convention the kernel.
            dimension_numbers: `((lhs_contract, rhs_contract), (lhs_batch, rhs_batch))`.
            precision: The precision of fprop; the default lets the hardware accumulate fast. dgrad and wgrad always
                accumulate in full.
            preferred_element_type: The dtype of the output. Without it, `compute_dtype`; without that, the dtype that
                the operands promote to.
            out_sharding: Of the output, on a mesh with explicit axes: as in `lax.dot_general`, which also says what it
                is without it, and raises where that is ambiguous. Elsewhere it has no effect.

        Returns:
            The product, axes in the order batch, free of lhs, free of rhs.
        """
        check_operands(lhs, rhs)
        require_state(self.state, self.recipe)
        contraction = DotContraction.of(dimension_numbers, self.kernel_shape, lhs.shape, rhs.shape, self.kernel_first)
        sharding = sharding_of_product(lhs, rhs, contraction.dimensions.numbers, out_sharding)
        # From here on the input comes first; the contraction alone knows how they are multiplied.
        input, kernel = contraction.ordered(lhs, rhs)
        spec = _spec(self, contraction, input, kernel, precision, preferred_element_type)
        return _multiply(self, (input, kernel), None, spec, sharding)

    @jax.named_scope(FP8_RAGGED_DOT)
    def ragged_dot(
        self,
        lhs: Float[Array, "rows inputs"],
        rhs: Float[Array, "groups inputs outputs"],
        group_sizes: Int[Array, " groups"],
        precision: lax.PrecisionLike = None,
        preferred_element_type: DTypeLike | None = None,
        *,
        out_sharding: object = None,
    ) -> Float[Array, "rows outputs"]:
        """Multiplies as `lax.ragged_dot` does: consecutive groups of rows, each by its own kernel.

        NVIDIA's GPUs since Hopper and TPU7x have a Pallas kernel that computes one product for each row; a CPU emulates
        FP8. Anything else raises, unless `allow_dense_groups` is set: XLA then multiplies rows by all groups' kernels.
        Sizes that are negative or exceed the rows raise where they are known, and make the product NaN inside `jit`.

        Args:
            lhs: The rows of all groups, one group after the other.
            rhs: The groups' kernels.
            group_sizes: How many rows each group has; 0 is fine. Rows beyond their sum give 0.
            precision, preferred_element_type: As in `__call__`.
            out_sharding: As in `__call__`, of the product of the rows and one kernel.

        Raises:
            ValueError: If operands or sizes do not fit, or the device has no grouped products in FP8 for the recipe.

        Returns:
            The product; one scale serves the kernels of all groups, unless each has a state.
        """
        check_operands(lhs, rhs)
        check_groups(lhs, rhs, group_sizes)
        require_state(self.state, self.recipe, groups=rhs.shape[:1] if self.state_per_group else ())
        implementation = implementation_for(self.recipe, allow_dense=self.allow_dense_groups)
        contraction = RaggedContraction(implementation=implementation, state_per_group=self.state_per_group)
        spec = _spec(self, contraction, lhs, rhs, precision, preferred_element_type)
        return _multiply(self, (lhs, rhs), group_sizes, spec, sharding_of_groups(lhs, rhs, out_sharding))

    def quantize_kernel(
        self,
        kernel: Float[Array, "..."],
        contraction: AbstractContraction,
        leading: int,
        gathered: PartitionSpec | None,
    ) -> KernelForProducts[Array] | None:
        """A kernel as products with it take it; None if the recipe rounds kernels at random, or not at all.

        Args:
            kernel: The kernel, after the axes of ensembles and stacks.
            contraction: Its products, with any input.
            leading: How many axes are in front.
            gathered: How the data are divided over the mesh; None leaves that to XLA.
        """
        spec = dataclasses.replace(_spec(self, contraction, kernel, kernel, None, None), ensemble=leading)
        scale_dtype = dtype_of_scales(None if self.state is None else self.state.table.array, self.recipe)
        return quantize_kernel(kernel, _record_of(self), spec, gathered, scale_dtype, _unnamed(self.folder_scales))

    def with_recipe(self, recipe: Recipe) -> "Fp8DotGeneral":
        """This op with a recipe whose state begins as its own does, such as `recipe.observed` or `recipe.measured`."""
        if self.state is not None and self.state.is_record:
            raise ValueError("an op's recipe was changed inside a differentiated function; change it before that")
        state = OpState.init(recipe, self.stack) if self.state is None else self.state.with_recipe(recipe)
        return dataclasses.replace(self, recipe=recipe, state=state)

    @property
    def observed(self) -> "Fp8DotGeneral":
        """This op with `recipe.observed`: every product in high precision, recording what the state needs."""
        return self.with_recipe(self.recipe.observed)

    def __pdoc__(self, **kwargs: object) -> wl.AbstractDoc:
        """One line in printed models; JAX also prints a module's name each time it traces one."""
        stack = () if self.state is None else leading_axes(self.state)
        quantized = "" if self.quantized_kernel is None else ", kernel quantized"
        return wl.TextDoc(f"Fp8DotGeneral({self.recipe}{f', stack={stack}' if stack else ''}{quantized})")

    # `jnp.einsum(..., _dot_general=op)` hashes what it is given; arrays have no hash, but an op is the same as itself.
    def __hash__(self) -> int:
        return id(self)

    def __eq__(self, other: object) -> bool:
        return self is other

    def scale(self, operand: str) -> Array:
        """The next scale of "input", "kernel" or "output_grad", `[*stack]`; NaN if anything else changed it."""
        row, state = self._row_of(operand)
        return state.scale[..., row]

    def amax_history(self, operand: str) -> Array:
        """The amaxes of an operand's past steps, `[*stack, history]`; not known inside a differentiated function."""
        row, state = self._row_of(operand)
        if state.is_record:
            raise ValueError(
                "amax_history was read inside a function that filter_grad differentiates, where only the scales exist; "
                "read it from the model outside"
            )
        memory = self.recipe.scalings[row].memory
        length = memory.length if isinstance(memory, AmaxHistory) else 0
        return state.array[..., row, 1 : 1 + length]

    def _row_of(self, operand: str) -> tuple[int, OpState]:
        if operand not in OPERAND_NAMES:
            raise ValueError(f"operand={operand!r} is not one of {OPERAND_NAMES}")
        if self.state is None:
            raise ValueError(f"recipe {self.recipe} keeps no state; its scales are computed at each use")
        return OPERAND_NAMES.index(operand), self.state

    def to_state_dict(self, prefix: str | None = None) -> StateDict:
        """Nothing: a state dict holds weights, the same for a converted and an unconverted model.

        Scales and histories are rebuilt within a few steps, and are part of Equinox's serialisation.

        Raises:
            ValueError: If the op has a quantized kernel.
        """
        if self.quantized_kernel is not None:
            raise ValueError("a model with quantized kernels was saved; save the one passed to quantize_kernels")
        return {}

    def from_state_dict(self, state_dict: StateDict, prefix: str | None = None) -> "Fp8DotGeneral":
        """This op as it is; see `to_state_dict`."""
        return self


# Functions and not methods: Equinox makes a module of each method that is looked up.


def _multiply(
    op: Fp8DotGeneral,
    operands: tuple[Array, Array],
    group_sizes: Array | None,
    spec: ProductSpec,
    out: NamedSharding | None = None,
) -> Array:
    (input, kernel), record, quantized = operands, _record_of(op), _unnamed(op.quantized_kernel)
    key = check_key(op.key.array) if op.has_key and op.key is not None and spec.recipe.needs_key else None
    if quantized is None and op.folder_scales is not None:
        quantized = op.quantize_kernel(kernel, spec.contraction, spec.ensemble, None)
    if quantized is None:
        return fp8_dot_general(input, kernel, record, spec, group_sizes, key, out_sharding=out)
    dtype = np.dtype(kernel.dtype) if spec.compute_dtype is None else spec.compute_dtype
    scale_dtype = dtype_of_scales(None if op.state is None else op.state.table.array, op.recipe)
    require_fit(
        quantized, kernel.shape, dtype, spec.contraction, exact_scales=spec.exact_scales, scale_dtype=scale_dtype
    )
    dgrad_kernel = DgradKernel.of(op.kernel_residual, op.recipe, spec.contraction, stacked=spec.stacked, before=True)
    spec = dataclasses.replace(spec, quantized_kernel=jax.tree.structure(quantized), dgrad_kernel=dgrad_kernel)
    return fp8_dot_general(input, kernel, record, spec, group_sizes, key, quantized, out)


def _unnamed(tree: Any) -> Any:
    return jax.tree.map(lambda x: x.array, tree, is_leaf=lambda x: isinstance(x, hax.NamedArray))


def _record_of(op: Fp8DotGeneral) -> Array | None:
    return None if op.state is None else op.state.record


def _spec(
    op: Fp8DotGeneral,
    contraction: AbstractContraction,
    input: Array,
    kernel: Array,
    precision: lax.PrecisionLike,
    preferred_element_type: DTypeLike | None,
) -> ProductSpec:
    recipe, state, compute_dtype = op.recipe, op.state, op.compute_dtype
    stacked = len(op.stack) > op.state_per_group
    if preferred_element_type is not None:
        out_dtype = floating_dtype("preferred_element_type", preferred_element_type)
    else:
        out_dtype = compute_dtype or np.dtype(jnp.promote_types(input.dtype, kernel.dtype))
    return ProductSpec(
        recipe=recipe,
        contraction=contraction,
        compute_dtype=compute_dtype,
        out_dtype=out_dtype,
        precision=precision_of(precision),
        stacked=stacked,
        index_among_sharers=None if state is None else state.index_among_sharers,
        ensemble=int(contraction.state_per_group),
        dgrad_kernel=DgradKernel.of(op.kernel_residual, recipe, contraction, stacked=stacked, before=False),
        one_pass=op.one_pass,
    )
