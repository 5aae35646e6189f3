"""Follows a product's result forward, through casts, scales, sums and the optimizer, to the results of the program.

A product that computes a weight's gradient does not have the weight as an operand. But the gradient, element by
element, becomes a result of the program: the new weight, or the optimizer's moments.
"""

from collections.abc import Iterator, Sequence

from .sites import Site
from .vocabulary import (
    CALL_UPDATE,
    ELEMENTWISE,
    JOINED,
    REDUCE,
    SCATTER,
    UPDATE,
    custom_call_name,
    is_fusion,
    subprograms,
)


# A value; and, if it is a tuple, the position in it of the part that is followed.
type _Part = tuple[Site, tuple[int, ...]]


def destinations(site: Site) -> Iterator[int]:
    """The positions in the program's result that an instruction's value reaches; for a tuple, its first element."""
    waiting: list[_Part] = [(site, (0,) if site.instruction.shape.dtype == "tuple" else ())]
    seen = set()
    scope = site.instruction.op_name
    while waiting:
        value, path = waiting.pop()
        key = id(value.computation), value.instruction.name, path
        if key in seen:
            continue
        seen.add(key)
        if value.instruction.is_root:
            if value.caller is None:
                yield path[0] if path else 0
            else:
                waiting += _returned(value.caller, path)
        for user in value.computation.users[value.instruction.name]:
            waiting += _after(value, value.beside(user.name), path, scope)


def _after(value: Site, user: Site, path: tuple[int, ...], scope: str) -> list[_Part]:
    """Where one of a value's users passes it on to."""
    instruction = user.instruction
    opcode = instruction.opcode
    indices = [i for i, name in enumerate(instruction.operands) if name == value.instruction.name]
    if opcode == "get-tuple-element":
        return [(user, path[1:])] if path and int(instruction.attribute("index")) == path[0] else []
    if opcode == "tuple":
        return [(user, (index, *path)) for index in indices]
    if opcode == UPDATE:
        return [(user, path)] if 1 in indices or 0 in indices else []
    if opcode == SCATTER:
        # A tied embedding: the gradients of its rows are added to that of the head.
        return [(user, path)] if 0 in indices else []
    if is_fusion(instruction):
        return [(_parameter(user, instruction.called("calls")[0], index), path) for index in indices]
    if opcode == CALL_UPDATE:
        if 0 in indices:
            return [(user, path)]
        start = user
        while start.instruction.opcode == CALL_UPDATE:
            start = start.operands[0]
        (name,) = subprograms(start.instruction)
        numbers = (i for i, given in enumerate(start.arguments) if given.instruction.name == value.instruction.name)
        return [(_parameter(start, name, number), path) for number in numbers]
    inner = subprograms(instruction)
    if opcode == "conditional":
        return [(_parameter(user, inner[index - 1], 0), path) for index in indices if index > 0]
    if inner:
        return [(_parameter(user, inner[0], index), path) for index in indices]
    # XLA may split a product and add up the parts; the sums have the product's scope.
    is_part = opcode == REDUCE and bool(scope) and instruction.op_name == scope
    if opcode not in ELEMENTWISE and not is_part and custom_call_name(instruction) != JOINED:
        return []
    if instruction.shape.dtype == "tuple" and len(instruction.operands) > 1:
        # Takes several operands and returns a tuple of the same length.
        return [(user, (index, *path)) for index in indices]
    return [(user, path)]


def _parameter(caller: Site, name: str, number: int) -> Site:
    root = caller.root(name)
    return root.beside(root.computation.parameters[number].name)


def _returned(caller: Site, path: tuple[int, ...]) -> list[_Part]:
    """Where the result of a function goes: to its caller; for a loop's body, to the next iteration as well."""
    if caller.instruction.opcode != "while":
        return [(caller, path)]
    return [(caller, path), (_parameter(caller, caller.instruction.called("body")[0], 0), path)]


def matching(outputs: Sequence[str], arguments: Sequence[str]) -> tuple[str, ...]:
    """The arguments that outputs are named after: for each output, the shortest argument whose path, without its first
    name, is a suffix of the output's.

    Example:
        >>> matching(["1.mu.layers.0.weight"], ["opt_state.0.mu.layers.0.weight", "model.layers.0.weight"])
        ('model.layers.0.weight',)
    """
    inner = {argument: argument.partition(".")[2] for argument in arguments}
    found = []
    for output in outputs:
        fits = [name for name, path in inner.items() if path and (output == path or output.endswith(f".{path}"))]
        if fits:
            found.append(min(fits, key=lambda path: path.count(".")))
    return tuple(dict.fromkeys(found))
