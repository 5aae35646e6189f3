"""How often a loop runs: from XLA, or from a counter that runs from one constant to another."""

import dataclasses

from .text import Computation, Instruction, Module


def trip_count(module: Module, computation: Computation, loop: Instruction) -> int | None:
    """How often the body of a `while` runs.

    XLA annotates the loop with the number for GPUs and CPUs, but not for TPUs. There it follows from the condition that
    JAX writes for `scan` and `fori_loop`: a counter starts at a constant, is compared with a constant, and is
    incremented by one in each run.

    Args:
        module: The program.
        computation: The function that the loop is in.
        loop: The `while`.

    Returns:
        The number; None if it is not known before the program runs.
    """
    known = loop.config.get("known_trip_count", {}).get("n")
    if known is not None:
        return int(known)
    (condition,), (body,) = loop.called("condition"), loop.called("body")
    test = _Value.of(module, module[condition], module[condition].root).operation()
    initial = computation[loop.operands[0]]
    if test.instruction.opcode != "compare" or initial.opcode != "tuple":
        return None
    counter, limit = test.operands()
    index = counter.element()
    start = None if index is None else _Value.of(module, computation, computation[initial.operands[index]]).number()
    stop = limit.number()
    if stop is None and (place := limit.element()) is not None and place == _carried(module, module[body], place):
        stop = _Value.of(module, computation, computation[initial.operands[place]]).number()
    step = None if index is None else _step(module, module[body], index)
    if start is None or stop is None or not step:
        return None
    beyond = {"LT": 0, "LE": 1, "GT": 0, "GE": -1}.get(test.instruction.attribute("direction"))
    return None if beyond is None else max(0, -((start - stop - beyond) // step))


@dataclasses.dataclass(frozen=True)
class _Value:
    """An instruction, and where it is in a fusion, what the fusion's parameters stand for."""

    module: Module
    computation: Computation
    instruction: Instruction
    parameters: tuple["_Value", ...] | None = None

    @staticmethod
    def of(module: Module, computation: Computation, instruction: Instruction) -> "_Value":
        return _Value(module, computation, instruction)

    def operands(self) -> tuple["_Value", ...]:
        operands = self.computation.operands(self.instruction)
        return tuple(dataclasses.replace(self, instruction=operand) for operand in operands)

    def operation(self) -> "_Value":
        """What computes the value: copies, casts and fusions looked through."""
        opcode = self.instruction.opcode
        if opcode in ("copy", "bitcast", "convert", "reshape"):
            return self.operands()[0].operation()
        if opcode == "fusion":
            inner = self.module[self.instruction.called("calls")[0]]
            return _Value(self.module, inner, inner.root, self.operands()).operation()
        if opcode == "parameter" and self.parameters is not None:
            return self.parameters[self.instruction.parameter_number].operation()
        return self

    def number(self) -> int | None:
        """The integer that it is, if it is constant."""
        found = self.operation().instruction
        if found.opcode != "constant" or not found.operands:
            return None
        text = found.operands[0]
        return int(text) if text.lstrip("-").isdigit() else None

    def element(self) -> int | None:
        """Which element of the loop's state it is, if it is one."""
        found = self.operation()
        if found.instruction.opcode != "get-tuple-element":
            return None
        state = found.operands()[0].instruction
        return int(found.instruction.attribute("index")) if state.opcode == "parameter" else None


def _result(module: Module, body: Computation, index: int) -> _Value | None:
    if body.root.opcode != "tuple":
        return None
    return _Value.of(module, body, body[body.root.operands[index]])


def _carried(module: Module, body: Computation, index: int) -> int | None:
    """Which element of the state becomes this one in the next run, if it is one as it was."""
    result = _result(module, body, index)
    return None if result is None else result.element()


def _step(module: Module, body: Computation, index: int) -> int | None:
    """What a run adds to an element of the state."""
    result = _result(module, body, index)
    if result is None or (operation := result.operation()).instruction.opcode != "add":
        return None
    first, second = operation.operands()
    if first.element() == index:
        return second.number()
    return first.number() if second.element() == index else None
