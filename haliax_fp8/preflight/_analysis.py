"""From the text of a compiled program to what it does."""

from collections.abc import Iterator, Mapping

from ._dimensions import dimensions
from ._hlo import parse_hlo
from ._origin import Origin, origin
from ._product import Product
from ._program import Collective, Kernels, Memory, Opaque, Program
from ._reason import Evidence, judge
from ._source import layer_of, role
from ._target import Target
from ._traffic import is_kernel, touched
from ._walk import Site, entry_sites, has_unknown_trip_count, kernels, opened


COLLECTIVES = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
    "collective-broadcast",
    "ragged-all-to-all",
)
# Custom calls that say nothing of what they compute.
_OPAQUE = ("__gpu$xla.gpu.triton", "tpu_custom_call", "mosaic_gpu", "__cudnn$fmha", "triton_kernel_call")


def analyze(
    text: str, memory: Memory, target: Target, known: Mapping[str, str] | None = None, seconds: float = 0.0
) -> Program:
    """Reads what a compiled program does.

    Args:
        text: What `compiled.as_text()` returns.
        memory: What it needs.
        target: What it was compiled for.
        known: Reasons why layers stay in high precision, by their paths, as `describe` knows them.
        seconds: How long compiling took.

    Returns:
        The program's products, kernels and collectives.
    """
    module = parse_hlo(text)
    products: list[Product] = []
    collectives: list[Collective] = []
    opaque: list[Opaque] = []
    count = moved = 0
    for kernel in kernels(entry_sites(module)):
        if not is_kernel(kernel):
            continue
        found = list(_products(kernel, target, known or {}))
        if found:
            products += found
        elif (kind := kernel.instruction.opcode.removesuffix("-start")) in COLLECTIVES:
            collectives.append(_collective(kernel, kind))
        elif _is_opaque(kernel):
            operands = tuple(operand.instruction.shape.dtype for operand in kernel.operands)
            name = kernel.instruction.attribute("custom_call_target")
            opaque.append(Opaque(name, operands, kernel.executions, kernel.instruction.op_name))
        else:
            count += kernel.executions
            moved += kernel.executions * touched(kernel)
    instructions = [instruction for computation in module.computations.values() for instruction in computation]
    return Program(
        products=tuple(products),
        others=Kernels(count, moved),
        collectives=tuple(collectives),
        opaque=tuple(opaque),
        memory=memory,
        unknown_loops=sum(map(has_unknown_trip_count, instructions)),
        branches=sum(instruction.opcode == "conditional" for instruction in instructions),
        seconds=seconds,
    )


def _products(kernel: Site, target: Target, known: Mapping[str, str]) -> Iterator[Product]:
    for site in opened(kernel):
        size = dimensions(site)
        if size is None:
            continue
        scope = site.instruction.op_name or kernel.instruction.op_name
        lhs, rhs = (origin(operand) for operand in site.operands[:2])
        layer = _layer(lhs, rhs)
        verdict, reason = judge(Evidence(size, scope, layer, lhs, rhs), target, known)
        yield Product(
            layer=layer,
            role=role(scope),
            scope=scope,
            batch=size.batch,
            m=size.m,
            n=size.n,
            k=size.k,
            lhs=size.lhs.dtype,
            rhs=size.rhs.dtype,
            out=size.out.dtype,
            kernel=_kernel_name(kernel, site),
            executions=site.executions,
            bytes=touched(kernel),
            verdict=verdict,
            reason=reason,
        )


def _layer(lhs: Origin, rhs: Origin) -> str:
    """The layer whose weight is one of the operands: of two arguments, the one that is deeper in its tree."""
    arguments = [found.argument for found in (lhs, rhs) if found.argument]
    return layer_of(max(arguments, key=lambda path: path.count("."))) if arguments else ""


_LIBRARY_NAMES = {
    "__cublas$lt$matmul$f8": "cublasLt f8",
    "__cublas$lt$matmul$mx": "cublasLt mx",
    "__cublas$lt$matmul": "cublasLt",
    "__cublas$gemm": "cublas",
    "__cudnn$blockScaledDot": "cuDNN block scaled",
    "__onednn$matmul": "oneDNN",
}


def _kernel_name(kernel: Site, site: Site) -> str:
    instruction = site.instruction
    if instruction.opcode == "custom-call":
        name = instruction.attribute("custom_call_target")
        return _LIBRARY_NAMES.get(name, name)
    if kernel is site:
        return instruction.opcode
    kind = kernel.instruction.config.get("fusion_backend_config", {}).get("kind", "")
    if "triton" in kind:
        return f"Triton {instruction.opcode}"
    return f"fused {instruction.opcode}"


def _is_opaque(kernel: Site) -> bool:
    return kernel.instruction.attribute("custom_call_target").startswith(_OPAQUE)


def _collective(kernel: Site, kind: str) -> Collective:
    operands = [operand.instruction.shape for operand in kernel.operands]
    given = sum(shape.bytes for shape in operands)
    result = kernel.instruction.shape
    if kernel.instruction.opcode.endswith("-start") and result.dtype == "tuple" and kind != "all-reduce":
        result = result.elements[1]
    dtype = max(operands, key=lambda shape: shape.bytes).dtype if operands else result.dtype
    return Collective(kind, dtype, max(given, result.bytes), kernel.executions, kernel.instruction.op_name)
