"""The gradients of a step's batch: microbatches, and their reduction over devices."""

import contextlib
import dataclasses
import enum
import functools
from collections.abc import Callable, Iterator
from typing import Any, cast

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from haliax.partitioning import current_thread_local_mapping
from haliax.quantization import CustomGradientAccumulation
from jax.sharding import PartitionSpec
from jaxtyping import Array, DTypeLike, Key

from .._jax.errors import calls_users_function, is_about_mapped_mesh_axis
from .._jax.meshes import automatic_mesh, divided, whole_in_front
from .._product.arguments import floating_dtype
from .._state.op_state import OverwriteWithGradient
from .cast import with_rounding_keys
from .gradients import filter_value_and_grad, value_and_grad_of_part, with_complete_states
from .loss import loss_and_aux, scalar_loss
from .updates import accumulate_gradients, in_float32, split_state, trainable_part


@dataclasses.dataclass(frozen=True)
class ReduceOnce:
    """Adds up gradients on each device, and over devices once per step, in a dtype of your choice.

    By default XLA decides, and gradients travel in the dtype of the products; if devices divide the weights (FSDP), in
    every microbatch. With this choice each device takes the gradients of its own rows and adds them up in float32 over
    the microbatches; then all devices reduce these sums. A weight's gradient travels once per step.

    Until then every device holds a whole gradient in float32: four bytes for each weight that the other mesh axes do
    not divide. Under FSDP that can exceed everything else on the device; see `docs/many-devices.md`.

    The rows of a device count as a microbatch of their own. The loss is the mean over devices, and `current` and
    `nvfp4` compute scales from the device's rows alone. Random keys are split for devices too, and arrays in `aux` have
    an entry for each microbatch and device. Kernels are quantized once per step, as with `quantize_kernels="once"`, so
    the loss must not cast them: convert with `compute_dtype=jnp.bfloat16` instead. Inside the loss, Haliax's axis
    mapping omits the mesh axes of `over`.

    Args:
        over: The mesh axis, or axes, over which the rows of the batch are divided: "data", or ("replica", "data").
        dtype: The dtype in which gradients travel and are added up: `jnp.float32` or `jnp.bfloat16`.

    Raises:
        ValueError: If `over` names nothing, or `dtype` is not a floating-point dtype of at least 16 bits. When the step
            is called: if no mesh with these axes as automatic axes is set, or they do not divide the batch.

    References:
        `MixedPrecisionPolicy(reduce_dtype=...)` and `set_requires_gradient_sync` of PyTorch's `fully_shard`.

    Example:
        >>> from haliax_fp8.training import ReduceOnce
        >>> once = ReduceOnce(over="data")
        >>> step = TrainStep(loss_fn, optax.adamw(1e-3), microbatches=4, reduce_gradients=once)
        >>> step.reduce_gradients.over
        ('data',)
    """

    over: str | tuple[str, ...]
    dtype: DTypeLike = jnp.float32

    def __post_init__(self) -> None:
        over = (self.over,) if isinstance(self.over, str) else self.over
        if not over:
            raise ValueError(f"over={self.over!r} must be the name of a mesh axis, such as 'data', or a tuple of names")
        object.__setattr__(self, "over", tuple(over))
        object.__setattr__(self, "dtype", floating_dtype("dtype", self.dtype))

    @property
    def axes(self) -> tuple[str, ...]:
        """The names of the mesh axes in `over`."""
        return cast(tuple[str, ...], self.over)


@dataclasses.dataclass(frozen=True)
class DeviceParts:
    """The devices' parts of a batch, whose gradients are reduced once.

    Args:
        choice: The mesh axes to reduce over, and the dtype.
    """

    choice: ReduceOnce

    def count(self) -> int:
        """The number of devices, or groups of them, that have their own rows.

        Raises:
            ValueError: If no mesh with automatic axes, including those of `over`, is set.
        """
        mesh = jax.sharding.get_abstract_mesh()
        if not automatic_mesh():
            raise ValueError(
                f"{self._argument} needs a mesh with automatic axes: call the step under jax.set_mesh(mesh), with "
                "axis_types=AxisType.Auto for all axes; on one device there is nothing to reduce"
            )
        for axis in self.choice.axes:
            if axis not in mesh.shape:
                names = ", ".join(map(repr, mesh.shape))
                raise ValueError(f"over={axis!r} is not an axis of the mesh, which has {names}")
        return int(np.prod([mesh.shape[axis] for axis in self.choice.axes]))

    def split(self, x: jax.Array) -> jax.Array:
        """The rows of an array, `[rows, ...]`, by device: `[parts, rows / parts, ...]`."""
        parts = self.count()
        if x.ndim == 0 or x.shape[0] % parts:
            raise ValueError(
                f"{self._argument}: {parts} devices do not divide the leading axis of a batch array of shape "
                f"{x.shape}, or of its microbatches"
            )
        return self.apart(x.reshape(parts, x.shape[0] // parts, *x.shape[1:]))

    def apart(self, x: jax.Array) -> jax.Array:
        """The array, divided so that each device has its own entry of the first axis."""
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return x
        return divided(x, PartitionSpec(self.choice.axes, *(PartitionSpec.UNCONSTRAINED for _ in x.shape[1:])))

    def map(self, function: Callable[..., Any], parts: Any) -> Any:
        """The results of a function for each device's part, along the first axis."""
        # `jax.vmap` takes it, but Equinox's types do not declare it.
        for_jax: dict[str, Any] = {"spmd_axis_name": self.choice.axes}
        try:
            with self._mapping():
                return eqx.filter_vmap(function, **for_jax)(parts)
        except ValueError as error:
            if not is_about_mapped_mesh_axis(error):
                raise
            raise ValueError(
                f"loss_fn divides an array over the mesh axes of {self._argument}, but inside it every device has its "
                "own rows. Leave these axes out of its sharding constraints; those that follow from Haliax's axis "
                "mapping leave them out already"
            ) from error

    def reduced[T](self, gradients: T) -> T:
        """The mean of gradients and the maximum of state over the first axis, that of the devices' parts."""

        def reduce(node: Any) -> Any:
            if isinstance(node, CustomGradientAccumulation):
                return _accumulated(node)
            # Not `jnp.sum`, which would compute 16-bit sums in float32.
            return jax.lax.reduce_sum((node / node.shape[0]).astype(self.choice.dtype), (0,))

        return jax.tree.map(reduce, gradients, is_leaf=lambda node: isinstance(node, CustomGradientAccumulation))

    @property
    def _argument(self) -> str:
        """The user's choice, for messages."""
        return f"reduce_gradients=ReduceOnce(over={self.choice.over!r})"

    @contextlib.contextmanager
    def _mapping(self) -> Iterator[None]:
        """Haliax's axis mapping without the mesh axes over which the parts are divided."""
        mapping = current_thread_local_mapping()
        if mapping is None:
            yield
            return
        with hax.axis_mapping({name: rest for name, axes in mapping.items() if (rest := self._without(axes))}):
            yield

    def _without(self, axes: Any) -> Any:
        rest = tuple(axis for axis in ((axes,) if isinstance(axes, str) else axes) if axis not in self.choice.axes)
        return rest[0] if len(rest) == 1 else rest


def _accumulated(gradients: CustomGradientAccumulation) -> Any:
    if isinstance(gradients, OverwriteWithGradient):
        # In one reduction: our states accumulate by maximum.
        return jax.tree.map(lambda x: x.max(axis=0), gradients)
    parts = [jax.tree.map(lambda x: x[i], gradients) for i in range(jax.tree.leaves(gradients)[0].shape[0])]  # noqa: B023
    return functools.reduce(lambda total, part: total.accumulate(part), parts)


class KernelQuantization(enum.Enum):
    """How often a training step quantizes its kernels. The quantized numbers are the same.

    On several devices, XLA may add up dgrad in another order with `ONCE`, which changes last bits.
    """

    IN_EACH_MICROBATCH = "in_each_microbatch"
    """Every product quantizes its kernel, and nothing is kept from one microbatch to the next."""

    ONCE = "once"
    """The step quantizes them before the first microbatch, for all of them; see `quantize_kernels`.

    A kernel is read once per step. Its copies take two bytes per weight for as long as the step lasts.
    """

    GATHERED_ONCE = "gathered_once"
    """As `ONCE`, and each device receives the kernels that it multiplies with before the first microbatch, in FP8.

    Every weight travels once per step, as one byte. Every device then holds two bytes per weight of whole kernels.
    `quantize_kernels(gather=True)` says which kernels are whole.
    """


class StepInput(eqx.Module):
    """The arguments of a step other than the model and the optimizer's state.

    Args:
        batch: The arguments of the loss after the model.
        key: The key for recipes that round at random.
        loss_key: The key for the loss.
    """

    batch: tuple[Any, ...]
    key: Key[Array, "*parts"] | None
    loss_key: Key[Array, "*parts"] | None

    def split(self, count: int, part: Callable[[Array], Array]) -> tuple["StepInput", "StepInput"]:
        """The arrays of all parts, along a new first axis; and the input that all parts share.

        Args:
            count: The number of parts.
            part: Splits one array.
        """
        arrays, shared = eqx.partition(self.batch, eqx.is_array)
        keys = [None if key is None else jax.random.split(key, count) for key in (self.key, self.loss_key)]
        return StepInput(jax.tree.map(part, arrays), *keys), StepInput(shared, None, None)


@dataclasses.dataclass(frozen=True)
class BatchGradients:
    """Loss and gradients of a step's batch.

    Args:
        loss: The mean over parts: microbatches, and devices if gradients are reduced once.
        aux: The auxiliary results, or None. With several parts, arrays have one more axis in front.
        overwrites: The part of the gradients that replaces state, from the largest amaxes of all parts.
        gradients: The other gradients: the mean over parts.
    """

    loss: Array
    aux: Any
    overwrites: Any
    gradients: Any


@calls_users_function
def gradients_of_batch(
    loss_fn: Callable[..., Any],
    model: Any,
    inputs: StepInput,
    count: int,
    *,
    reduction: ReduceOnce | None,
    has_aux: bool,
    recompute_in_scans: bool,
) -> BatchGradients:
    """Loss and gradients.

    Args:
        loss_fn: The loss.
        model: The model that the loss gets.
        inputs: The batch and the keys.
        count: The number of microbatches.
        reduction: How gradients are reduced over devices; None leaves it to XLA.
        has_aux: Whether the loss also returns auxiliary results.
        recompute_in_scans: As in `filter_grad`.
    """

    def loss_of_part(model: Any, inputs: StepInput) -> Any:
        model = model if inputs.key is None else with_rounding_keys(model, inputs.key)
        named = {} if inputs.loss_key is None else {"key": inputs.loss_key}
        returned = loss_fn(model, *inputs.batch, **named)
        return loss_and_aux(returned) if has_aux else (scalar_loss(returned), None)

    devices = None if reduction is None else DeviceParts(reduction)
    choices = {"has_aux": True, "recompute_in_scans": recompute_in_scans}
    if count == 1 and devices is None:
        (loss, aux), gradients = filter_value_and_grad(loss_of_part, **choices)(model, inputs)
        return BatchGradients(loss, aux, *split_state(gradients))

    value_and_grad = value_and_grad_of_part(loss_of_part, **choices)

    def microbatch(inputs: StepInput) -> tuple[Array, Any, Any]:
        if devices is None:
            (loss, aux), gradients = value_and_grad(model, inputs)
        else:
            arrays, shared = inputs.split(devices.count(), devices.split)
            each = lambda part: value_and_grad(model, eqx.combine(part, shared))
            (loss, aux), gradients = devices.map(each, arrays)
        # Sums of bfloat16 gradients stop growing after a few hundred terms.
        gradients = in_float32(gradients)
        return loss, aux, gradients if devices is None else jax.tree.map(devices.apart, gradients)

    if count == 1:
        loss, aux, gradients = microbatch(inputs)
        dtype, others = loss.dtype, None
    else:
        arrays, shared = inputs.split(count, lambda x: _parts(x, count))

        def accumulate(carry: tuple[Array, Any], arrays: StepInput) -> tuple[tuple[Array, Any], list[Array]]:
            loss, aux, gradients = microbatch(eqx.combine(arrays, shared))
            return (carry[0] + in_float32(loss), accumulate_gradients(carry[1], gradients)), jax.tree.leaves(
                eqx.filter(aux, eqx.is_array)
            )

        loss, aux, gradients = microbatch(eqx.combine(jax.tree.map(lambda x: x[0], arrays), shared))
        # So do sums of bfloat16 losses, and those of float16 overflow.
        dtype, loss = loss.dtype, in_float32(loss)
        (loss, gradients), others = jax.lax.scan(accumulate, (loss, gradients), jax.tree.map(lambda x: x[1:], arrays))
    if devices is not None:
        loss, gradients = loss.mean(), devices.reduced(gradients)
    overwrites, gradients = split_state(with_complete_states(model, gradients))
    gradients = jax.tree.map(lambda g, p: (g / count).astype(p.dtype), gradients, trainable_part(model))
    loss, aux = (loss / count).astype(dtype), _stacked(aux, others, devices is not None)
    return BatchGradients(loss, aux, overwrites, gradients)


def _parts(x: Array, count: int) -> Array:
    """The microbatches of an array, along a new first axis."""
    if x.ndim == 0 and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        raise ValueError(
            f"the batch has a single random key, which cannot be split into microbatches={count}; pass it to the step "
            "as loss_key=, which gives each microbatch its own, and loss_fn as its argument 'key'"
        )
    if x.ndim == 0 or x.shape[0] % count:
        raise ValueError(
            f"microbatches={count} does not divide the leading axis of a batch array of shape {x.shape}; give a batch "
            "whose arrays it divides, or move whatever is the same for all microbatches into the loss"
        )
    # If devices divide the leading axis, they keep their rows: the outer part of a divided axis stays divided.
    return whole_in_front(jnp.swapaxes(x.reshape(x.shape[0] // count, count, *x.shape[1:]), 0, 1))


def _stacked(first: Any, others: list[Array] | None, is_stacked: bool) -> Any:
    """The auxiliary results of all parts, stacked along a new first axis.

    Args:
        first: The results of the first microbatch.
        others: The results of the others, leaf by leaf with a first axis; None if there is only one microbatch.
        is_stacked: Whether each microbatch's results already have a first axis, over devices.
    """
    remaining = None if others is None else iter(others)

    def stack(node: Any) -> Any:
        is_named = isinstance(node, hax.NamedArray)
        if not is_named and not eqx.is_array(node):
            return node
        array = node.array if is_named else node
        array = array if is_stacked else array[None]
        if remaining is not None:
            more = next(remaining)
            array = jnp.concatenate([array, more.reshape(-1, *more.shape[2:]) if is_stacked else more])
        return hax.named(array, ("microbatch", *node.axis_names)) if is_named else array

    return jax.tree.map(stack, first, is_leaf=lambda node: isinstance(node, hax.NamedArray))
