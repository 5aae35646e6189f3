"""What a report says in sentences: which flags the step was compiled with, and what a reader should know of it."""

from collections.abc import Callable

from ..._product.names import DGRAD, WGRAD
from ...devices.roofline import Roofline
from ...devices.xla_flags import TRITON_PRODUCTS, XlaFlags
from ..compilable.device import CompilableDevice
from ..verdict.product import TRITON, Product, Verdict
from ..verdict.program import Program
from .units import operations


CUBLASLT_FP8 = "cublasLt f8"
"""The only implementation for which XLA pads FP8 operands: Triton and TPUs read any size."""


def first_line(flags: XlaFlags, device: CompilableDevice, step: Program, other: Program | None) -> str:
    """The flags that the step was compiled with; for NVIDIA GPUs, also what changes with the other setting for Triton's
    products, if the step was compiled with that too."""
    line = f"XLA flags: {flags}"
    if device.hardware.platform != "cuda":
        return line
    setting, opposite = (str(value).lower() for value in (flags.triton_products, not flags.triton_products))
    if TRITON_PRODUCTS not in flags.values:
        line += f" ({TRITON_PRODUCTS}={setting})"
    if other is None:
        return f"{line}; not compiled with {TRITON_PRODUCTS}={opposite}"
    return f"{line}; with {TRITON_PRODUCTS}={opposite}: {', '.join(_changes(device, step, other))}"


def _changes(device: CompilableDevice, step: Program, other: Program) -> list[str]:
    """What the other setting changes, as `there instead of here`."""
    shares = f"{other.fp8_share:.1%}", f"{step.fp8_share:.1%}"
    found = [
        f"{shares[0]} of the FLOPs in FP8{' too' if shares[0] == shares[1] else f' instead of {shares[1]}'}",
        f"{other.others.count} other launches instead of {step.others.count}",
    ]
    if device.peaks is not None:
        times = (1e3 * program.estimate(Roofline(device.peaks)).total for program in (other, step))
        found.append("an estimated {:.3g} ms instead of {:.3g}".format(*times))
    here, there = (imprecise_sums(program, device) for program in (step, other))
    if here != there:
        found.append(
            "dgrad and wgrad accumulate in full float32"
            if here
            else "dgrad and wgrad do not accumulate in full float32"
        )
    return found


def findings(step: Program, baseline: Program | None, device: CompilableDevice) -> tuple[str, ...]:
    """One sentence for each thing that costs speed or precision, or makes the comparison mean less; worst first."""
    found = []
    by_reason: dict[tuple[Verdict, str], list[Product]] = {}
    for product in step.without_fp8:
        by_reason.setdefault((product.verdict, product.reason), []).append(product)
    for (verdict, reason), products in by_reason.items():
        share = sum(product.flops for product in products) / (step.flops or 1)
        how = "in high precision" if verdict is Verdict.HIGH_PRECISION else verdict.value
        found.append(f"{share:.1%} of the FLOPs are {how}: {reason}")
    if widened := _runs(step, lambda product: product.is_fp8 and bool(product.widened)):
        found.append(
            f"products that read FP8 and widen it inside their Triton kernel: {widened}; on the device XLA times it "
            "against cuBLASLt's FP8 product and uses the faster one"
        )
    if partial := imprecise_sums(step, device):
        found.append(
            f"dgrad and wgrad products in Triton, which does not accumulate FP8 in full float32 on Hopper: {partial}; "
            f"with {TRITON_PRODUCTS}=false cuBLASLt does"
        )
    if grouped := [product for product in step.products if product.groups > 1]:
        executed, useful = sum(p.flops for p in grouped), sum(p.useful_flops for p in grouped)
        found.append(
            f"grouped products compute {operations(executed)}, of which {operations(useful)} are useful: XLA "
            "multiplies every row by the kernels of all groups, and keeps one"
        )
    is_padded = lambda p: p.is_fp8 and bool(p.indivisible) and p.implementation == CUBLASLT_FP8
    if padded := list(filter(is_padded, step.products)):
        sizes = sorted(set(", ".join(product.indivisible for product in padded).split(", ")))
        count = sum(product.executions for product in padded)
        found.append(f"{count} FP8 products are padded, because sizes are not multiples of 16: {', '.join(sizes)}")
    if step.elementwise:
        names, more = step.elementwise[:10], len(step.elementwise[10:])
        found.append(
            "XLA computes products with a single row or column element by element, not in FP8, and no figure here "
            f"counts them: {', '.join(names)}{f' and {more} more' if more else ''}"
        )
    if wide := _runs(step, lambda product: product.compute == "f32"):
        # XLA may leave out a cast to bfloat16 that is followed by the quantization, so the model may have one.
        what = "1 product quantizes" if wide == 1 else f"{wide} products quantize"
        found.append(
            f"{what} weights from float32: unless the loss casts the model to bfloat16, it computes in float32; "
            "cast_params(model, jnp.bfloat16) casts it"
        )
    in_float32 = sum(product.flops for product in baseline.products if product.written == "f32") if baseline else 0
    if baseline is not None and 2 * in_float32 > baseline.flops:
        found.append("the baseline computes in float32: compare with bf16, which is also faster without FP8")
    for name, program in {"step": step, "baseline": baseline}.items():
        if program is not None and device.peaks and program.estimate(Roofline(device.peaks)).is_launch_bound:
            runs = program.others.count + _runs(program, lambda product: True)
            found.append(
                f"the {name} is launch-bound: the overhead of its {runs} launches takes longer than all their work "
                f"({program.others.small} move less than 1 MB)"
            )
    if baseline is not None and (step.collectives or baseline.collectives):
        found.append(
            "no speedup is estimated: the times do not include communication between devices, an unknown part of "
            "which overlaps with other work"
        )
    return tuple(found)


def imprecise_sums(step: Program, device: CompilableDevice) -> int:
    """How many dgrad and wgrad products do not promote their FP8 sums to float32.

    Triton's, on Hopper, at any precision: the tensor cores keep some 14 bits of a sum, and Triton leaves it to them.
    """
    if not device.hardware.is_hopper:
        return 0
    in_triton = lambda p: p.is_fp8 and not p.widened and p.implementation.startswith(TRITON)
    return _runs(step, lambda product: product.name in (DGRAD, WGRAD) and in_triton(product))


def _runs(program: Program, condition: Callable[[Product], bool]) -> int:
    return sum(product.executions for product in program.products if condition(product))
