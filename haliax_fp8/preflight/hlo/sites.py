"""Every instruction of a program with how often it runs, and the way to it through loops, calls and fusions."""

import dataclasses
from collections.abc import Iterator

from .loops import trip_count
from .text import Computation, Instruction, Module, Shape


@dataclasses.dataclass(frozen=True)
class Site:
    """An instruction in its place.

    Args:
        module: The program.
        computation: The function that it is in.
        instruction: The instruction.
        executions: How often it runs in one run of the program.
        caller: The loop, call or fusion that runs the function; None in the entry.
    """

    module: Module
    computation: Computation
    instruction: Instruction
    executions: int
    caller: "Site | None" = None

    def beside(self, name: str) -> "Site":
        """Another instruction of the same function."""
        return dataclasses.replace(self, instruction=self.computation[name])

    @property
    def operands(self) -> tuple["Site", ...]:
        """The instructions whose values this one reads."""
        if self.instruction.opcode in ("parameter", "constant"):
            return ()
        return tuple(self.beside(name) for name in self.instruction.operands)

    @property
    def results(self) -> tuple[Shape, ...]:
        """The arrays that it makes; an instruction that only begins returns its operands in front of them."""
        got = self.instruction.shape.arrays
        given = sum(len(operand.instruction.shape.arrays) for operand in self.operands)
        if self.instruction.opcode == "copy-start":
            return got[:1]
        if self.instruction.opcode == "fusion-start":
            return self.root(self.instruction.called("calls")[0]).instruction.shape.arrays
        begins = self.instruction.opcode.endswith("-start") and len(got) > given
        return got[given : 2 * given] if begins else got

    @property
    def _inner_executions(self) -> int:
        """How often what the instruction calls runs: of a loop of unknown length, once."""
        if self.instruction.opcode != "while":
            return self.executions
        count = trip_count(self.module, self.computation, self.instruction)
        return self.executions * (1 if count is None else count)

    def inside(self, name: str) -> Iterator["Site"]:
        """The instructions of a function that this one calls."""
        computation = self.module[name]
        executions = self._inner_executions
        for instruction in computation:
            yield Site(self.module, computation, instruction, executions, self)

    def root(self, name: str) -> "Site":
        """The result of a function that this instruction calls."""
        computation = self.module[name]
        return Site(self.module, computation, computation.root, self._inner_executions, self)


def entry_sites(module: Module) -> Iterator[Site]:
    """The instructions of the entry."""
    return (Site(module, module.entry, instruction, 1) for instruction in module.entry)


def is_fusion(instruction: Instruction) -> bool:
    """Whether what the instruction calls runs within one kernel."""
    return instruction.opcode in ("fusion", "fusion-start")


def is_scaled_dot(instruction: Instruction) -> bool:
    """Whether an instruction is `jax.lax.scaled_dot` before optimization: a call of a function that defines it.

    Args:
        instruction: The instruction.
    """
    return instruction.opcode == "call" and 'composite.name="xla.scaled_dot"' in instruction.attribute(
        "frontend_attributes"
    )


def subprograms(instruction: Instruction) -> tuple[str, ...]:
    """The functions that an instruction runs as programs of several kernels: bodies of loops, branches, calls.

    The condition of a loop and what `reduce` or `sort` apply to scalars are not part of it.
    """
    opcode = instruction.opcode
    if is_scaled_dot(instruction):
        return ()
    if opcode == "while":
        return instruction.called("body")
    if opcode == "conditional":
        return instruction.called("branch_computations", "true_computation", "false_computation")
    if opcode == "call":
        return instruction.called("to_apply", "calls")
    if opcode.endswith("-start") and not is_fusion(instruction):
        return instruction.called("calls", "async_computation")
    return ()


def kernels(sites: Iterator[Site]) -> Iterator[Site]:
    """The instructions that run, fusions as one; loops, calls and branches are opened.

    Args:
        sites: Where to begin, such as `entry_sites(module)`.
    """
    for site in sites:
        inner = subprograms(site.instruction)
        if not inner:
            yield site
        for name in inner:
            yield from kernels(site.inside(name))


def opened(kernel: Site) -> Iterator[Site]:
    """A kernel's instruction and, of a fusion, those within it, fusions in fusions opened too."""
    yield kernel
    if is_fusion(kernel.instruction):
        for name in kernel.instruction.called("calls"):
            for inner in kernel.inside(name):
                yield from opened(inner)
