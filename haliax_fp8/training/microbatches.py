"""Loss and gradients of a batch, as a whole or in consecutive microbatches."""

import dataclasses
from collections.abc import Callable
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
from jaxtyping import Array, Key

from .._jax.constraint import whole_in_front
from .._jax.errors import calls_users_function
from .device_parts import DeviceParts
from .gradients import filter_value_and_grad, value_and_grad_of_part, with_complete_states
from .keys import with_rounding_keys
from .loss import loss_and_aux, scalar_loss
from .reduction import ReduceOnce
from .updates import accumulate_gradients, in_float32, split_state, trainable_part


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
    given: StepInput,
    count: int,
    *,
    reduction: ReduceOnce | None,
    has_aux: bool,
) -> BatchGradients:
    """Loss and gradients.

    Args:
        loss_fn: The loss.
        model: The model that the loss gets.
        given: The batch and the keys.
        count: The number of microbatches.
        reduction: How gradients are reduced over devices; None leaves it to XLA.
        has_aux: Whether the loss also returns auxiliary results.
    """

    def of_one(model: Any, given: StepInput) -> Any:
        model = model if given.key is None else with_rounding_keys(model, given.key)
        named = {} if given.loss_key is None else {"key": given.loss_key}
        returned = loss_fn(model, *given.batch, **named)
        return loss_and_aux(returned) if has_aux else (scalar_loss(returned), None)

    devices = None if reduction is None else DeviceParts(reduction)
    if count == 1 and devices is None:
        (loss, aux), gradients = filter_value_and_grad(of_one, has_aux=True)(model, given)
        return BatchGradients(loss, aux, *split_state(gradients))

    value_and_grad = value_and_grad_of_part(of_one, has_aux=True)

    def microbatch(given: StepInput) -> tuple[Array, Any, Any]:
        if devices is None:
            (loss, aux), gradients = value_and_grad(model, given)
        else:
            arrays, shared = given.split(devices.count(), devices.split)
            each = lambda part: value_and_grad(model, eqx.combine(part, shared))
            (loss, aux), gradients = devices.map(each, arrays)
        # Sums of bfloat16 gradients stop growing after a few hundred terms.
        gradients = in_float32(gradients)
        return loss, aux, gradients if devices is None else jax.tree.map(devices.apart, gradients)

    if count == 1:
        loss, aux, gradients = microbatch(given)
        dtype, others = loss.dtype, None
    else:
        arrays, shared = given.split(count, lambda x: _parts(x, count))

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
