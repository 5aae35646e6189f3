"""The first line of a report: which flags the step was compiled with, and what the other setting changes."""

from ...devices.roofline import Roofline
from ...devices.xla_flags import TRITON_PRODUCTS, XlaFlags
from ..target.target import Target
from ..verdict.program import Program
from .findings import imprecise_sums


def first_line(flags: XlaFlags, target: Target, step: Program, other: Program | None) -> str:
    """The flags that the step was compiled with; for NVIDIA GPUs, also the effect of the other setting for Triton's
    products.

    Args:
        flags: The user's.
        target: What the step was compiled for.
        step: The step.
        other: The step with the other setting of `xla_gpu_enable_triton_gemm`; None if it was not compiled.
    """
    line = f"XLA flags: {flags}"
    if target.device.platform != "cuda":
        return line
    setting, opposite = (str(value).lower() for value in (flags.triton_products, not flags.triton_products))
    if TRITON_PRODUCTS not in flags.values:
        line += f" ({TRITON_PRODUCTS}={setting})"
    if other is None:
        return f"{line}; not compiled with {TRITON_PRODUCTS}={opposite}"
    return f"{line}; with {TRITON_PRODUCTS}={opposite}: {', '.join(_changes(target, step, other))}"


def _changes(target: Target, step: Program, other: Program) -> list[str]:
    """What the other setting changes, as `there instead of here`."""
    shares = f"{other.fp8_share:.1%}", f"{step.fp8_share:.1%}"
    found = [
        f"{shares[0]} of the FLOPs in FP8{' as well' if shares[0] == shares[1] else f' instead of {shares[1]}'}",
        f"{other.others.count} other kernels instead of {step.others.count}",
    ]
    if target.peaks is not None:
        times = (1e3 * program.estimate(Roofline(target.peaks)).total for program in (other, step))
        found.append("an estimated {:.3g} ms instead of {:.3g}".format(*times))
    here, there = (imprecise_sums(program, target) for program in (step, other))
    if here != there:
        found.append("dgrad and wgrad accumulate in full" if here else "dgrad and wgrad do not accumulate in full")
    return found
