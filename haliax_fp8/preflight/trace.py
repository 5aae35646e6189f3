"""Where a value comes from and where it goes, and what a product belongs to in the model.

An operand is followed back through casts, copies, slices, loops and fusions, to an argument if it comes from one. A
product that computes a weight's gradient does not have the weight as an operand: its result is followed forward,
through casts, scales, sums and the optimizer, to the program's results, such as the new weight.
"""

import dataclasses
import re
from collections.abc import Iterator, Sequence

from ..scopes import DGRAD, FP8_DOT_GENERAL, FP8_RAGGED_DOT, FPROP, ROTATION, WGRAD
from . import instruction as words
from .instruction import Shape
from .program import Site, element_of_carry


def product_name(scope: str) -> str:
    """`fprop`, `dgrad` or `wgrad` for this package's products; `forward` or `backward` for others and for rotations.

    Example:
        >>> product_name("jit(step)/jvp(MLP)/fp8_linear/fp8_dot_general/fp8_fprop/fprop/dot_general")
        'fprop'
        >>> product_name("jit(step)/transpose(jvp(MLP))/dot_general")
        'backward'
    """
    for name in () if rotates(scope) else scope.split("/"):
        if name in (FPROP, DGRAD, WGRAD):
            return name
    return "backward" if re.search(r"\btranspose\(", scope) else "forward"


def asks_for_fp8(scope: str) -> bool:
    """Whether a product was traced in one of this package's ops."""
    return not {FP8_DOT_GENERAL, FP8_RAGGED_DOT}.isdisjoint(scope.split("/"))


def rotates(scope: str) -> bool:
    """Whether a product rotates an operand of one of this package's products.

    Example:
        >>> rotates("jit(step)/transpose(jvp(MLP))/fp8_dot_general/fp8_backward/wgrad/rotation/dot_general")
        True
    """
    return asks_for_fp8(scope) and ROTATION in scope.split("/")


def label(scope: str) -> str:
    """A scope's name for readers: its named scopes, without functions that JAX and this package jit.

    Example:
        >>> label("jit(step)/jvp(Attention)/contract head_dim -> position/0 1, 2 1 -> 0 2/dot_general")
        'Attention/contract head_dim -> position'
        >>> label("jit(step)/transpose(jvp(vmap(Attention)))/qk/dot_general")
        'Attention/qk'
    """
    names = []
    for part in _parts(scope):
        if re.fullmatch(r"jit\(.*\)|[\d ,]+ -> [\d ]*|\w+_general|dot", part):
            continue
        while (match := re.fullmatch(r"(\w+)\((.*)\)", part)) is not None:
            part = match[2]
        if part and part not in (
            "while",
            "body",
            "cond",
            "closed_call",
            "eval_jaxpr",
            "checkpoint",
            "rematted_computation",
        ):
            names.append(part)
    return "/".join(names)


def _parts(scope: str) -> list[str]:
    """Splits a scope at slashes outside parentheses."""
    parts, depth = [""], 0
    for character in scope:
        depth += {"(": 1, ")": -1}.get(character, 0)
        if character == "/" and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return parts


def dotted(path: str) -> str:
    """A path in a tree as JAX prints it, rewritten as in `describe`, without the dictionary of `compile_for`'s arrays.

    Example:
        >>> dotted("model.layers[0].up['weight'].array"), dotted("arrays['model.layers.0.weight']")
        ('model.layers.0.up.weight.array', 'model.layers.0.weight')
    """
    path = re.sub(r"^(?:arrays|donated)\['(.*)'\]$", r"\1", path)
    # Nodes without names for their children number them.
    path = path.replace("[<flat index 0>]", "")
    return re.sub(r"\[['\"]?([^\]'\"]*)['\"]?\]", r".\1", path).strip(".")


def layer_of(argument: str) -> str:
    """The layer of a weight: its path without the names of the weight and of the array in it.

    Example:
        >>> layer_of("model.layers.0.up.weight.array"), layer_of("w")
        ('model.layers.0.up', 'w')
    """
    return re.sub(r"(?<=.)\.(weight|kernel)(\.(array|value|\d+))?$", "", argument)


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
            if step.instruction.is_windowed:
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
    if instruction.is_fusion:
        return site.root(instruction.called("calls")[0])
    if opcode == "while":
        return site.root(instruction.called("body")[0])
    if (opcode == "call" or instruction.begins) and (inner := instruction.subprograms):
        return site.root(inner[0])
    if instruction.ends and site.operands[0].instruction.opcode in _CALLS:
        return site.operands[0]
    if instruction.custom_call_name == words.JOINED:
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
        branches = caller.instruction.subprograms
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
    if result.instruction.opcode not in (words.UPDATE, words.FUSION) and not result.instruction.is_windowed:
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
        if (scale := _beside_zero_or_nan(current)) is not None:
            current = scale
            continue
        if instruction.opcode in words.SCALES_AND_BOUNDS:
            return all(map(_is_broadcast, current.operands))
        current = _before(current, indices)
    return False


def _is_zero_or_nan(site: Site) -> bool:
    """Whether a value is `x - x`: our cast subtracts that, or adds it to the divisor, which makes infinities NaN."""
    instruction = site.instruction
    return instruction.opcode == words.SUBTRACT and len(set(instruction.operands)) == 1


def _beside_zero_or_nan(site: Site) -> Site | None:
    """What `x - x` is added to."""
    if site.instruction.opcode != words.ADD:
        return None
    others = [operand for operand in site.operands if not _is_zero_or_nan(operand)]
    return others[0] if len(others) == 1 else None


def _repeats_one_number(site: Site) -> bool:
    while not _is_number(site.instruction.shape):
        if (scale := _beside_zero_or_nan(site)) is not None:
            site = scale
            continue
        if site.instruction.opcode not in {words.BROADCAST, words.TRANSPOSE, *words.COPIES}:
            return False
        site = site.operands[0]
    return True


def _is_number(shape: Shape) -> bool:
    return shape.dtype != "tuple" and shape.size == 1


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
    if opcode == words.UPDATE:
        return [(user, path)] if 1 in indices or 0 in indices else []
    if opcode == words.SCATTER:
        # A tied embedding: the gradients of its rows are added to that of the head.
        return [(user, path)] if 0 in indices else []
    if instruction.is_fusion:
        return [(_parameter(user, instruction.called("calls")[0], index), path) for index in indices]
    if opcode == words.CALL_UPDATE:
        if 0 in indices:
            return [(user, path)]
        start = user
        while start.instruction.opcode == words.CALL_UPDATE:
            start = start.operands[0]
        (name,) = start.instruction.subprograms
        numbers = (i for i, arg in enumerate(start.arguments) if arg.instruction.name == value.instruction.name)
        return [(_parameter(start, name, number), path) for number in numbers]
    inner = instruction.subprograms
    if opcode == "conditional":
        return [(_parameter(user, inner[index - 1], 0), path) for index in indices if index > 0]
    if inner:
        return [(_parameter(user, inner[0], index), path) for index in indices]
    # XLA may split a product and add up the parts; the sums have the product's scope.
    is_part = opcode == words.REDUCE and bool(scope) and instruction.op_name == scope
    if opcode not in words.ELEMENTWISE and not is_part and instruction.custom_call_name != words.JOINED:
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
    matches = []
    for output in outputs:
        fits = [name for name, path in inner.items() if path and (output == path or output.endswith(f".{path}"))]
        if fits:
            matches.append(min(fits, key=lambda path: path.count(".")))
    return tuple(dict.fromkeys(matches))
