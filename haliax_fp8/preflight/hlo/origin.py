"""Follows an operand back through casts, copies, slices, loops and fusions, to an argument if it comes from one."""

import dataclasses
from collections.abc import Iterator

from . import vocabulary as words
from .scopes import dotted
from .sites import Site, element_of_carry
from .text import Shape
from .vocabulary import begins, ends, is_fusion, is_windowed, subprograms


# The instructions whose end has the result of the function that they call.
_CALLS = {words.ASYNC_START, words.CALL_START, words.CALL_UPDATE, words.FUSION_START}


@dataclasses.dataclass(frozen=True)
class Origin:
    """The origin of a value.

    Args:
        arguments: The names of the arguments that it is a copy of, possibly cast, sliced or scaled: one; several if XLA
            concatenated them to merge products; none if it is computed.
        dtype: The narrowest floating type of 16 bits or more that it had on the way; empty if none.
        quantized: The FP8 element type that it had on the way, or has now; empty if none.
        rescaled: Whether it was multiplied after that.
        in_blocks: Whether it was multiplied by several numbers, as with a scale for each block.
    """

    arguments: tuple[str, ...]
    dtype: str
    quantized: str
    rescaled: bool
    in_blocks: bool


def origin(site: Site) -> Origin:
    """Follows a value back."""
    arguments: tuple[str, ...] = ()
    quantized = ""
    rescaled = in_blocks = False
    wide: list[Shape] = []
    for step in _makers(site):
        instruction = step.instruction
        if instruction.opcode == "parameter" and step.caller is None:
            arguments = (dotted(instruction.op_name or instruction.name),)
        elif instruction.opcode == words.CONCATENATE:
            parts = [origin(operand) for operand in step.operands]
            if all(part.arguments for part in parts):
                arguments = tuple(name for part in parts for name in part.arguments)
                quantized = quantized or parts[0].quantized
        shape = instruction.shape
        if not quantized and shape.dtype.startswith(words.QUANTIZED):
            quantized = shape.dtype
        if shape.dtype in words.WIDE:
            wide.append(shape)
        if not quantized and instruction.opcode in words.SCALES:
            rescaled = True
            in_blocks |= not any(map(_repeats_one_number, step.operands))
    narrowest = min(wide, key=lambda shape: shape.bits).dtype if wide else ""
    return Origin(arguments, narrowest, quantized, rescaled and bool(quantized), in_blocks and bool(quantized))


@dataclasses.dataclass(frozen=True)
class Entering:
    """The element type of an operand's array as a launch reads it, and whether the launch scales it in blocks."""

    dtype: str
    in_blocks: bool


def entering(launch: Site, operand: Site) -> Entering | None:
    """Follows an operand in a fusion back to where it enters, through casts, one scale, and moves of elements.

    None if the fusion computes it in another way. XLA's rewriter finds the same for cuBLASLt's FP8 product, and nothing
    else: no bounds, and no second scale.
    """
    in_blocks = is_scaled = False
    for step in _makers(operand):
        opcode = step.instruction.opcode
        if step.computation is launch.computation:
            return Entering(step.instruction.shape.dtype, in_blocks)
        if opcode in words.BOUNDS or opcode in words.SCALES and is_scaled:
            return None
        if opcode in words.SCALES:
            is_scaled, in_blocks = True, not any(map(_repeats_one_number, step.operands))
    return None


def gathers(site: Site) -> Iterator[tuple[Site, int]]:
    """The all-gathers that a value passes through, possibly cast, sliced or scaled before and after; and which of their
    results it is."""
    for step, indices in _steps(site):
        if step.instruction.opcode in (words.ALL_GATHER, words.ALL_GATHER_START):
            yield step, indices[-1] if indices else 0


def windowed(site: Site) -> Iterator[tuple[Site, int]]:
    """The same of the permutations with which XLA passes parts of an operand from device to device, and multiplies each
    as it arrives, possibly joined to another part."""
    waiting = [site]
    seen: set[tuple[int, str, tuple[int, ...]]] = set()
    while waiting:
        for step, indices in _steps(waiting.pop()):
            key = id(step.computation), step.instruction.name, indices
            if key in seen:
                break
            seen.add(key)
            if is_windowed(step.instruction):
                yield step, indices[-1] if indices else 0
            if step.instruction.opcode in (words.CONCATENATE, words.MAXIMUM):
                # XLA joins parts as the maximum of both, padded with what is less than every number.
                waiting += step.operands


def _makers(site: Site) -> Iterator[Site]:
    """The instructions that made a value, backwards for as long as each passes on one operand."""
    return (step for step, _ in _steps(site))


def _steps(site: Site) -> Iterator[tuple[Site, tuple[int, ...]]]:
    """The same, with the value's position in a tuple that an instruction makes."""
    # The position in a tuple is the path through it, innermost index last.
    indices: list[int] = []
    seen: set[tuple[int, str, tuple[int, ...]]] = set()
    current: Site | None = site
    while current is not None:
        key = id(current.computation), current.instruction.name, tuple(indices)
        if key in seen:
            return
        seen.add(key)
        yield current, tuple(indices)
        current = _before(current, indices)


def _before(site: Site, indices: list[int]) -> Site | None:
    """One step back; `indices` becomes the position in that step's value."""
    instruction = site.instruction
    opcode = instruction.opcode
    if opcode == "get-tuple-element":
        indices.append(int(instruction.attribute("index")))
        return site.operands[0]
    if opcode == "tuple" and indices:
        return site.operands[indices.pop()]
    if opcode == "parameter":
        return _argument(site, indices)
    if is_fusion(instruction):
        return site.root(instruction.called("calls")[0])
    if opcode == "while":
        return site.root(instruction.called("body")[0])
    if (opcode == "call" or begins(opcode)) and (inner := subprograms(instruction)):
        return site.root(inner[0])
    if ends(opcode) and site.operands[0].instruction.opcode in _CALLS:
        return site.operands[0]
    if words.custom_call_name(instruction) == words.JOINED:
        return site.operands[0]
    if opcode in words.HANDED_ON:
        # Some take several operands and return a tuple of the same length.
        several = indices and instruction.shape.dtype == "tuple" and len(instruction.operands) > 1
        return site.operands[indices.pop() if several else words.HANDED_ON[opcode]]
    if opcode == words.SUBTRACT and _is_zero_or_nan(site.operands[1]):
        return site.operands[0]
    if opcode in words.SCALES_AND_BOUNDS or opcode == words.SELECT:
        candidates = [operand for operand in site.operands[-2:] if not _is_broadcast(operand)]
        return candidates[0] if len(candidates) == 1 else None
    return None


def _argument(site: Site, indices: list[int]) -> Site | None:
    """The value that a function's caller passes for a parameter."""
    if (caller := site.caller) is None:
        return None
    if caller.instruction.opcode == "while":
        return _of_carry(site, indices)
    if caller.instruction.opcode == "conditional":
        branches = subprograms(caller.instruction)
        return caller.operands[1 + branches.index(site.computation.name)]
    return caller.arguments[site.instruction.parameter_number]


def _of_carry(carry: Site, indices: list[int]) -> Site | None:
    """Where an element of a loop's carry comes from: its initial value, if the body passes it on unchanged; the values
    that the body wrote in earlier iterations, if it fills an array slice by slice or XLA passes parts on."""
    root = carry.beside(carry.computation.root.name)
    if not indices or root.instruction.opcode != "tuple" or carry.caller is None:
        return None
    result = root.operands[indices[-1]]
    if element_of_carry(result) == indices[-1]:
        return carry.caller.operands[0]
    if result.instruction.opcode not in (words.UPDATE, words.FUSION) and not is_windowed(result.instruction):
        return None
    indices.pop()
    return result


def _is_broadcast(site: Site) -> bool:
    """Whether a value is one number, or numbers repeated: a scale, a bound, a bias."""
    indices: list[int] = []
    current: Site | None = site
    for _ in range(64):
        if current is None:
            return False
        instruction = current.instruction
        if instruction.opcode in (words.BROADCAST, "constant", words.IOTA) or _is_number(instruction.shape):
            return True
        if instruction.opcode in words.SCALES_AND_BOUNDS:
            return all(map(_is_broadcast, current.operands))
        current = _before(current, indices)
    return False


def _is_zero_or_nan(site: Site) -> bool:
    """Whether a value is `x - x`: our cast subtracts that, which makes infinities NaN."""
    instruction = site.instruction
    return instruction.opcode == words.SUBTRACT and len(set(instruction.operands)) == 1


def _repeats_one_number(site: Site) -> bool:
    while not _is_number(site.instruction.shape):
        if site.instruction.opcode not in {words.BROADCAST, words.TRANSPOSE, *words.COPIES}:
            return False
        site = site.operands[0]
    return True


def _is_number(shape: Shape) -> bool:
    return shape.dtype != "tuple" and shape.size == 1
