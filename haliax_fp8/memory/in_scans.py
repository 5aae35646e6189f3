"""recomputing_in_scans: what the scans of a differentiated function stack for the backward pass.

A scan stacks everything that its body's derivative reads, once for each layer: also what norms and activations compute
on the way, much of it in float32. Writing these stacks and reading them back takes longer than computing their elements
again. So the body of each scan becomes a checkpoint that recomputes elementwise work, and keeps everything else.
"""

import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.extend.core import Var, jaxpr_as_fun, jaxprs_in_params

from .._jax.errors import calls_users_function
from .policies import RecomputeElementwise


# What JAX differentiates equation by equation, and how it names the programs inside. A `custom_vjp` has its own
# derivative, a `while` has none, and of a `checkpoint` its author has decided.
_CALLS = {"jit": "jaxpr", "shard_map": "jaxpr", "cond": "branches", "scan": "jaxpr"}


def recomputing_in_scans(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The function, to be differentiated: the bodies of its scans recompute elementwise work, with the same values.

    A body stays as it is if it holds a checkpoint, or complex numbers, which JAX's checkpoints refuse to keep, or has
    effects, such as printing, which would happen twice. Scans inside it are still changed. The function is traced, so
    it may not depend on the values of its argument.

    Args:
        function: Takes a tree of arrays; its result may hold anything.
    """

    @calls_users_function
    def changed(argument: Any) -> Any:
        others: list[Any] = []

        def arrays_of(argument: Any) -> Any:
            arrays, rest = eqx.partition(function(argument), eqx.is_array)
            others.append(rest)
            return arrays

        program, shapes = jax.make_jaxpr(arrays_of, return_shape=True)(argument)
        results = jaxpr_as_fun(_with_checkpoints(program, {}))(*jax.tree.leaves(argument))
        return eqx.combine(jax.tree.unflatten(jax.tree.structure(shapes), results), others[-1])

    return changed


def _with_checkpoints(program: Any, done: dict[int, Any]) -> Any:
    """The program, with checkpoints in the bodies of its scans; the program itself if there are none to change.

    Args:
        program: A traced function.
        done: The result for each program that occurs more than once, by identity: JAX treats equal ones only once.
    """
    if id(program) not in done:
        equations = [_equation_with_checkpoints(equation, done) for equation in program.eqns]
        is_same = all(new is old for new, old in zip(equations, program.eqns, strict=True))
        done[id(program)] = program if is_same else program.replace(eqns=equations)
    return done[id(program)]


def _equation_with_checkpoints(equation: Any, done: dict[int, Any]) -> Any:
    name = equation.primitive.name
    if name not in _CALLS:
        return equation
    inside = equation.params[_CALLS[name]]
    if name == "scan" and not (_holds_checkpoint(inside) or _has_effects(inside) or _holds_complex(inside)):
        # What the policy says holds for scans inside this one as well.
        new = _as_checkpoint(inside, scan=equation)
    elif name == "cond":
        new = tuple(_with_checkpoints(branch, done) for branch in inside)
        new = inside if all(a is b for a, b in zip(new, inside, strict=True)) else new
    else:
        new = _with_checkpoints(inside, done)
    return equation if new is inside else equation.replace(params=equation.params | {_CALLS[name]: new})


def _holds_checkpoint(program: Any) -> bool:
    checkpoint = _checkpoint_equation().primitive
    return any(
        equation.primitive is checkpoint
        or (equation.primitive.name in _CALLS and any(map(_holds_checkpoint, jaxprs_in_params(equation.params))))
        for equation in program.eqns
    )


def _has_effects(program: Any) -> bool:
    # Sums over devices have the names of axes among their effects, but happen as often as JAX likes.
    return any(type(effect).__name__ != "NamedAxisEffect" for effect in program.effects)


def _holds_complex(program: Any) -> bool:
    variables = [*program.constvars, *program.invars, *(x for equation in program.eqns for x in equation.outvars)]
    is_complex = lambda x: jnp.issubdtype(getattr(x.aval, "dtype", bool), jnp.complexfloating)
    return any(map(is_complex, variables)) or any(
        _holds_complex(inside) for equation in program.eqns for inside in jaxprs_in_params(equation.params)
    )


def _as_checkpoint(program: Any, scan: Any) -> Any:
    """A scan's body that calls the scan's own body as a checkpoint.

    Context and line are those of the scan. An equation of the body may be in a context of its own, with XLA's metadata,
    the host as its device or another mesh, which JAX would give to the whole body.
    """
    inner = program.replace(constvars=[], invars=[*program.constvars, *program.invars])
    results = [Var(x.aval) for x in inner.outvars]
    template = _checkpoint_equation()
    call = template.replace(
        invars=inner.invars,
        outvars=results,
        params=template.params | {"jaxpr": inner},
        effects=inner.effects,
        source_info=scan.source_info.replace(name_stack=template.source_info.name_stack),
        ctx=scan.ctx,
    )
    return program.replace(outvars=results, eqns=[call])


@functools.cache
def _checkpoint_equation() -> Any:
    """An equation of `jax.checkpoint`, from which others are made: JAX has no public way to make one of a program."""
    checkpoint = jax.checkpoint(lambda x: x, policy=RecomputeElementwise(), prevent_cse=False)
    (equation,) = jax.make_jaxpr(checkpoint)(0.0).eqns
    return equation
