"""Checks of models that others wrote: the state of every op, next to what a callback sees and to the weights."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from helpers import EPS, float64

from haliax_fp8 import Fp8DotGeneral, OverwriteWithGradient, filter_grad


def ops_of(model) -> dict[str, Fp8DotGeneral]:
    """The ops of a model by the path of their layer."""
    leaves = jax.tree_util.tree_leaves_with_path(model, is_leaf=is_op)
    return {path_of(path).partition(".dot_general")[0]: op for path, op in leaves if is_op(op)}


def path_of(path) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")


def is_op(node) -> bool:
    return isinstance(node, Fp8DotGeneral)


def is_state(node) -> bool:
    return isinstance(node, OverwriteWithGradient)


def newest_amaxes(op) -> np.ndarray:
    """Of input, kernel and output gradient, `[*stack, operand]`."""
    return np.stack([float64(op.amax_history(name))[..., 0] for name in ("input", "kernel", "output_grad")], axis=-1)


def kernel_amaxes(model) -> dict[str, np.ndarray]:
    """The largest magnitude in each converted layer's weight, over all axes but those of stacks, in float64."""
    is_layer = lambda node: is_op(getattr(node, "dot_general", None))
    amaxes = {}
    for path, layer in jax.tree_util.tree_leaves_with_path(model, is_leaf=is_layer):
        if is_layer(layer):
            weight, stack = float64(layer.weight), layer.dot_general.scale("kernel").shape
            magnitudes = np.abs(weight).reshape(*weight.shape[: len(stack)], -1)
            amaxes[path_of(path)] = magnitudes.max(-1)
    return amaxes


def fp8_error(layers: int) -> float:
    """How far, in norm, the outputs of so many FP8 products one after the other may be from those in float32.

    Rounding to E4M3, with 3 bits of mantissa, moves an element by 2**-4 of itself at most. A product has two rounded
    operands, whose errors add up to under `2**-4` in the root mean square; those of several products are independent.
    """
    return 2.0**-4 * np.sqrt(layers)


class Observer:
    """Records what goes into and comes back to every op of a model, beside the op's own amaxes.

    The maxima leave the compiled function through a callback. A maximum is exact in any dtype.
    """

    def __init__(self):
        self.operands: dict[tuple[str, str], float] = {}

    def attached_to(self, model):
        """The model with every op observed."""
        paths = iter(ops_of(model))
        return jax.tree.map(
            lambda node: ObservedOp(node, self, next(paths)) if is_op(node) else node, model, is_leaf=is_op
        )

    def see(self, path: str, operand: str, x: jax.Array) -> jax.Array:
        """`x`; its amax is recorded where it is computed."""

        def record(amax):
            seen = float(np.max(np.asarray(amax, np.float64), initial=0.0))
            self.operands[path, operand] = max(seen, self.operands.get((path, operand), 0.0))
            return np.asarray(amax)

        amax = jnp.max(jnp.abs(x)).astype(jnp.float32)
        seen = jax.pure_callback(record, jax.ShapeDtypeStruct((), jnp.float32), amax, vmap_method="broadcast_all")
        return x + (0.0 * seen).astype(x.dtype)

    def of(self, path: str) -> np.ndarray:
        """The amaxes of both operands, smaller first (`einsum` may swap them), and of the output gradient."""
        operands = sorted(self.operands[path, name] for name in ("lhs", "rhs"))
        return np.asarray([*operands, self.operands[path, "output_grad"]])


class ObservedOp(eqx.Module):
    op: Fp8DotGeneral
    observer: Observer = eqx.field(static=True)
    path: str = eqx.field(static=True)

    def __call__(self, lhs, rhs, *args, **kwargs):
        see = functools.partial(self.observer.see, self.path)
        out = self.op(
            observed(functools.partial(see, "lhs"), as_it_is, lhs),
            observed(functools.partial(see, "rhs"), as_it_is, rhs),
            *args,
            **kwargs,
        )
        return observed(as_it_is, functools.partial(see, "output_grad"), out)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def observed(on_value, on_gradient, x):
    return on_value(x)


observed.defvjp(
    lambda on_value, on_gradient, x: (on_value(x), None), lambda on_value, on_gradient, _, grad: (on_gradient(grad),)
)


def as_it_is(x):
    return x


def assert_amaxes_are_those_observed(model, loss_fn, *batch, only_read=()):
    """The state's gradient holds the maxima that a callback sees; layers that are never called hold nothing."""
    observer = Observer()
    gradients = eqx.filter_jit(filter_grad(lambda model, batch: loss_fn(model, *batch)))
    gradients = gradients(observer.attached_to(model), batch)
    ops = ops_of(gradients)
    called = {path for path, _ in observer.operands}
    assert called == ops.keys() - set(only_read)
    for path in called:
        amaxes = newest_amaxes(ops[path]).reshape(-1, 3).max(0)
        actual = np.asarray([*sorted(amaxes[:2]), amaxes[2]])
        # Not exactly: the compiler may compute an operand twice, fused in two ways.
        np.testing.assert_allclose(actual, observer.of(path), rtol=8 * EPS)


def assert_histories_hold(model, steps, kernels, only_read=()):
    """Every op's histories hold `steps` amaxes, the newest one of the kernel being that of its weight before the step.

    Args:
        model: The model after the steps.
        steps: How many steps were taken from new state.
        kernels: The `kernel_amaxes` of the model before the last step.
        only_read: Layers that no step multiplied with.
    """
    ops = ops_of(model)
    assert ops.keys() > set(only_read)
    for path in ops.keys() - set(only_read):
        for operand in ("input", "kernel", "output_grad"):
            history = float64(ops[path].amax_history(operand))
            assert np.isfinite(history).all()
            # Newest first, then oldest to newest.
            assert (history[..., [0, *range(1 - steps, 0)]] > 0).all()
            assert np.count_nonzero(history[..., 1 : 1 - steps]) == 0
        np.testing.assert_array_equal(float64(ops[path].amax_history("kernel"))[..., 0], kernels[path])
