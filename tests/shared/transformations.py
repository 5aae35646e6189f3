"""Ways to call a function of an op: every transformation of JAX that a layer may find itself in.

A function takes `op, w, h, flag`: an op, a weight, an array whose leading axes number rows, and a condition that holds.
"""

import equinox as eqx
import equinox.internal as eqxi
import haliax as hax
import jax
import jax.numpy as jnp
from jax import lax


POLICIES = jax.checkpoint_policies


def over_rows(transform):
    """For transformations that take an axis off; with no axis left they do nothing."""
    return lambda f: lambda op, w, h, flag: transform(f, op, w, h, flag) if h.ndim > 1 else f(op, w, h, flag)


def branch(f, op, w, h, flag):
    return lax.cond(flag, lambda h: f(op, w, h, flag), lambda h: f(op, w, 64.0 * h, flag), h)


def switch(f, op, w, h, flag):
    others = [lambda h: 0.0 * h, lambda h: f(op, w, h, flag), lambda h: f(op, w, 64.0 * h, flag)]
    return lax.switch(flag.astype(jnp.int32), others, h)


def checkpoint(**options):
    return lambda f: lambda *args: eqx.filter_checkpoint(f, **options)(*args)


# What JAX differentiates before it batches, or batches by giving every example its own replica of the layer.


def with_custom_jvp(f):
    def call(op, *args):
        arrays, static = eqx.partition(op, eqx.is_array)
        inner = jax.custom_jvp(lambda arrays, *args: f(eqx.combine(arrays, static), *args))
        inner.defjvp(lambda primals, tangents: jax.jvp(inner.fun, primals, tangents))
        return inner(arrays, *args)

    return call


def with_custom_vjp(f):
    def call(op, *args):
        arrays, static = eqx.partition(op, eqx.is_array)
        inner = jax.custom_vjp(lambda arrays, *args: f(eqx.combine(arrays, static), *args))
        inner.defvjp(lambda *args: jax.vjp(inner.fun, *args), lambda pull, grad: pull(grad))
        return inner(arrays, *args)

    return call


def with_filter_custom_jvp(f):
    def call(op, w, h, flag):
        inner = eqx.filter_custom_jvp(lambda params: f(*params))
        inner.def_jvp(lambda primals, tangents: eqx.filter_jvp(lambda params: f(*params), primals, tangents))
        return inner((op, w, h, flag))

    return call


def with_filter_custom_vjp(f):
    def call(op, w, h, flag):
        inner = eqx.filter_custom_vjp(lambda params: f(*params))
        inner.def_fwd(lambda perturbed, params: (f(*params), None))
        pull = lambda params, grad: eqx.filter_vjp(lambda params: f(*params), params)[1](grad)[0]
        inner.def_bwd(lambda residuals, grad, perturbed, params: pull(params, grad))
        return inner((op, w, h, flag))

    return call


def of_each_row(f, op, w, h, flag):
    """What `f` makes of each row, which it may know more of than all rows together."""
    flags = jnp.broadcast_to(flag, h.shape[:1])
    return jax.vmap(lambda row, flag: f(op, w, row, flag))(h, flags)


def bounded_loop(f):
    """Equinox's loop, which knows only when it runs how often."""

    def call(op, w, h, flag):
        body = lambda carry: (carry[0] + 1, f(op, w, carry[1], flag))
        times = flag.astype(jnp.int32)
        return eqxi.while_loop(lambda carry: carry[0] < times, body, (0, h), max_steps=2, kind="bounded")[1]

    return call


WRAPPERS = {
    "vmap": over_rows(lambda f, op, w, h, flag: jax.vmap(lambda r: f(op, w, r, flag))(h)),
    "vmap of axis 1": over_rows(
        lambda f, op, w, h, flag: jax.vmap(lambda r: f(op, w, r, flag), in_axes=h.ndim - 2, out_axes=h.ndim - 2)(h)
    ),
    "hax.vmap": over_rows(
        lambda f, op, w, h, flag: hax.vmap(lambda r: f(op, w, r, flag), hax.Axis("batch", h.shape[0]))(h)
    ),
    "lax.map": over_rows(lambda f, op, w, h, flag: lax.map(lambda r: f(op, w, r, flag), h)),
    "loop over rows": over_rows(lambda f, op, w, h, flag: jnp.stack([f(op, w, r, flag) for r in h])),
    "jit": lambda f: lambda *args: eqx.filter_jit(f)(*args),
    "checkpoint": checkpoint(),
    "checkpoint, dots saved": checkpoint(policy=POLICIES.dots_saveable),
    "checkpoint, all saved": checkpoint(policy=POLICIES.everything_saveable),
    "checkpoint, names saved": checkpoint(policy=POLICIES.save_only_these_names("nothing")),
    "cond": lambda f: lambda *args: branch(f, *args),
    "switch": lambda f: lambda *args: switch(f, *args),
    "custom_jvp of each row": over_rows(lambda f, *args: of_each_row(with_custom_jvp(f), *args)),
    "custom_vjp of each row": over_rows(lambda f, *args: of_each_row(with_custom_vjp(f), *args)),
    "filter_custom_jvp": with_filter_custom_jvp,
    "filter_custom_vjp of each row": over_rows(lambda f, *args: of_each_row(with_filter_custom_vjp(f), *args)),
    "cond of each row": over_rows(lambda f, *args: of_each_row(lambda *args: branch(f, *args), *args)),
    "switch of each row": over_rows(lambda f, *args: of_each_row(lambda *args: switch(f, *args), *args)),
}


def python_loop(f, op, w, h, flag, uses):
    for _ in range(uses):
        h = f(op, w, h, flag)
    return h


def scan_loop(f, op, w, h, flag, uses):
    return lax.scan(lambda h, _: (f(op, w, h, flag), None), h, None, length=uses)[0]


def scan_loop_with_checkpoint(f, op, w, h, flag, uses):
    return lax.scan(jax.checkpoint(lambda h, _: (f(op, w, h, flag), None)), h, None, length=uses)[0]


LOOPS = {"python": python_loop, "scan": scan_loop, "scan, checkpoint": scan_loop_with_checkpoint}
