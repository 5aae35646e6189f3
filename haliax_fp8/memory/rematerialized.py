"""rematerialized: a function that keeps only its inputs for the backward pass, computed in float32 if requested."""

import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import DTypeLike

from .._arguments import require
from .._jax.xla import read_together
from .._product.arguments import floating_dtype
from .._state.op_state import is_state


def rematerialized(function: Callable[..., Any], compute_dtype: DTypeLike | None = None) -> Callable[..., Any]:
    """The function, for which automatic differentiation keeps only the inputs and recomputes everything else.

    For cheap functions between products, in the code of a model: activation functions and norms. In a scan the gradient
    functions of `haliax_fp8` do nearly the same by themselves, but leave a body alone that holds a checkpoint, such as
    this one. If layers are unrolled, the compiler decides anyway.

    In float32, a gated activation such as `silu(gate) * up` also fuses better on an H100: both of its gradients are
    cast to FP8 where they are computed. In bfloat16, XLA rounds after each operation, considers that too much work to
    do twice, and writes one gradient to memory first. On an H200 and on Blackwell, whose memory is faster, it is the
    other way around.

    Args:
        function: Maps arrays (or NamedArrays, or trees of them) to the same kinds; a module, or any other callable.
        compute_dtype: The dtype that floating inputs, and a module's parameters, are cast to. The results are rounded
            back to the dtype that the function returns without it. By default nothing is cast, and values equal the
            function's bit for bit, unless XLA omits roundings to bfloat16 (`xla_allow_excess_precision`).

    Returns:
        A function with the same arguments and the same gradients.

    Raises:
        ValueError: If `function` is not callable, or `compute_dtype` is not a floating dtype of 16 bits or more.

    References:
        `jax.checkpoint` with `nothing_saveable`; selective recomputation, arXiv:2205.05198, section 5.

    Example:
        >>> swiglu = rematerialized(lambda gate, up: jax.nn.silu(gate) * up, compute_dtype=jnp.float32)
        >>> gate, up = jnp.bfloat16([[0.3, -1.0]]), jnp.bfloat16([[2.0, 0.7]])
        >>> swiglu(gate, up)
        Array([[0.345703, -0.188477]], dtype=bfloat16)
        >>> residuals = jax.tree.leaves(jax.vjp(swiglu, gate, up)[1])
        >>> [(x.shape, x.dtype.name) for x in residuals]
        [((1, 2), 'bfloat16'), ((1, 2), 'bfloat16')]
    """
    require("function", function, Callable, "a function or a module", of="rematerialized")
    dtype = None if compute_dtype is None else floating_dtype("compute_dtype", compute_dtype)

    def computed(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if dtype is None:
            return function(*args, **kwargs)
        returned = eqx.filter_eval_shape(function, *args, **kwargs)
        # XLA makes one launch of both gradients of a gated activation only if it sees that they read the same arrays.
        args, kwargs = jax.tree.map(_read_together, (args, kwargs))
        function, args, kwargs = (_cast(tree, dtype) for tree in (function, args, kwargs))
        return jax.tree.map(_cast_like, function(*args, **kwargs), returned)

    # If layers are unrolled, the compiler may reuse the forward pass's values instead. A barrier against that would
    # also keep it from fusing both passes of a checkpointed block.
    keeping_inputs = eqx.filter_checkpoint(computed, prevent_cse=False, policy=jax.checkpoint_policies.nothing_saveable)

    @functools.wraps(function, updated=())
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return keeping_inputs(function, args, kwargs)

    return wrapped


def _cast(tree: Any, dtype: np.dtype) -> Any:
    is_floating = lambda x: isinstance(x, jax.Array | np.ndarray) and jnp.issubdtype(x.dtype, jnp.floating)
    # The scales of FP8 layers are not cast.
    cast = lambda x: x if is_state(x) or not is_floating(x) else x.astype(dtype)
    return jax.tree.map(cast, tree, is_leaf=is_state)


def _read_together(x: Any) -> Any:
    return read_together(x) if eqx.is_inexact_array(x) else x


def _cast_like(x: Any, like: Any) -> Any:
    return x.astype(like.dtype) if eqx.is_array(x) else x
