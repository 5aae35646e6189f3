"""What a reader should know of a compiled step: found in the program, worst first."""

from collections.abc import Callable

from ...devices.xla_flags import TRITON_PRODUCTS
from ..target.target import Target
from ..verdict.product import Product, Verdict
from ..verdict.program import Program


def findings(step: Program, baseline: Program | None, target: Target) -> tuple[str, ...]:
    """One sentence for each thing that costs speed or precision, or makes the comparison mean less.

    Args:
        step: The step.
        baseline: What it is compared with.
        target: What both were compiled for.
    """
    found = []
    by_reason: dict[tuple[Verdict, str], list[Product]] = {}
    for product in step.without_fp8:
        by_reason.setdefault((product.verdict, product.reason), []).append(product)
    for (verdict, reason), products in by_reason.items():
        share = sum(product.flops for product in products) / (step.flops or 1)
        found.append(f"{share:.1%} of the FLOPs {verdict.value}: {reason}")
    if widened := _runs(step, lambda product: product.is_fp8 and bool(product.widened)):
        found.append(
            f"products that read FP8 and widen it inside Triton's kernel: {widened}; on the device XLA times that "
            "kernel against cuBLASLt's FP8 product and uses the faster one"
        )
    if partial := imprecise_sums(step, target):
        found.append(
            f"dgrad and wgrad products in Triton, which does not accumulate FP8 in full float32 on Hopper: {partial}; "
            f"with {TRITON_PRODUCTS}=false cuBLASLt does"
        )
    grouped = [product for product in step.products if product.groups > 1]
    if grouped:
        executed, useful = sum(p.flops for p in grouped), sum(p.useful_flops for p in grouped)
        found.append(
            f"grouped products compute {executed:.4g} FLOPs, of which {useful:.4g} are useful: XLA multiplies every "
            "row by the kernels of all groups, and keeps one"
        )
    padded = [product for product in step.products if product.is_fp8 and product.indivisible]
    if padded:
        sizes = sorted(set(", ".join(product.indivisible for product in padded).split(", ")))
        count = sum(product.executions for product in padded)
        found.append(f"{count} FP8 products are padded, because sizes are not multiples of 16: {', '.join(sizes)}")
    if wide := _runs(step, lambda product: product.compute == "f32"):
        found.append(f"{wide} products take weights in float32, as the model computes in float32: cast it to bfloat16")
    if baseline is not None and _share_in_float32(baseline) > 0.5:
        found.append("the baseline computes in float32: compare with bf16, which is also faster without FP8")
    return tuple(found)


def launch_bound(program: Program, name: str) -> str:
    """The finding about a program that spends most of its time launching kernels.

    Args:
        program: The program.
        name: What to call it: `step` or `baseline`.
    """
    runs = program.others.count + sum(product.executions for product in program.products)
    return (
        f"the {name} is launch-bound: starting its {runs} kernels takes longer than all the work in them "
        f"({program.others.small} move less than 1 MB)"
    )


def imprecise_sums(step: Program, target: Target) -> int:
    """How many dgrad and wgrad products run in kernels that do not promote their FP8 sums to float32.

    Triton's, on Hopper, at any precision: the tensor cores keep some 14 bits of a sum, and Triton leaves it to them.

    Args:
        step: The program.
        target: What it was compiled for.
    """
    if not target.device.compute_capability.startswith("9."):
        return 0
    in_triton = lambda p: p.is_fp8 and not p.widened and p.kernel.startswith("Triton")
    return _runs(step, lambda product: product.role in ("dgrad", "wgrad") and in_triton(product))


def _runs(program: Program, condition: Callable[[Product], bool]) -> int:
    return sum(product.executions for product in program.products if condition(product))


def _share_in_float32(program: Program) -> float:
    return sum(product.flops for product in program.products if product.written == "f32") / (program.flops or 1)
