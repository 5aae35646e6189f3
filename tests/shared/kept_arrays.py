"""What a training step keeps from its forward for its backward pass: as JAX says, and as a compiled program has it."""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import equinox as eqx
import jax
import numpy as np

from haliax_fp8.preflight.hlo import Computation, Module, parse_hlo
from haliax_fp8.preflight.instruction import NO_LAUNCH, Instruction, Shape
from haliax_fp8.preflight.program import Site, entry_sites, launches, opened
from haliax_fp8.preflight.sizes import dimensions
from haliax_fp8.preflight.trace import product_name


type Arrays = Counter[tuple[str, int]]
"""How many arrays there are of an element type, by XLA's name, and a number of elements: layouts differ."""

_XLA_NAMES = {"bfloat16": "bf16", "float32": "f32", "float8_e4m3fn": "f8e4m3fn", "float8_e5m2": "f8e5m2"}


def xla_name(dtype: np.dtype) -> str:
    """XLA's name of an element type; of integers, which no test asks for, NumPy's."""
    return _XLA_NAMES.get(dtype.name, dtype.name)


def residuals(loss: Any, args: Sequence[Any]) -> Arrays:
    """The arrays that `jax.vjp` keeps, arguments among them, before XLA changes anything.

    Args:
        loss: A function of a tuple of trees.
        args: The tuple, abstract.
    """
    abstract = lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct)
    arrays, static = eqx.partition(args, abstract)
    saved = jax.eval_shape(lambda arrays: jax.vjp(lambda arrays: loss(eqx.combine(arrays, static)), arrays)[1], arrays)
    return Counter((xla_name(leaf.dtype), leaf.size) for leaf in jax.tree.leaves(saved))


def kept_arrays(text: str) -> Arrays:
    """The arrays that launches make up to the last product of the forward pass, and that later launches read.

    XLA prints a program in the order in which it runs. A loop is one launch here, of the forward pass if it has no
    other products.

    Args:
        text: The compiled program.
    """
    module = parse_hlo(text)
    products: dict[str, set[str]] = {}
    for launch in launches(entry_sites(module)):
        outermost = launch
        while outermost.caller is not None:
            outermost = outermost.caller
        names = {product_name(site.instruction.op_name or launch.instruction.op_name) for site in _products(launch)}
        products.setdefault(outermost.instruction.name, set()).update(names)
    order = list(module.entry.instructions)
    end = max(order.index(name) for name, names in products.items() if names and names <= {"fprop", "forward"})
    reader = _Reader(module, set(order[end + 1 :]))
    return Counter(
        (shape.dtype, shape.size)
        for name in order[: end + 1]
        if not _fetches_argument(module.entry, module.entry[name])
        for path, shape in _arrays(module.entry[name])
        if reader.reads(module.entry[name], path)
    )


def _products(launch: Site) -> Iterator[Site]:
    return (site for site in opened(launch) if dimensions(site) is not None)


def _fetches_argument(entry: Computation, instruction: Instruction) -> bool:
    """Whether it copies an argument, which is in memory anyway, to a TPU's VMEM."""
    if instruction.opcode != "copy-start":
        return False
    source = entry[instruction.operands[0]]
    while source.opcode == "bitcast":
        source = entry[source.operands[0]]
    return source.opcode == "parameter"


def _arrays(instruction: Instruction) -> Iterator[tuple[tuple[int, ...], Shape]]:
    """The arrays that an instruction makes, each with its index in the result."""
    if instruction.opcode in NO_LAUNCH or instruction.opcode.endswith("-done"):
        return
    if instruction.opcode == "copy-start":
        # What it makes, beside what it is a copy of.
        yield (), instruction.shape.elements[0]
        return
    waiting: list[tuple[tuple[int, ...], Shape]] = [((), instruction.shape)]
    while waiting:
        path, shape = waiting.pop()
        if shape.dtype != "tuple":
            yield path, shape
        waiting += [((*path, index), part) for index, part in enumerate(shape.elements)]


class _Reader:
    """Follows values to the launches that read them.

    Args:
        module: The program.
        launches: The names of those that count.
    """

    def __init__(self, module: Module, launches: set[str]) -> None:
        self.module, self.launches = module, launches

    def reads(self, value: Instruction, path: tuple[int, ...]) -> bool:
        """Whether one of the launches reads a part of a value, names for it looked through."""
        return any(self._reads(value, user, path) for user in self.module.entry.users[value.name])

    def _reads(self, value: Instruction, user: Instruction, path: tuple[int, ...]) -> bool:
        if user.opcode == "get-tuple-element":
            return bool(path) and int(user.attribute("index")) == path[0] and self.reads(user, path[1:])
        if user.opcode == "tuple":
            indices = [i for i, name in enumerate(user.operands) if name == value.name]
            return any(self.reads(user, (i, *path)) for i in indices)
        if user.opcode in NO_LAUNCH or user.opcode.endswith("-done"):
            return self.reads(user, path)
        if user.name not in self.launches:
            return False
        return user.opcode != "while" or _uses(self.module[user.called("body")[0]], path[0])


def _uses(body: Computation, index: int) -> bool:
    """Whether a loop does more with an element of its state than to hand it on."""
    (state,) = body.parameters
    elements = (user for user in body.users[state.name] if int(user.attribute("index")) == index)
    return any(user.opcode != "tuple" for element in elements for user in body.users[element.name])
