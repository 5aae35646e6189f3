"""Communication between devices: what is sent, how many bytes, what runs meanwhile, and what it is for."""

import dataclasses
from collections.abc import Collection, Sequence

from ..devices import is_narrow
from ..scopes import WGRAD
from .instruction import ADD, ALL_REDUCE, DONE, SENT_WHOLE, Shape
from .program import Site
from .trace import product_name


# An instruction, by the names of its function and itself, and the index of one of its results.
type Result = tuple[str, str, int]


@dataclasses.dataclass(frozen=True)
class Part:
    """One of the arrays that a collective sends at once.

    Args:
        dtype: XLA's name for its element type.
        wire: The bytes of it that a device sends in one run, in a ring.
        feeds_product: Whether the gathered array, or a part that XLA passes on while it multiplies others, becomes an
            operand of a matrix product, at most cast and scaled.
    """

    dtype: str
    wire: float
    feeds_product: bool = False


@dataclasses.dataclass(frozen=True)
class Collective:
    """Communication between devices.

    Args:
        kind: Its opcode, such as `all-gather`.
        dtype: XLA's name for the element type; with several arrays, that of the largest.
        bytes: The size of what a device holds before or after one run, whichever is larger.
        executions: How often it runs in one step.
        scope: The stack of named scopes that it was traced in.
        devices: How many devices communicate with each other.
        parts: The arrays that it sends at once.
        reduction: How it combines values, such as `add` or `maximum`; empty if it only moves them.
        is_asynchronous: Whether other launches may run between its start and its end.
        meanwhile: The products that run in between, such as `model.up wgrad`.
    """

    kind: str
    dtype: str
    bytes: int
    executions: int
    scope: str
    devices: int = 1
    parts: tuple[Part, ...] = ()
    reduction: str = ""
    is_asynchronous: bool = False
    meanwhile: tuple[str, ...] = ()

    @property
    def wire(self) -> int:
        """The bytes that a device sends in one run, in a ring of `n`: `(n-1)/n` of what is gathered, scattered or
        exchanged, twice that of an all-reduce."""
        return round(sum(part.wire for part in self.parts))

    @property
    def sent(self) -> int:
        """The bytes that a device sends in one step: `wire`, as often as the collective runs."""
        return round(sum(part.wire for part in self.parts) * self.executions)

    @property
    def reduces_gradients(self) -> bool:
        """Whether it adds up gradients of weights, or of values computed from them."""
        is_sum = self.reduction == ADD and self.dtype.startswith(("f", "bf"))
        return is_sum and product_name(self.scope) in (WGRAD, "backward")


@dataclasses.dataclass(frozen=True)
class Multiplying:
    """A launch that multiplies, and the names of its products."""

    launch: Site
    names: tuple[str, ...]


def read_collective(
    site: Site, kind: str, product_operands: Collection[Result], multiplying: Sequence[Multiplying]
) -> Collective:
    """Reads what a collective does.

    Args:
        site: Its instruction; for an asynchronous one, the one that starts it.
        kind: Its opcode without `-start`.
        product_operands: The results of gathers, and parts passed on, that become operands of products.
        multiplying: The launches that multiply.
    """
    operands = tuple(array for operand in site.operands for array in operand.instruction.shape.arrays)
    made = site.results
    devices = site.instruction.devices_in_group(site.module.devices)
    # Some have operands besides those that they return: where to put what they receive, and how much of it.
    wires = [_wire(kind, before, after, devices) for before, after in zip(operands, made, strict=False)]
    parts = tuple(
        Part(shape.dtype, wire, (site.computation.name, site.instruction.name, index) in product_operands)
        for index, (shape, wire) in enumerate(zip(made, wires, strict=True))
    )
    begin = site
    while begin.caller is not None and begin.caller.instruction.begins:
        begin = begin.caller
    end = _end(begin)
    return Collective(
        kind=kind,
        dtype=max(made, key=lambda shape: shape.bytes).dtype,
        bytes=max(sum(shape.bytes for shape in shapes) for shapes in (operands, made)),
        executions=site.executions,
        scope=site.instruction.op_name,
        devices=devices,
        parts=parts,
        reduction=site.reduction,
        is_asynchronous=end is not None,
        meanwhile=() if end is None else _between(begin, end, multiplying),
    )


def _wire(kind: str, before: Shape, after: Shape, devices: int) -> float:
    """The bytes that a device sends to its neighbor in a ring."""
    whole = max(before.bytes, after.bytes)
    if kind in SENT_WHOLE:
        return whole
    return whole * (devices - 1) / devices * (2 if kind == ALL_REDUCE else 1)


def _end(begin: Site) -> str | None:
    """The name of the instruction that ends an asynchronous collective; None for one that blocks."""
    if begin.instruction.is_synchronous or not (after := begin.continuations):
        return None
    last = after[-1].instruction
    return last.name if last.opcode.endswith(DONE) else None


def _between(begin: Site, end: str, multiplying: Sequence[Multiplying]) -> tuple[str, ...]:
    """The products whose launches run after `begin` and before `end`, in program order."""
    order = list(begin.computation.instructions)
    # It runs once it has its operands, which it may get after its start.
    ready = [begin, *(after for after in begin.continuations if len(after.operands) > 1)][-1]
    within = set(order[order.index(ready.instruction.name) + 1 : order.index(end)])
    products: list[str] = []
    for one in multiplying:
        site: Site | None = one.launch
        while site is not None and site.computation is not begin.computation:
            site = site.caller
        if site is not None and site.instruction.name in within:
            products += one.names
    return tuple(products)


def fp8_share_of_gathers(collectives: Sequence[Collective]) -> float | None:
    """The share of bytes gathered for operands of products that are in FP8 or narrower; None if none are gathered.

    Args:
        collectives: All collectives of a program.
    """
    sent = [
        (part.dtype, part.wire * collective.executions)
        for collective in collectives
        for part in collective.parts
        if part.feeds_product
    ]
    total = sum(wire for _, wire in sent)
    return sum(wire for dtype, wire in sent if is_narrow(dtype)) / total if total else None
