"""The bytes that a launch reads and writes: of an array that it slices or updates in place, only the slice."""

from ..devices import Traffic
from .instruction import (
    ALLOCATED,
    BITCAST,
    JOINED,
    NO_LAUNCH,
    QUANTIZED,
    SCATTER,
    SLICE_START,
    SLICES,
    TRANSPOSE,
    UPDATE,
    Shape,
)
from .program import Site, opened


def is_launch(site: Site) -> bool:
    """Whether an instruction makes the device do something: not an alias, not the end of an asynchronous one."""
    runs = site.instruction.opcode not in NO_LAUNCH and not site.instruction.ends
    return runs and site.instruction.custom_call_name not in (ALLOCATED, JOINED)


def traffic_of(launch: Site) -> Traffic:
    """What one run of a launch that is not a product reads and writes.

    It writes two layouts if it has several FP8 results, and transposes FP8 inside. Parts of arrays that it updates in
    place, such as the stacks of a scan, do not count. Launches that quantize in blocks count as casts: a program
    does not tell them apart.
    """
    written = [shape for shape in launch.results if _is_quantized(shape)]
    if sum(map(_is_quantized, _written_whole(launch))) > 1 and any(_is_transposed(site) for site in opened(launch)):
        return Traffic(1, two_layouts=touched(launch))
    read = [shape for operand in launch.operands for shape in operand.instruction.shape.arrays]
    if written or any(map(_is_quantized, read)) or launch.instruction.is_quantizing:
        return Traffic(1, casts=touched(launch))
    return Traffic(1, plain=touched(launch))


def _written_whole(launch: Site) -> list[Shape]:
    """The results of a launch, without those that it updates in place."""
    if not launch.instruction.is_fusion:
        return list(launch.results)
    root = launch.root(launch.instruction.called("calls")[0])
    results = root.operands if root.instruction.opcode == "tuple" else (root,)
    return [site.instruction.shape for site in results if _unnamed(site).instruction.opcode not in (UPDATE, SCATTER)]


def _is_quantized(shape: Shape) -> bool:
    return shape.dtype.startswith(QUANTIZED)


def _is_transposed(site: Site) -> bool:
    return site.instruction.opcode == TRANSPOSE and _is_quantized(site.instruction.shape)


def touched(launch: Site) -> int:
    """The bytes that a launch (a fusion or any other instruction) reads and writes in one run."""
    instruction = launch.instruction
    if instruction.is_fusion:
        root = launch.root(instruction.called("calls")[0])
        return sum(_read(root.beside(p.name)) for p in root.computation.parameters) + _written(root)
    opcode = instruction.opcode
    if opcode in SLICES:
        return 2 * instruction.shape.bytes + sum(o.instruction.shape.bytes for o in launch.operands[1:])
    if opcode == SLICE_START:
        return 2 * launch.results[0].bytes
    if opcode == UPDATE:
        return 2 * launch.operands[1].instruction.shape.bytes
    if opcode == SCATTER:
        return sum(2 * o.instruction.shape.bytes for o in launch.operands[1:])
    return sum(o.instruction.shape.bytes for o in launch.operands) + sum(shape.bytes for shape in launch.results)


def _users(site: Site) -> list[Site]:
    """The instructions of a fusion that read a value, directly or under other names."""
    readers = []
    for user in site.computation.users[site.instruction.name]:
        other = site.beside(user.name)
        is_name = user.opcode in (BITCAST, "get-tuple-element")
        # The result of a fusion within a fusion may be its operand under another name.
        readers += _users(other) if is_name and not user.is_root else [other]
    return readers


def _read(parameter: Site) -> int:
    """The bytes that a fusion reads of one of its operands."""
    whole = parameter.instruction.shape.bytes
    if parameter.instruction.is_root:
        return whole  # In a fusion within a fusion: passed on unchanged.
    parts = 0
    for user in _users(parameter):
        opcode, operands = user.instruction.opcode, user.operands
        is_first = _is_name_for(operands[0], parameter) if operands else False
        if opcode in SLICES and is_first:
            parts += user.instruction.shape.bytes
        elif opcode in (UPDATE, SCATTER) and is_first:
            continue  # Written in place, not read.
        elif user.instruction.is_fusion:
            root = user.root(user.instruction.called("calls")[0])
            parts += sum(
                _read(root.beside(inner.name))
                for inner, operand in zip(root.computation.parameters, operands, strict=True)
                if _is_name_for(operand, parameter)
            )
        else:
            return whole
    return min(whole, parts)


def _is_name_for(site: Site, value: Site) -> bool:
    return _unnamed(site).instruction.name == value.instruction.name


def _unnamed(site: Site) -> Site:
    """What a value is another name for."""
    while site.instruction.opcode == BITCAST:
        site = site.operands[0]
    return site


def _written(root: Site) -> int:
    """The bytes that a fusion writes; for an update in place, the update."""
    instruction = root.instruction
    if instruction.opcode == "tuple":
        return sum(map(_written, root.operands))
    if instruction.opcode == BITCAST:
        return _written(root.operands[0])
    if instruction.opcode == UPDATE:
        return root.operands[1].instruction.shape.bytes
    if instruction.opcode == SCATTER:
        return root.operands[2].instruction.shape.bytes
    if instruction.opcode == "parameter":
        return 0
    if instruction.is_fusion:
        return _written(root.root(instruction.called("calls")[0]))
    return instruction.shape.bytes
