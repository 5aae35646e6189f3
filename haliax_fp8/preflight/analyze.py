"""Reads what a compiled program does from its text."""

import dataclasses
import functools
from collections.abc import Iterator, Mapping

from ..devices import Traffic, is_narrow
from ..scopes import DGRAD, FPROP, WGRAD
from .collectives import Multiplying, read_collective
from .compile import Compiled
from .devices import CompilableDevice
from .hlo import Module, parse_hlo
from .instruction import COLLECTIVES, CUDNN_ATTENTION, CUSTOM_CALL, LIBRARIES, START, Call
from .product import TRITON, Opaque, OtherLaunches, Product, Program, Verdict
from .program import Site, entry_sites, launches, opened, trip_count
from .sizes import Dimensions, dimensions, grouped_operands
from .trace import (
    Origin,
    asks_for_fp8,
    destinations,
    dotted,
    entering,
    gathers,
    label,
    layer_of,
    matching,
    origin,
    product_name,
    rotates,
    windowed,
)
from .traffic import is_launch, touched, traffic_of
from .verdict import Evidence, Written, indivisible, indivisible_sizes, judge, made_from, written_products


_SMALL = 10**6


def analyze(compiled: Compiled, device: CompilableDevice, known: Mapping[str, str] | None = None) -> Program:
    """Reads what a program does. `known` has reasons why layers stay in high precision, by path, as in `describe`."""
    module = parse_hlo(compiled.text)
    written = written_products(compiled.written) if compiled.written else {}
    reader = _Reader(module, written, compiled.outputs, device, known or {})
    products: list[Product] = []
    communicating: list[tuple[Site, str]] = []
    multiplying: list[Multiplying] = []
    opaque: list[Opaque] = []
    others, small = Traffic(), 0
    for launch in launches(entry_sites(module)):
        if not is_launch(launch):
            continue
        instruction, in_launch = launch.instruction, list(reader.products(launch))
        if in_launch:
            products += in_launch
            multiplying.append(Multiplying(launch, tuple(f"{p.layer or label(p.scope)} {p.name}" for p in in_launch)))
        elif (kind := instruction.opcode.removesuffix(START)) in COLLECTIVES:
            communicating.append((launch, kind))
        elif instruction.opcode == CUSTOM_CALL and instruction.call_kind is not Call.OTHER:
            dtypes = tuple(operand.instruction.shape.dtype for operand in launch.operands)
            opaque.append(Opaque(instruction.custom_call_name, dtypes, launch.executions, instruction.op_name))
        else:
            traffic = traffic_of(launch)
            others += traffic * launch.executions
            small += launch.executions * (traffic.bytes < _SMALL)
    gathered = {
        (gather.computation.name, gather.instruction.name, result)
        for one in multiplying
        for site in opened(one.launch)
        if dimensions(site) is not None
        for operand in site.operands[:2]
        for gather, result in (*gathers(operand), *windowed(operand))
    }
    collectives = [read_collective(site, kind, gathered, multiplying) for site, kind in communicating]
    return Program(
        products=tuple(products),
        others=OtherLaunches(others, small),
        collectives=tuple(collectives),
        opaque=tuple(opaque),
        elementwise=_elementwise(module, written, products),
        memory=compiled.memory,
        unknown_loops=sum(trip_count(loop) is None for loop in _sites(module, "while")),
        branches=len(_sites(module, "conditional")),
        seconds=compiled.seconds,
        text=compiled.text,
    )


def _elementwise(module: Module, written: Mapping[str, list[Written]], products: list[Product]) -> tuple[str, ...]:
    """The layers whose product has one row or one column, which XLA multiplies and adds up by elements."""
    compiled = {instruction.op_name for computation in module.computations.values() for instruction in computation}
    multiplied = {(product.scope, frozenset((product.m, product.n)), product.k) for product in products}
    layers: dict[str, None] = {}
    for scope, in_scope in written.items():
        for product in in_scope if scope in compiled and product_name(scope) in (FPROP, "forward") else ():
            m, n, k = product.size.m, product.size.n, product.size.k
            if 1 in (m, n) and (scope, frozenset((m, n)), k) not in multiplied:
                layers |= dict.fromkeys(map(layer_of, _weight(product.lhs, product.rhs, product).arguments))
    return tuple(layers)


def _sites(module: Module, opcode: str) -> list[Site]:
    return [Site(module, c, i) for c in module.computations.values() for i in c if i.opcode == opcode]


@dataclasses.dataclass(frozen=True)
class _Reader:
    """Finds products and determines how they run."""

    module: Module
    written: Mapping[str, list[Written]]
    outputs: tuple[str, ...]
    device: CompilableDevice
    known: Mapping[str, str]

    @functools.cached_property
    def arguments(self) -> tuple[str, ...]:
        """The names of the program's arguments."""
        return tuple(dotted(i.op_name or i.name) for i in self.module.entry.parameters)

    @functools.cached_property
    def weights(self) -> frozenset[str]:
        """The arguments that products of the forward pass multiply by."""
        arguments: set[str] = set()
        for launch in launches(entry_sites(self.module)):
            for site in opened(launch):
                scope = site.instruction.op_name or launch.instruction.op_name
                if product_name(scope) in (FPROP, "forward") and (size := dimensions(site)) is not None:
                    written = made_from(self.written, scope, size)
                    lhs, rhs = map(origin, _operands(site))
                    arguments.update(_weight(lhs, rhs, written).arguments)
        return frozenset(arguments)

    def products(self, launch: Site) -> Iterator[Product]:
        """The products that a launch computes."""
        if is_attention(launch):
            yield from attention_products(launch, self.device)
            return
        for site in opened(launch):
            if (size := dimensions(site)) is not None:
                yield self._product(launch, site, size)

    def _product(self, launch: Site, site: Site, size: Dimensions) -> Product:
        scope = site.instruction.op_name or launch.instruction.op_name
        written = made_from(self.written, scope, size)
        if written is not None:
            size = size.as_written(written.size)
        operands = _operands(site)
        lhs, rhs = map(origin, operands)
        weight = _weight(lhs, rhs, written)
        made = self._made(site, weight)
        name = product_name(scope)
        if asks_for_fp8(scope) and not rotates(scope) and name in ("forward", "backward"):
            # XLA drops the inner scopes of some products.
            name = FPROP if name == "forward" else WGRAD if made else DGRAD
        # The operands of wgrad are activations; one of them may be an argument.
        arguments = made if name in (WGRAD, "backward") and made else ()
        if not arguments and name != WGRAD:
            arguments = weight.arguments
        layer = " + ".join(dict.fromkeys(map(layer_of, arguments)))
        # The arrays from which a Triton kernel reads the operands.
        read = [entering(launch, operand) if launch.instruction.is_triton else None for operand in operands]
        evidence = Evidence(size, scope, layer, lhs, rhs, written, (read[0], read[1]))
        verdict, reason = judge(evidence, self.device, self.known)
        return Product(
            layer=layer,
            name=name,
            scope=scope,
            batch=size.batch,
            m=size.m,
            n=size.n,
            k=size.k,
            lhs=evidence.read[0],
            rhs=evidence.read[1],
            widened=evidence.widened,
            out=_stored_dtype(launch, size),
            compute=weight.dtype if arguments and arguments == weight.arguments else "",
            written=_widest(size if written is None else written.size),
            block_scaled=evidence.block_scaled,
            indivisible=indivisible(size),
            implementation=_implementation(launch, site),
            # If a grouped product became a dense one, each row is multiplied by the kernels of all groups.
            groups=1 if written is None or size.groups > 1 else written.size.groups,
            surplus=size.surplus,
            executions=site.executions,
            bytes=touched(launch),
            verdict=verdict,
            is_fp4=evidence.is_fp4,
            is_rotation=rotates(scope),
            reason=reason,
            makes_weight=bool(made) and name in (WGRAD, "backward"),
        )

    def _made(self, site: Site, weight: Origin) -> tuple[str, ...]:
        """The arguments whose gradients a product computes."""
        indices = list(destinations(site))
        if len(self.outputs) <= max(indices, default=0):
            return ()
        made = matching([self.outputs[i] for i in indices], self.arguments)
        if not made or not weight.arguments:
            return made
        # With one sequence, the gradient of an input may be, element by element, that of positions added to it. But a
        # product makes the gradients only of what a product multiplied by.
        weights = tuple(name for name in made if name in self.weights)
        return weights if weights or not self.weights.isdisjoint(weight.arguments) else made


def _operands(site: Site) -> tuple[Site, Site]:
    """The two operands of a product."""
    first, second = site.operands[:2] if site.instruction.grouped_tile is None else grouped_operands(site)
    return first, second


def _widest(size: Dimensions) -> str:
    """The element type of the wider operand."""
    return max((size.lhs, size.rhs), key=lambda shape: shape.bits).dtype


def _weight(lhs: Origin, rhs: Origin, written: Written | None) -> Origin:
    """The operand that is a weight: an argument; of two arguments, the one deeper in its tree."""
    origins = [lhs, rhs] if written is None else [lhs, rhs, written.lhs, written.rhs]
    return max(origins, key=lambda one: max((1 + name.count(".") for name in one.arguments), default=0))


def _stored_dtype(launch: Site, size: Dimensions) -> str:
    """The type of a product's result in memory: a fusion may cast it before writing it."""
    if launch.instruction.is_fusion:
        for shape in launch.results:
            if shape.size == size.out.size:
                return shape.dtype
    return size.out.dtype


def _implementation(launch: Site, site: Site) -> str:
    if site.instruction.grouped_tile is not None:
        return "grouped f8" if "f8" in grouped_operands(site)[0].instruction.shape.dtype else "grouped"
    if name := site.instruction.custom_call_name:
        return LIBRARIES.get(name, name)
    if launch is site:
        return site.instruction.opcode
    return f"{TRITON if launch.instruction.is_triton else 'fused'} {site.instruction.opcode}"


def is_attention(launch: Site) -> bool:
    """Whether a launch is a fused attention whose sizes are known."""
    call = launch.instruction
    return call.opcode == CUSTOM_CALL and call.call_kind is Call.ATTENTION and call.scores is not None


def attention_products(launch: Site, device: CompilableDevice) -> Iterator[Product]:
    """The products of a fused attention.

    Forward: scores and output. Backward: the scores again, and the gradients of weights, value, query and key.

    Args:
        launch: A launch for which `is_attention` holds.
        device: The device.
    """
    scores = launch.instruction.scores
    assert scores is not None
    query, key, value = (operand.instruction.shape for operand in launch.operands[:3])
    m, n, width, of_value = scores.queries, scores.keys, query.dims[-1], value.dims[-1]
    sizes = [(m, n, width), (m, of_value, n)]
    if scores.is_backward:
        # The gradients of weights, value, query and key; the output itself is not recomputed.
        sizes = [sizes[0], (m, n, of_value), (n, of_value, m), (m, width, n), (n, width, m)]
    dtypes = query.dtype, key.dtype
    narrow = all(map(is_narrow, dtypes))
    lacking = next((reason for dtype in dtypes if narrow and (reason := device.lacks(dtype)) is not None), None)
    verdict = Verdict.HIGH_PRECISION if not narrow else Verdict.EMULATED if lacking else Verdict.FP8
    reason = lacking or ("" if narrow else f"fused attention in {query.dtype}")
    scope = launch.instruction.op_name
    for m, n, k in sizes:
        yield Product(
            layer="",
            name=product_name(scope),
            scope=scope,
            batch=scores.batch,
            m=m,
            n=n,
            k=k,
            lhs=dtypes[0],
            rhs=dtypes[1],
            widened="",
            out=launch.results[0].dtype,
            compute="",
            written=query.dtype,
            block_scaled=False,
            indivisible=indivisible_sizes(m, n, k),
            implementation=CUDNN_ATTENTION,
            groups=1,
            surplus=1.0,
            executions=launch.executions,
            bytes=touched(launch) // len(sizes),
            verdict=verdict,
            reason=reason,
            in_attention=True,
            halved=scores.is_causal,
        )
