"""HLO text as data: modules, computations, instructions, shapes. Exactly what XLA prints of a program.

It reads the text, not the protocol buffer: every XLA prints it, no schema has to be carried along, and people can check
it.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Iterator

from .instruction import Instruction, Shape


@dataclasses.dataclass(frozen=True)
class Computation:
    """A function of a program: its instructions by name, in the order in which they run, and its result."""

    name: str
    instructions: dict[str, Instruction]
    root: Instruction

    def __iter__(self) -> Iterator[Instruction]:
        return iter(self.instructions.values())

    def __getitem__(self, name: str) -> Instruction:
        return self.instructions[name]

    @functools.cached_property
    def parameters(self) -> tuple[Instruction, ...]:
        return tuple(sorted((i for i in self if i.opcode == "parameter"), key=lambda i: i.parameter_number))

    @functools.cached_property
    def users(self) -> dict[str, tuple[Instruction, ...]]:
        """The instructions that read each instruction's value."""
        readers: dict[str, list[Instruction]] = {name: [] for name in self.instructions}
        for instruction in self:
            if instruction.opcode not in ("parameter", "constant"):
                for name in dict.fromkeys(instruction.operands):
                    readers[name].append(instruction)
        return {name: tuple(users) for name, users in readers.items()}


@dataclasses.dataclass(frozen=True)
class Module:
    """A program: its functions by name, the one that runs, and the number of devices."""

    computations: dict[str, Computation]
    entry: Computation
    devices: int = 1

    def __getitem__(self, name: str) -> Computation:
        return self.computations[name]


def parse_hlo(text: str) -> Module:
    """Reads a program as XLA prints it.

    Args:
        text: The result of `compiled.as_text()` or `lowered.as_text("hlo")`.

    Raises:
        ValueError: If the text is not an HLO module, or a line in it cannot be read.

    Example:
        >>> module = parse_hlo('''HloModule double
        ... ENTRY main {
        ...   x = bf16[2,3]{1,0} parameter(0)
        ...   ROOT y = bf16[2,3]{1,0} add(x, x), metadata={op_name="jit(double)/add"}
        ... }''')
        >>> module.entry.root.op_name, module.entry.root.shape.bytes
        ('jit(double)/add', 12)
    """
    header = re.search(r"^HloModule ([^\s,]+)", text, re.MULTILINE)
    if header is None:
        raise ValueError(f"text is not an HLO module: it starts with {text[:60]!r}; pass compiled.as_text()")
    computations: dict[str, Computation] = {}
    entry = None
    opened: tuple[str, bool, dict[str, Instruction]] | None = None
    for line in text[header.end() :].splitlines():
        line = line.strip()
        if opened is None:
            # Tables of source lines come between the header and the computations; they open no brace.
            if (match := _COMPUTATION.match(line)) is not None:
                opened = match["name"], match["entry"] is not None, {}
        elif line == "}" or line.startswith("}, "):
            name, is_entry, instructions = opened
            if not (roots := [instruction for instruction in instructions.values() if instruction.is_root]):
                raise ValueError(f"computation {name} has no ROOT instruction; the text may be cut")
            computations[name] = Computation(name, instructions, roots[0])
            entry, opened = (computations[name] if is_entry else entry), None
        elif line:
            instruction = _instruction(line)
            opened[2][instruction.name] = instruction
    if entry is None:
        raise ValueError(f"HLO module {header[1]} has no ENTRY computation; the text may be cut")
    line = text[header.start() :].partition("\n")[0]
    counts = re.findall(r"(?:num_partitions|replica_count)=(\d+)", line)
    return Module(computations, entry, math.prod(map(int, counts)))


_COMPUTATION = re.compile(r"(?P<entry>ENTRY )?%?(?P<name>[\w.\-]+) (?:\(.*\) -> .*)?\{$")
_RESULT = re.compile(r"(?P<root>ROOT )?%?(?P<name>[\w.\-]+) = ")
_OPCODE = re.compile(r" ?(?P<opcode>[a-z][\w\-]*)\(")
_ARRAY = re.compile(r"(?P<dtype>\w+)\[(?P<dims>[^\]]*)\](?:\{[^{}]*\})?")
# Brackets and commas; and whole strings and comments, because brackets and commas inside them mean nothing.
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|/\*.*?\*/|[(){}\[\],]')


def _instruction(line: str) -> Instruction:
    result = _RESULT.match(line)
    if result is None:
        raise ValueError(f"not an HLO instruction: {line[:200]!r}")
    shape, end = _shape(line, result.end())
    opcode = _OPCODE.match(line, end)
    if opcode is None:
        raise ValueError(f"not an HLO instruction: no opcode after the shape in {line[:200]!r}")
    parts, end = _split(line, opcode.end())
    attributes, _ = _split(line, end)
    return Instruction(
        name=result["name"],
        shape=shape,
        opcode=opcode["opcode"],
        # Some printers write an operand's shape before its name.
        operands=tuple(part.rsplit(" ", 1)[-1].removeprefix("%") for part in parts),
        attributes={name: value for name, _, value in (part.partition("=") for part in attributes)},
        is_root=result["root"] is not None,
    )


def _split(line: str, start: int) -> tuple[list[str], int]:
    """The parts between commas up to the bracket that closes the one open at `start`, and where that ends."""
    parts, depth, begin = [], 0, start
    for token in _TOKEN.finditer(line, start):
        kind = token[0]
        if kind in "({[":
            depth += 1
        elif kind in ")}]":
            depth -= 1
            if depth < 0:
                parts.append(line[begin : token.start()])
                break
        elif kind == "," and depth == 0:
            parts.append(line[begin : token.start()])
            begin = token.end()
    else:
        token = None
        parts.append(line[begin:])
    cleaned = [re.sub(r"/\*.*?\*/", "", part).strip() for part in parts]
    return [part for part in cleaned if part], len(line) if token is None else token.end()


def _shape(line: str, start: int) -> tuple[Shape, int]:
    """The shape that begins at `start`, and where it ends."""
    if line.startswith("(", start):
        parts, end = _split(line, start + 1)
        return Shape("tuple", elements=tuple(_shape(part, 0)[0] for part in parts)), end
    match = _ARRAY.match(line, start)
    if match is None:
        raise ValueError(f"not an HLO shape: {line[start : start + 80]!r}")
    dims = tuple(int(dim.strip().removeprefix("<=")) for dim in match["dims"].split(",") if dim.strip())
    return Shape(match["dtype"], dims), match.end()
