"""Products of one operand with several kernels, in any function, become one product with the kernels joined.

A module may call its layers one by one, under `vmap`, or in an `einsum`. So the products are found where all of these
look the same, in the function's jaxpr: `fp8_dot` and `dot_general` equations that multiply one value by kernels that
are parts of one array. If there are none, nothing changes.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, DebugInfo, DropVar, Jaxpr, Literal, jaxpr_as_fun
from jaxtyping import Array

from .._product.dimensions import DotDimensions
from .._product.dot import DotContraction
from .._product.primitive import fp8_dot_p


class Kernels(NamedTuple):
    """Kernels that are parts of one array.

    Args:
        joined: The array.
        parts: The kernels. Each has one or more axes instead of the axis that they are joined along.
        axis: That axis of `joined`.
    """

    joined: Array
    parts: tuple[Array, ...]
    axis: int

    @property
    def counts(self) -> tuple[int, ...]:
        """How many axes each part has instead of the one."""
        return tuple(part.ndim - self.joined.ndim + 1 for part in self.parts)

    @property
    def sizes(self) -> tuple[int, ...]:
        """How much of the axis each part takes."""
        others = self.joined.size // self.joined.shape[self.axis]
        return tuple(part.size // others for part in self.parts)

    def of(self, members: Sequence[int]) -> Array:
        """Some of the parts, joined in the order given."""
        if tuple(members) == tuple(range(len(self.parts))):
            return self.joined
        ends = [sum(self.sizes[: member + 1]) for member in members]
        slices = [
            lax.slice_in_dim(self.joined, end - self.sizes[member], end, axis=self.axis)
            for member, end in zip(members, ends, strict=True)
        ]
        return lax.concatenate(slices, self.axis)


def merge_products(function: Callable[..., Any], args: Sequence[Array], groups: Sequence[Kernels]) -> list[Any]:
    """Calls a function with its products merged.

    Args:
        function: Of arrays, returning a list of arrays.
        args: Its arguments, among them the parts of the kernels themselves.
        groups: The kernels.

    Returns:
        What the function returns: the same numbers, as each column of a product is computed as before.
    """
    closed = jax.make_jaxpr(function)(*args)
    program = _Program({}, [], {}, {}, {})
    for g, group in enumerate(groups):
        for member, part in enumerate(group.parts):
            program.kernels[program.known(part)] = _Kernel(g, member, ())
    inputs = [program.known(x) for x in (*closed.consts, *args)]
    results = program.add(closed.jaxpr, inputs)
    return program.run(results, groups)


class _Kernel(NamedTuple):
    """A value that is a part of a group's array, after elementwise equations."""

    group: int
    member: int
    chain: tuple["_Step", ...]

    @property
    def key(self) -> Hashable:
        return self.group, tuple((step.eqn.primitive, step.literals, _hashable(step.eqn.params)) for step in self.chain)


class _Step(NamedTuple):
    """An equation, its inputs and outputs by number; an input that is not a number is a literal.

    Args:
        eqn: The equation.
        inputs: Of each input.
        outputs: Of each output.
        scope: The name of the `jit` that it was taken out of, by which reports find a layer.
    """

    eqn: Any
    inputs: tuple[Any, ...]
    outputs: tuple[int, ...]
    scope: str

    @property
    def name(self) -> str:
        return "/".join(filter(None, (self.scope, str(self.eqn.source_info.name_stack))))

    @property
    def literals(self) -> tuple[Hashable, ...]:
        # By their bytes: 0 and -0 are not the same.
        key = lambda x: (str(x.aval), np.asarray(x.val).tobytes()) if isinstance(x, Literal) else None
        return tuple(map(key, self.inputs))


class _Product(NamedTuple):
    """A product with a part of a group's array, and what has to be the same for it to be merged with another one."""

    kernel: _Kernel
    side: int
    dims: DotDimensions
    key: Hashable


# They act on each element alone, so on the joined array as on its parts.
_ELEMENTWISE = ("convert_element_type", "mul", "div", "copy", "pvary", "pcast")


@dataclasses.dataclass(frozen=True)
class _Program:
    """A flat list of equations over numbered values.

    Args:
        values: What is known of them.
        steps: The equations.
        kernels: The values that are kernels.
        same: For a value that is computed as another one was, that one.
        seen: The values of equations by what they compute.
    """

    values: dict[int, Any]
    steps: list[_Step]
    kernels: dict[int, _Kernel]
    same: dict[int, int]
    seen: dict[Any, tuple[int, ...]]

    def known(self, value: Any) -> int:
        """The number of an array, the same for the same array."""
        place = self.seen.setdefault(("array", id(value)), (len(self.same),))[0]
        self.same.setdefault(place, place)
        self.values[place] = value
        return place

    def _new(self) -> int:
        place = len(self.same)
        self.same[place] = place
        return place

    def add(self, jaxpr: Any, inputs: Sequence[Any], scope: str = "") -> list[Any]:
        """The equations of a jaxpr, those of inner `jit`s that take a kernel in their place; its results' numbers."""
        env: dict[Any, Any] = dict(zip((*jaxpr.constvars, *jaxpr.invars), inputs, strict=True))
        read = lambda atom: atom if isinstance(atom, Literal) else env[atom]
        for eqn in jaxpr.eqns:
            given = tuple(map(read, eqn.invars))
            takes_kernel = any(x in self.kernels for x in given if not isinstance(x, Literal))
            if takes_kernel and _is_plain_jit(eqn):
                inner, name = eqn.params["jaxpr"], f"jit({eqn.params['name']})"
                within = "/".join(filter(None, (scope, str(eqn.source_info.name_stack), name)))
                outputs = self.add(inner.jaxpr, [*map(self.known, inner.consts), *given], within)
            else:
                outputs = self._add_step(_Step(eqn, given, tuple(self._new() for _ in eqn.outvars), scope))
            env |= dict(zip(eqn.outvars, outputs, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def _add_step(self, step: _Step) -> tuple[int, ...]:
        eqn, inputs = step.eqn, step.inputs
        self.steps.append(step)
        if not eqn.effects:
            key = eqn.primitive, self._alike(inputs), step.literals, _hashable(eqn.params)
            for output, first in zip(step.outputs, self.seen.setdefault(key, step.outputs), strict=True):
                self.same[output] = first
        numbers = [x for x in inputs if not isinstance(x, Literal)]
        if len(numbers) == 1 and eqn.primitive.name in _ELEMENTWISE and numbers[0] in self.kernels:
            kernel = self.kernels[numbers[0]]
            self.kernels[step.outputs[0]] = kernel._replace(chain=(*kernel.chain, step))
        return step.outputs

    def _alike(self, inputs: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(None if isinstance(x, Literal) else self.same[x] for x in inputs)

    def _merged(self, groups: Sequence[Kernels]) -> dict[int, list[tuple[int, _Product]]]:
        """Products to be merged, by the place of the first of them: their places, and what they are."""
        found: dict[Hashable, dict[int, tuple[int, _Product]]] = {}
        for place, step in enumerate(self.steps):
            product = self._product(step, groups)
            if product is not None:
                found.setdefault(product.key, {}).setdefault(product.kernel.member, (place, product))
        several = (list(members.values()) for members in found.values() if len(members) > 1)
        return {members[0][0]: sorted(members, key=lambda x: x[1].kernel.member) for members in several}

    def _product(self, step: _Step, groups: Sequence[Kernels]) -> _Product | None:
        primitive, params = step.eqn.primitive, step.eqn.params
        if primitive is not fp8_dot_p and primitive is not lax.dot_general_p:
            return None
        sides = [i for i, x in enumerate(step.inputs[:2]) if not isinstance(x, Literal) and x in self.kernels]
        if len(sides) != 1:
            return None
        (side,) = sides
        if primitive is fp8_dot_p:
            spec = params["spec"]
            if not isinstance(spec.contraction, DotContraction) or spec.ensemble:
                return None
            dims, rest = spec.contraction.dimensions, dataclasses.replace(spec, contraction=DotContraction(_NONE))
        else:
            dims = DotDimensions.of(params["dimension_numbers"], *(x.aval.shape for x in step.eqn.invars))
            rest = _hashable({name: value for name, value in params.items() if name != "dimension_numbers"})
        kernel = self.kernels[step.inputs[side]]
        joined = _of_joined(dims, side, groups[kernel.group], groups[kernel.group].counts[kernel.member])
        if joined is None:
            return None
        others = self._alike([x for i, x in enumerate(step.inputs) if i != side])
        return _Product(kernel, side, joined, (primitive, kernel.key, side, others, step.literals, joined, rest))

    def run(self, results: Sequence[Any], groups: Sequence[Kernels]) -> list[Any]:
        """Evaluates all equations."""
        values = dict(self.values)
        read = lambda x: x.val if isinstance(x, Literal) else values[x]
        merged = self._merged(groups)
        done = {place for members in merged.values() for place, _ in members}
        for place, step in enumerate(self.steps):
            if place in merged:
                with jax.named_scope(step.name):
                    parts = list(self._evaluate(place, merged[place], groups, read))
                values |= {self.steps[other].outputs[0]: x for (other, _), x in zip(merged[place], parts, strict=True)}
            elif place not in done:
                with jax.named_scope(step.scope) if step.scope else contextlib.nullcontext():
                    values |= _outputs(step, read)
        return [_array(read(x), x) for x in results]

    def _evaluate(
        self, first: int, members: Sequence[tuple[int, _Product]], groups: Sequence[Kernels], read: Callable[[Any], Any]
    ) -> Iterator[Array]:
        """One product for several, and each one's part of it, from the operands of the first, which are there."""
        product = dict(members)[first]
        step, group = self.steps[first], groups[product.kernel.group]
        which = [member.kernel.member for _, member in members]
        kernel = group.of(which)
        for link in product.kernel.chain:
            given = (x.val if isinstance(x, Literal) else kernel for x in link.inputs)
            kernel = link.eqn.primitive.bind(*given, **link.eqn.params)
        operands = [kernel if i == product.side else read(x) for i, x in enumerate(step.inputs)]
        params = step.eqn.params
        if step.eqn.primitive is fp8_dot_p:
            spec = dataclasses.replace(params["spec"], contraction=DotContraction(product.dims))
            out = fp8_dot_p.bind(*operands, spec=spec)
        else:
            out = lax.dot_general_p.bind(*operands, **{**params, "dimension_numbers": product.dims.numbers})
        # Its transpose is a concatenation.
        parts = lax.split(out, [group.sizes[i] for i in which], 0 if product.side == 0 else out.ndim - 1)
        for (place, _), part in zip(members, parts, strict=True):
            yield lax.reshape(part, self.steps[place].eqn.outvars[0].aval.shape)


_NONE = DotDimensions((), (), (), (), 0, 0)


def _of_joined(dims: DotDimensions, side: int, group: Kernels, count: int) -> DotDimensions | None:
    """The axes of a product with the joined array; None where the part is not summed over all its other axes."""
    dims = dims.swapped if side == 0 else dims
    free = tuple(range(group.axis, group.axis + count))
    if dims.rhs_batch or dims.rhs_free != free:
        return None
    contract = tuple(axis if axis < group.axis else axis - count + 1 for axis in dims.rhs_contract)
    dims = dataclasses.replace(dims, rhs_contract=contract, rhs_ndim=group.joined.ndim)
    return dims.swapped if side == 0 else dims


def _array(value: Any, atom: Any) -> Any:
    """A constant of the program as an array."""
    if isinstance(value, jax.Array):
        return value
    dtype = np.asarray(value).dtype if not isinstance(atom, Literal) else atom.aval.dtype  # pyright: ignore
    return jnp.asarray(value, dtype)


_DEBUG_INFO = DebugInfo("fuse_projections", "merge_products", None, None)


def _is_plain_jit(eqn: Any) -> bool:
    """Whether an equation is a `jit` without shardings or donation."""
    if eqn.primitive.name not in ("jit", "pjit"):
        return False
    said = (*eqn.params["in_shardings"], *eqn.params["out_shardings"])
    return all(type(x).__name__ == "UnspecifiedValue" for x in said) and not any(eqn.params["donated_invars"])


def _outputs(step: _Step, read: Callable[[Any], Any]) -> dict[int, Any]:
    """The values of an equation's outputs by number, those that have a use."""
    eqn = step.eqn
    inputs = {v: read(x) for v, x in zip(eqn.invars, step.inputs, strict=True) if not isinstance(v, Literal)}
    outputs = {v: n for v, n in zip(eqn.outvars, step.outputs, strict=True) if not isinstance(v, DropVar)}
    # As a program of its own: JAX knows how to evaluate each kind of equation, and under which name.
    jaxpr = Jaxpr((), list(inputs), list(outputs), [eqn], eqn.effects, _DEBUG_INFO)
    results = jaxpr_as_fun(ClosedJaxpr(jaxpr, ()))(*inputs.values())
    return dict(zip(outputs.values(), results, strict=True))


def _hashable(params: dict[str, Any]) -> Hashable:
    """What two equations must share to compute the same; a unique value if unknown."""
    try:
        key = tuple(sorted(params.items(), key=lambda item: item[0]))
        hash(key)
    except TypeError:
        return object()
    return key
