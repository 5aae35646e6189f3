"""filter_grad: gradients whose FP8 state is an exact maximum, and errors for what JAX cannot differentiate."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
from jax.core import Tracer

from .._arguments import require_bool
from .._jax.errors import (
    NotDifferentiable,
    calls_users_function,
    is_about_cast,
    is_about_linear_transpose,
    is_about_structure,
    is_about_sum,
    names_max_grad,
)
from .._jax.max_grad import LOST_STATE, StateOutsideJit, is_max_grad, to_float32
from .._jax.used import UsedArguments, depends_on, tagged
from .._product.kernel_for_products import KernelForProducts
from .._state.op_state import OpState, OverwriteWithGradient, is_state
from .._state.update import complete_states, record_states, records_of_part
from ..layers.checks import require_calibrated
from ..memory.in_scans import recomputing_in_scans


@calls_users_function
def differentiable[T](gradients_of: Callable[..., T], plain: Callable[..., Any], *args: Any, **kwargs: Any) -> T:
    """The result of `gradients_of(*args, **kwargs)`, which is compiled if it is called outside of `jit`.

    If it fails, and not with an error that names the type of state, the plain gradient is traced too: an error that it
    does not raise is about that type.

    Args:
        gradients_of: Takes a gradient with state in `fp32_max_grad`.
        plain: Takes the same gradient with state in float32.
        *args: Their arguments.
        **kwargs: Their arguments.

    Raises:
        ValueError: If JAX cannot differentiate it, with the construct and what to use instead.
    """
    try:
        return _in_one_program(gradients_of, *args, **kwargs)
    except (NotDifferentiable, StateOutsideJit):
        raise
    except (ValueError, TypeError, AssertionError, NotImplementedError) as error:
        if not (names_max_grad(error) or _is_about_state(plain, *args, **kwargs)):
            raise
        raise ValueError(_explanation(error)) from error


def _in_one_program[T](gradients_of: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    try:
        return gradients_of(*args, **kwargs)
    except StateOutsideJit:
        pass
    with jax.disable_jit(False):
        try:
            return eqx.filter_jit(gradients_of)(*args, **kwargs)
        except StateOutsideJit as error:
            # JAX looks for a NaN in a program by running it again, operation by operation.
            if jax.config.jax_debug_nans or jax.config.jax_debug_infs:
                raise FloatingPointError(_NAN) from error
            raise


_NAN = (
    "jax_debug_nans or jax_debug_infs found a NaN or an infinity in the gradient, but cannot locate it, because "
    "gradients with FP8 state cannot run operation by operation. Look for it in restore_linear_layers(model). If it "
    "has none, it is the -inf of a state that the loss does not reach: call apply_updates in the same jit"
)


def _is_about_state(plain: Callable[..., Any], *args: Any, **kwargs: Any) -> bool:
    """Whether an error is about state, from what the plain gradient says: nothing, or that FP8 is the reason."""
    # What is traced already stays so: shapes alone would not show that `vmap` maps an example, for instance.
    is_traced = any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves((args, kwargs)))
    try:
        plain(*args, **kwargs) if is_traced else eqx.filter_eval_shape(plain, *args, **kwargs)
    except NotDifferentiable:
        return True
    except Exception:  # noqa: BLE001 - the user's function may raise anything
        return False
    return True


def _explanation(error: Exception) -> str:
    """What to do instead."""
    if isinstance(error, AssertionError):
        return LOST_STATE
    if is_about_structure(error, holding=OpState):
        return (
            f"{error}\nIf the function assembles its model from parts, and share_input_scales marked it: a part has "
            "the scale that layers share, and the other has none. Pass the whole model, or use "
            "separate_input_scales(model)"
        )
    if is_about_linear_transpose(error):
        return (
            "jax.lax.custom_root transposes only functions of floats, and FP8 state is not a float. Take the gradient "
            "with eqx.filter_grad, where state is float32"
        )
    if is_about_cast(error):
        return (
            "FP8 state was cast inside the differentiated function. Cast only arrays for which eqx.is_inexact_array(x) "
            "or jnp.issubdtype(x.dtype, jnp.floating) holds, which is false for state"
        )
    if is_about_sum(error):
        return (
            "JAX copied the state of an FP8 layer, and would sum the amaxes of the copies: examples mapped by vmap "
            "each take their own branch (jax.lax.cond or switch), or one layer was broadcast into a stack. Compute "
            "both branches outside cond and select with jnp.where, or call one layer several times; or take the "
            "gradient with eqx.filter_grad, which sums the newest amaxes"
        )
    return (
        "FP8 state was sliced inside the differentiated function (as in `jax.tree.map(lambda a: a[0], layers)`), or "
        "added, or a jax.custom_vjp is mapped by vmap, or examples mapped by vmap each took their own layer of a "
        "stack, but JAX cannot differentiate that for state whose gradients accumulate by maximum. Take layers out of "
        "a stack with jax.lax.dynamic_index_in_dim or jnp.unstack, scan over them, or call all and select their "
        "outputs; or use eqx.filter_grad, which sums the newest amaxes of a layer's uses"
    )


def filter_grad(
    function: Callable[..., Any], *, has_aux: bool = False, recompute_in_scans: bool = True
) -> Callable[..., Any]:
    """`eqx.filter_grad` whose state gradients are exact maxima over all uses of a layer.

    Inside the differentiated function, state is a record of scales in the element type `fp32_max_grad`. If a layer is
    used several times (called twice, tied, constant of a `scan`, one branch of a `cond`), JAX combines what its uses
    measured by maximum instead of by sum. Parameters' gradients are those of `eqx.filter_grad`.

    If JAX copies a layer for every example before it differentiates (a `cond` per example, a `custom_vjp` under `vmap`,
    an index into a stack per example), it would have to sum, and this raises an error that names the construct. So it
    does if Equinox takes state for a constant (`filter_custom_jvp`, implicit solvers). There, `eqx.filter_grad` works,
    and sums the newest amaxes.

    Outside of `jit` the gradient is compiled, with `jax.disable_jit` too, because state of this type exists only inside
    a compiled program. If the loss does not use all layers, it is traced once more without being differentiated: state
    must not be lost unnoticed. If it raises an error, a plain gradient is traced to find out whether state is the
    reason.

    In compiled programs, the bodies of the loss's scans compute elementwise work again in the backward pass, and keep
    everything else. Otherwise they would stack what norms and activations compute on the way, which takes more memory
    and more time than computing it. Values stay the same. A body that has a checkpoint stays as it is.

    Args:
        function: `function(model, *args, **kwargs)`, returning a scalar, or `(scalar, aux)` with `has_aux`.
        has_aux: As in `eqx.filter_grad`.
        recompute_in_scans: Whether the bodies of scans recompute elementwise work. Turn it off for forward-mode
            differentiation of the gradient, and for debuggers, which would see a checkpoint.

    Returns:
        A function with the same arguments that returns the gradients, `(gradients, aux)` with `has_aux`.

    Raises:
        ValueError: When called, if JAX or Equinox would sum amaxes; the message says where, and what to use instead.

    Example:
        >>> def twice(layer, x):
        ...     return (layer(x) + layer(3.0 * x)).sum().array
        >>> x = hax.ones((hax.Axis("batch", 2), layer.In))
        >>> grads = [take(twice)(layer, x) for take in (filter_grad, eqx.filter_grad)]
        >>> [float(grad.dot_general.amax_history("input")[0]) for grad in grads]
        [3.0, 4.0]
    """

    value_and_grad = filter_value_and_grad(function, has_aux=has_aux, recompute_in_scans=recompute_in_scans)

    @calls_users_function
    def take(model: Any, *args: Any, **kwargs: Any) -> Any:
        value, gradients = value_and_grad(model, *args, **kwargs)
        return (gradients, value[1]) if has_aux else gradients

    return take


def filter_value_and_grad(
    function: Callable[..., Any], *, has_aux: bool = False, recompute_in_scans: bool = True
) -> Callable[..., Any]:
    """`eqx.filter_value_and_grad` whose state gradients are exact maxima; see `filter_grad`.

    Args:
        function: `function(model, *args, **kwargs)`, returning a scalar, or `(scalar, aux)` with `has_aux`.
        has_aux: As in `eqx.filter_value_and_grad`.
        recompute_in_scans: As in `filter_grad`.

    Returns:
        A function with the same arguments that returns `(value, gradients)`.

    Raises:
        ValueError: When called, as in `filter_grad`.
    """
    return _value_and_grad(function, complete_states, has_aux=has_aux, recompute_in_scans=recompute_in_scans)


def value_and_grad_of_part(
    function: Callable[..., Any], *, has_aux: bool = False, recompute_in_scans: bool = True
) -> Callable[..., Any]:
    """`filter_value_and_grad` for one of several parts of a batch: state has what the part measured, in records.

    Accumulate the gradients of all parts, then call `with_complete_states`: histories are computed once, and a part
    without an amax does not keep the scale of the step before, which may be larger.

    Args:
        function: As in `filter_value_and_grad`.
        has_aux: As in `filter_value_and_grad`.
        recompute_in_scans: As in `filter_grad`.
    """
    return _value_and_grad(function, records_of_part, has_aux=has_aux, recompute_in_scans=recompute_in_scans)


def with_complete_states[G](model: Any, gradients: G) -> G:
    """Gradients with the states of the next step.

    Args:
        model: The model whose gradients were taken.
        gradients: From `value_and_grad_of_part`, accumulated over parts.
    """
    leaves, structure = jax.tree.flatten(model, is_leaf=_is_state_or_quantized_kernel)
    flat = structure.flatten_up_to(gradients)
    indices = [i for i, leaf in enumerate(leaves) if _is_whole_table(leaf)]
    new = _replaced(flat, indices, complete_states([leaves[i] for i in indices], [flat[i] for i in indices]))
    return jax.tree.unflatten(structure, new)


class _ValueAndGrad(eqx.Module):
    """Takes the gradient of `function`; a module, so that `eqx.filter_jit` knows that of the same function again.

    Args:
        function: As in `filter_value_and_grad`.
        complete: Takes states and their gradients, which are records, and returns the gradients to hand on.
        has_aux: As in `filter_value_and_grad`.
        recompute_in_scans: As in `filter_grad`.
    """

    function: Callable[..., Any]
    complete: Callable[[list[OpState], list[Any]], list[Any]]
    has_aux: bool
    recompute_in_scans: bool

    def __call__(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        leaves, structure = jax.tree.flatten(model, is_leaf=_is_state_or_quantized_kernel)
        indices = [i for i, leaf in enumerate(leaves) if _is_whole_table(leaf)]
        states, state_indices, reached = [leaves[i] for i in indices], frozenset(indices), UsedArguments()
        parts_with = lambda states: eqx.partition(_replaced(leaves, indices, states), _is_differentiated)

        def of(differentiated: Any, *, rest: Any, reached: UsedArguments | None) -> Any:
            leaves = eqx.combine(differentiated, rest)
            if indices and reached is not None:
                leaves = _replaced(leaves, indices, _tagged([leaves[i] for i in indices], reached))
            # Records have the element type already; other state may not.
            leaves = [leaf if i in state_indices else _with_max_gradients(leaf) for i, leaf in enumerate(leaves)]
            return self.function(jax.tree.unflatten(structure, leaves), *args, **kwargs)

        def read_by_loss() -> set[int]:
            """The states that the loss depends on."""
            differentiated, rest = parts_with(record_states(states))
            loss = lambda leaves: jax.tree.leaves(of(leaves, rest=rest, reached=None))[0]
            used = jax.tree.unflatten(jax.tree.structure(differentiated), depends_on(loss, differentiated))
            return {number for number, i in enumerate(indices) if any(jax.tree.leaves(used[i]))}

        def missing_in_plain_gradient() -> set[int]:
            """The states that get no gradient even if they are floats like any other."""
            # Not the tables, which some `shard_map`s refuse to differentiate.
            differentiated, rest = parts_with([jax.tree.map(to_float32, record) for record in record_states(states)])
            loss = functools.partial(of, rest=rest, reached=(plain := UsedArguments()))
            jax.eval_shape(jax.grad(loss, has_aux=self.has_aux, allow_int=True), differentiated)
            return plain.missing

        differentiated, rest = parts_with(record_states(states))
        loss = functools.partial(of, rest=rest, reached=reached)
        # Outside of compiled programs the loss may depend on values, and is not traced.
        if self.recompute_in_scans and any(isinstance(x, Tracer) for x in jax.tree.leaves((leaves, args, kwargs))):
            loss = recomputing_in_scans(loss)
        # JAX does not count `fp32_max_grad` as a float, so it is allowed as integers are.
        value, gradients = jax.value_and_grad(loss, has_aux=self.has_aux, allow_int=True)(differentiated)
        if reached.missing:
            _require_none_lost(reached.missing, read_by_loss, missing_in_plain_gradient)
        gradients = _replaced(gradients, indices, self.complete(states, [gradients[i] for i in indices]))
        # Copies of kernels are those of this step's weights, which have the gradient.
        gradients = [None if isinstance(leaf, KernelForProducts) else leaf for leaf in gradients]
        return value, jax.tree.unflatten(structure, gradients)


def _value_and_grad(
    function: Callable[..., Any],
    complete: Callable[[list[OpState], list[Any]], list[Any]],
    *,
    has_aux: bool,
    recompute_in_scans: bool,
) -> Callable[..., Any]:
    require_bool("has_aux", has_aux, of="filter_grad")
    require_bool("recompute_in_scans", recompute_in_scans, of="filter_grad")
    gradients_of = _ValueAndGrad(function, complete, has_aux, recompute_in_scans)
    plain = eqx.filter_grad(function, has_aux=has_aux)

    @calls_users_function
    def take(model: Any, *args: Any, **kwargs: Any) -> Any:
        require_calibrated(model, wait=False)
        return differentiable(gradients_of, plain, model, *args, **kwargs)

    return take


def _tagged(states: Sequence[OpState], reached: UsedArguments) -> list[OpState]:
    """The states themselves; `reached` has the numbers of those whose gradients arrive."""
    arrays = [jax.tree.flatten(state) for state in states]
    tables = tagged([table for (table, *_), _ in arrays], reached)
    return [
        jax.tree.unflatten(structure, [table, *shared])
        for table, ((_, *shared), structure) in zip(tables, arrays, strict=True)
    ]


def _require_none_lost(
    missing: set[int], read_by_loss: Callable[[], set[int]], missing_in_plain_gradient: Callable[[], set[int]]
) -> None:
    """Raises if the gradient of a state was lost: the loss changes with it, and nothing arrived.

    Without this, a layer that is not used would look the same. To trace the loss alone takes a fifth of a gradient.
    Only if the loss reads one of these states a plain gradient is traced too: `stop_gradient` may be the reason.

    Args:
        missing: The numbers of the states without a gradient.
        read_by_loss: Returns the numbers of those that the loss depends on.
        missing_in_plain_gradient: Returns the numbers of those that get no gradient as floats either.
    """
    try:
        read = missing & read_by_loss()
        lost = read - missing_in_plain_gradient() if read else read
    except Exception:  # noqa: BLE001 - the gradient worked, of a function that perhaps no trace can follow
        return
    if lost:
        raise NotDifferentiable(LOST_STATE)


def _is_state_or_quantized_kernel(node: Any) -> bool:
    return isinstance(node, OverwriteWithGradient | KernelForProducts)


def _is_differentiated(leaf: Any) -> bool:
    """What `eqx.filter_grad` differentiates, and records."""
    return eqx.is_inexact_array(leaf) or is_max_grad(leaf)


def _replaced(leaves: Sequence[Any], indices: Sequence[int], others: Sequence[Any]) -> list[Any]:
    """The leaves with others at some indices."""
    new = list(leaves)
    for i, other in zip(indices, others, strict=True):
        new[i] = other
    return new


def _is_whole_table(node: Any) -> bool:
    # A partitioned model may have no table; and inside another differentiated function there are records.
    return isinstance(node, OpState) and node.table.array is not None and not node.is_record


def with_max_gradients[T](model: T) -> T:
    """The model with its state in the element type whose gradients accumulate by maximum.

    `filter_grad` does this at the top of the differentiated function; call it if you write that function yourself,
    and compile the gradient with `jax.jit` or `eqx.filter_jit`. JAX's errors that name `float32_max_grad` are about
    constructs that `filter_grad` refuses in its own words: a `cond` per example under `vmap` ("reduce_sum does not
    accept dtype"), a `custom_vjp` under `vmap` ("Cannot interpret ... as a data type"), a static slice of state.

    Args:
        model: A model, or any tree.

    Raises:
        TypeError: Outside of `jit`, where JAX has no arrays of that type.
    """
    return jax.tree.map(_with_max_gradients, model, is_leaf=is_state)


def _with_max_gradients(node: Any) -> Any:
    if not is_state(node):
        return node
    # A partitioned model has None for some arrays. An op that shares nothing has none of `shared`.
    arrays = jax.tree.leaves(node.table if isinstance(node, OpState) else node, is_leaf=lambda x: x is None)
    return node if any(array is None for array in arrays) else node.with_max_gradients()
