"""Every instruction of a program, with how often it runs and the way to it through loops, calls and fusions."""

import dataclasses
from collections.abc import Iterator

from .hlo import Computation, Module
from .instruction import ADD, COMPARE, COMPARISONS, COPIES, COPY_START, DONE, FUSION_START, Instruction, Shape


@dataclasses.dataclass(frozen=True)
class Site:
    """An instruction, and where it is in a program.

    `executions` says how often it runs in one run of the program. `caller` is the loop, call or fusion that runs the
    function that contains it; None in the entry.
    """

    module: Module
    computation: Computation
    instruction: Instruction
    executions: int = 1
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
    def continuations(self) -> tuple["Site", ...]:
        """The instructions that continue an asynchronous operation, which this one starts, and the one that ends it."""
        continuations: list[Site] = []
        current = self
        while self.instruction.begins and not current.instruction.opcode.endswith(DONE):
            users = (user for user in self.computation.users[current.instruction.name] if user.ends)
            if (user := next(users, None)) is None:
                break
            current = self.beside(user.name)
            continuations.append(current)
        return tuple(continuations)

    @property
    def arguments(self) -> tuple["Site", ...]:
        """The values that it passes to the function that it calls; a TPU's SparseCore gets them after the start."""
        return self.operands + tuple(late for after in self.continuations for late in after.operands[1:])

    @property
    def reduction(self) -> str:
        """The opcode with which a collective combines values; empty if it does not."""
        names = self.instruction.called("to_apply")
        return self.module[names[0]].root.opcode if names else ""

    @property
    def results(self) -> tuple[Shape, ...]:
        """The arrays that it makes; an instruction that only starts an operation returns its operands before them."""
        got = self.instruction.shape.arrays
        operand_count = sum(len(operand.instruction.shape.arrays) for operand in self.operands)
        if self.instruction.opcode == COPY_START:
            return got[:1]
        if self.instruction.opcode == FUSION_START:
            return self.root(self.instruction.called("calls")[0]).instruction.shape.arrays
        return got[operand_count : 2 * operand_count] if self.instruction.begins and len(got) > operand_count else got

    def root(self, name: str) -> "Site":
        """The result of a function that this instruction calls; a loop of unknown length calls it once."""
        computation, executions = self.module[name], self.executions
        if self.instruction.opcode == "while" and (count := trip_count(self)) is not None:
            executions *= count
        return Site(self.module, computation, computation.root, executions, self)

    def inside(self, name: str) -> Iterator["Site"]:
        """All instructions of a function that this instruction calls."""
        root = self.root(name)
        return (root.beside(instruction.name) for instruction in root.computation)


def entry_sites(module: Module) -> Iterator[Site]:
    """The instructions of the entry."""
    return (Site(module, module.entry, instruction) for instruction in module.entry)


def launches(sites: Iterator[Site]) -> Iterator[Site]:
    """The instructions that run, with fusions as one each; loops, calls and branches are opened. See `entry_sites`."""
    for site in sites:
        inner = site.instruction.subprograms
        if not inner:
            yield site
        for name in inner:
            yield from launches(site.inside(name))


def opened(launch: Site) -> Iterator[Site]:
    """A launch's instruction and, for a fusion, all instructions inside it, including nested fusions."""
    yield launch
    if launch.instruction.is_fusion:
        for name in launch.instruction.called("calls"):
            for inner in launch.inside(name):
                yield from opened(inner)


def trip_count(loop: Site) -> int | None:
    """How often the body of a `while` runs; None if that is not known before the program runs.

    XLA annotates the loop with the number for GPUs and CPUs, but not for TPUs. There it follows from the condition that
    JAX writes for `scan` and `fori_loop`: a counter starts at a constant, is compared with a constant, and is
    incremented by one in each iteration.
    """
    if (known := loop.instruction.known_trip_count) is not None:
        return known
    test, body = (_computed(_result(loop, name)) for name in ("condition", "body"))
    initial = loop.operands[0]
    if test.instruction.opcode != COMPARE or {initial.instruction.opcode, body.instruction.opcode} != {"tuple"}:
        return None
    counter, limit = test.operands
    if (index := element_of_carry(counter)) is None:
        return None
    start, stop, step = _number(initial.operands[index]), _number(limit), _added(body.operands[index], index)
    passed = element_of_carry(limit)
    if passed is not None and passed == element_of_carry(body.operands[passed]):
        stop = _number(initial.operands[passed])  # Passed on unchanged from iteration to iteration.
    beyond = COMPARISONS.get(test.instruction.attribute("direction"))
    if start is None or stop is None or not step or beyond is None:
        return None
    return max(0, -((start - stop - beyond) // step))


def _result(loop: Site, attribute: str) -> Site:
    computation = loop.module[loop.instruction.called(attribute)[0]]
    return Site(loop.module, computation, computation.root)


def _computed(site: Site) -> Site:
    """The instruction that computes a value, looking through copies, casts and fusions."""
    if site.instruction.opcode in COPIES:
        return _computed(site.operands[0])
    if site.instruction.is_fusion:
        return _computed(site.root(site.instruction.called("calls")[0]))
    if site.instruction.opcode == "parameter" and site.caller is not None and site.caller.instruction.is_fusion:
        return _computed(site.caller.operands[site.instruction.parameter_number])
    return site


def _number(site: Site) -> int | None:
    """The integer that a value is, if it is constant."""
    instruction = _computed(site).instruction
    text = instruction.operands[0] if instruction.opcode == "constant" and instruction.operands else ""
    return int(text) if text.lstrip("-").isdigit() else None


def element_of_carry(site: Site) -> int | None:
    """Which element of a loop's carry a value in its body or condition is, if it is an unchanged one."""
    element = _computed(site)
    if element.instruction.opcode != "get-tuple-element" or element.operands[0].instruction.opcode != "parameter":
        return None
    return int(element.instruction.attribute("index"))


def _added(result: Site, index: int) -> int | None:
    """The number that an iteration adds to an element of the carry."""
    operation = _computed(result)
    if operation.instruction.opcode != ADD:
        return None
    first, second = operation.operands
    if element_of_carry(first) == index:
        return _number(second)
    return _number(first) if element_of_carry(second) == index else None
