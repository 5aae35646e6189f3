"""Casting a model, and giving its layers keys for stochastic rounding."""

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, DTypeLike, Key

from .._op import Fp8DotGeneral
from .._product.arguments import floating_dtype
from .._state.op_state import is_state
from ..layers.checks import require_model, require_single_key
from ..layers.walk import is_op


def cast_params[M](model: M, dtype: DTypeLike) -> M:
    """The model with its floating-point parameters in `dtype`; FP8 state is not a parameter and stays float32.

    Call it inside the loss to compute in bfloat16 from float32 master weights: the cast is then part of the
    differentiated function, so that gradients arrive in float32 and the optimizer keeps its precision.

    Args:
        model: The model, or any tree.
        dtype: A floating dtype of 16 bits or more. Integers, keys and everything that is not an array stay.

    Raises:
        ValueError: If `dtype` is not such a dtype.

    Example:
        >>> half = cast_params(layer, jnp.bfloat16)
        >>> half.weight.dtype, half.dot_general.scale("kernel").dtype
        (dtype(bfloat16), dtype('float32'))
    """
    to = floating_dtype("dtype", dtype)
    require_model(model, "cast_params(model, dtype)")

    def cast(leaf: Any) -> Any:
        return leaf.astype(to) if eqx.is_inexact_array(leaf) else leaf

    return jax.tree.map(cast, model, is_leaf=is_state)


def with_rounding_keys[M](model: M, key: Key[Array, ""]) -> M:
    """The model with a key in every op whose recipe rounds stochastically; other models are returned unchanged.

    Call it inside the loss, with a new key in each step. Every layer, each member of a stack or an ensemble, and each
    operand of each product draws its own numbers; the same key reproduces them. A layer that is used several times in
    one step draws the same numbers for operands of the same shape, and so do the examples of `vmap(grad(f))` unless
    each has a key. Inside `shard_map`, devices draw different numbers for operands that vary over them; with
    `check_vma=False` JAX does not know which do, and all draw the same.

    Args:
        model: A converted model, or any tree that holds ops.
        key: A key, from `jax.random.key`.

    Returns:
        The model, for this step.

    Raises:
        ValueError: If `key` is not a single key.

    Example:
        >>> fp4_model = fp8_linear_layers(model, Fp8Config(recipe="nvfp4"))
        >>> step_key = jax.random.fold_in(jax.random.key(0), 17)
        >>> loss_fn(with_rounding_keys(fp4_model, step_key), x).shape
        ()
    """
    require_single_key(key)
    require_model(model, "with_rounding_keys(model, key)")
    leaves, structure = jax.tree.flatten(model, is_leaf=is_op)
    return jax.tree.unflatten(structure, [_with_key(leaf, key, i) for i, leaf in enumerate(leaves)])


def _with_key(node: Any, key: Array, index: int) -> Any:
    if not isinstance(node, Fp8DotGeneral) or node.key is None:
        return node
    # Key data, drawn as random numbers: it works with any generator of `key`, and for any number of members.
    words = jax.random.bits(jax.random.fold_in(key, index), node.key.array.shape, jnp.uint32)
    # As a tree: inside `vmap` and `scan` the names may include axes that the array does not have.
    return dataclasses.replace(node, key=jax.tree.unflatten(jax.tree.structure(node.key), [words]), has_key=True)
