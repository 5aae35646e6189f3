"""The results of a preflight, their limits, and requirements on them."""

import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from typing import Any

from rich.console import RenderableType

from .._arguments import require_number
from .._printing import Printable
from ..devices import is_narrow
from ..devices.roofline import LEAST_GAIN, MOST_GAIN, WHOLE_STEP, Efficiency, Roofline
from ..devices.xla_flags import TRITON_PRODUCTS, XlaFlags
from ..scopes import DGRAD, WGRAD
from .devices import SCALES_INSIDE, CompilableDevice, CompilableGpu, LocalDevice
from .product import TRITON, Estimate, Product, Program, Verdict
from .render import Page, as_markdown, as_renderable, operations, size
from .rows import assumptions, every_product, layers, sent, totals
from .trace import label


class PreflightError(AssertionError):
    """A report does not meet its requirements."""


@dataclasses.dataclass(frozen=True, repr=False)
class PreflightReport(Printable):
    """What a step and a baseline compile to on a device.

    Print it, or call `to_json()` or `to_markdown()`. Figures are per device.

    Args:
        device: What was compiled for.
        mesh: The axes of the mesh and their sizes.
        step: The step.
        baseline: The program that it is compared with; None if there is none.
        flags: The flags that XLA got from the user.
        other: The step with the other setting of `xla_gpu_enable_triton_gemm`; None if not requested, or if it does not
            matter on the device.
        dropped: The options of a `TrainStep` that the step calls inside a `jit` of its own, which XLA does not get.
    """

    device: CompilableDevice
    mesh: dict[str, int]
    step: Program
    baseline: Program | None = None
    flags: XlaFlags = XlaFlags()
    other: Program | None = None
    dropped: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def products(self) -> tuple[Product, ...]:
        """Every matrix product of the step."""
        return self.step.products

    @property
    def has_fp8_product(self) -> bool:
        """Whether a product of the step runs in FP8 or FP4."""
        return any(product.is_fp8 for product in self.products)

    @property
    def fp8_share(self) -> float:
        """The share of the step's FLOPs that run in FP8 or FP4."""
        return self.step.fp8_share

    @property
    def estimate(self) -> Estimate | None:
        """The roofline estimate of the step's time; None where no peaks are known."""
        return self._estimate(self.step)

    @property
    def baseline_estimate(self) -> Estimate | None:
        """The baseline's estimate."""
        return self._estimate(self.baseline)

    @property
    def speedup(self) -> float | None:
        """The baseline's estimated time divided by the step's; None if no peaks are known, or if devices communicate.
        The program does not show how much of that overlaps with other work."""
        return self._speedup(WHOLE_STEP)

    @property
    def speedup_range(self) -> tuple[float, float] | None:
        """The least and the most of `speedup`, with the shares of peaks that were measured."""
        # Not the ends alone: leaving out the time of launches can lower the ratio.
        speedups = [self._speedup(efficiency) for efficiency in (LEAST_GAIN, WHOLE_STEP, MOST_GAIN)]
        known = [speedup for speedup in speedups if speedup is not None]
        return (min(known), max(known)) if known else None

    def _estimate(self, program: Program | None, efficiency: Efficiency = WHOLE_STEP) -> Estimate | None:
        if program is None or self.device.peaks is None:
            return None
        return program.estimate(Roofline(self.device.peaks, efficiency))

    def _speedup(self, efficiency: Efficiency) -> float | None:
        step, baseline = (self._estimate(program, efficiency) for program in (self.step, self.baseline))
        if step is None or baseline is None or self._collectives:
            return None
        return baseline.total / step.total

    @property
    def _collectives(self) -> bool:
        return any(program is not None and program.collectives for program in (self.step, self.baseline))

    @property
    def peak_memory_ratio(self) -> float | None:
        """The step's peak memory divided by the baseline's."""
        return None if self.baseline is None else self.step.memory.peak / self.baseline.memory.peak

    @property
    def findings(self) -> tuple[str, ...]:
        """What a reader should know about the step, worst first."""
        sentences = findings(self.step, self.baseline, self.device)
        if not self.dropped:
            return sentences
        lost = XlaFlags().with_options(self.dropped)
        remedy = "call it outside, or give that jit compiler_options=step.compiler_options(model)"
        return (f"a TrainStep inside another jit loses its option {lost}: {remedy}", *sentences)

    @property
    def caveats(self) -> tuple[str, ...]:
        """What the report does not know."""
        caveats = [] if self.device.peaks else ["no peaks are known, so no times are estimated"]
        is_here = isinstance(self.device, LocalDevice)
        if not is_here and any(product.implementation.startswith(TRITON) for product in self.step.products):
            caveats.append(
                "no GPU, so no autotuner: a product shown in Triton may run in cuBLASLt on the device, with the same "
                "operands, if XLA finds that faster"
            )
        if self.step.unknown_loops:
            caveats.append(f"{self.step.unknown_loops} loops of unknown length are counted as running once")
        if self.step.branches:
            caveats.append(f"all branches of {self.step.branches} conditionals are counted")
        for whose, program in (("", self.step), (" of the baseline", self.baseline)):
            if program is not None and program.opaque:
                names = ", ".join(sorted({call.name for call in program.opaque}))
                what = f"{len(program.opaque)} launches{whose}"
                caveats.append(f"{what} cannot be analyzed, and are not in the times: {names}")
        if any(product.in_attention for product in self.step.products):
            caveats.append(
                "whether cuDNN has a GPU kernel for each fused attention, and how much memory it needs, is known only "
                "on the device"
            )
        if self.step.memory.ignores_host:
            caveats.append(
                f"{size(self.step.memory.host)} of the arguments are in the host's memory, which the compiler's "
                f"description of {self.device.kind} does not have: XLA planned the step as if they were on the device, "
                "without the copies between the two, and counts a donated one as overwritten"
            )
        if self._collectives:
            caveats.append("the times do not include communication")
        return tuple(caveats)

    def require(
        self,
        *,
        fp8_flops: float | None = None,
        asked_flops: float | None = None,
        fp8_gathers: float | None = None,
        peak_memory_ratio: float | None = None,
        speedup: float | None = None,
    ) -> None:
        """Checks that the step meets requirements.

        Args:
            fp8_flops: The minimum share of FLOPs in FP8 or FP4. Rotations, which the recipe `nvfp4` adds, do not count.
            asked_flops: The same, with emulated products included: for tests on a CPU.
            fp8_gathers: The minimum share of the bytes gathered from other devices for operands of products, kernels
                among them, that is in FP8. A step that gathers none meets it.
            peak_memory_ratio: The maximum peak memory, as a multiple of the baseline's.
            speedup: The minimum estimated speedup over the baseline, taken in the middle of the range.

        Raises:
            PreflightError: If it does not; the message lists the products at fault.
            ValueError: If a requirement is not a finite number, or needs a baseline, an estimate or several devices,
                and the report lacks it.
        """
        shares = {"fp8_flops": fp8_flops, "asked_flops": asked_flops, "fp8_gathers": fp8_gathers}
        for name, bound in {**shares, "peak_memory_ratio": peak_memory_ratio, "speedup": speedup}.items():
            if bound is not None:  # NaN would be met by every step
                require_number(name, bound, "0.9", "require")
        failures = []
        for name, least, share in (
            ("fp8_flops", fp8_flops, self.fp8_share),
            ("asked_flops", asked_flops, self.step.share(Verdict.FP8, Verdict.EMULATED)),
        ):
            if least is not None and share < least:
                failures.append(f"{name}={least} is required, but {share:.4f} of the FLOPs run in FP8 or FP4:")
                wrong = [p for p in self.step.without_fp8 if name == "fp8_flops" or p.verdict is not Verdict.EMULATED]
                failures += [f"  {line}" for line in _lines(wrong)]
                if not self.step.flops:
                    failures.append("  the step contains no matrix products")
                    failures += [f"  {name} is computed element by element" for name in self.step.elementwise[:20]]
        if fp8_gathers is not None:
            failures += self._wide_gathers(fp8_gathers)
        for name, bound, value, sign in (
            ("peak_memory_ratio", peak_memory_ratio, self.peak_memory_ratio, 1),
            ("speedup", speedup, self.speedup, -1),
        ):
            if bound is None:
                continue
            if value is None:
                if self.baseline is not None and self._collectives:
                    raise ValueError(
                        f"{name}={bound} cannot be required of {math.prod(self.mesh.values())} devices: the times do "
                        "not include communication. Require fp8_flops, or compile the step for one device"
                    )
                if self.baseline is None:
                    raise ValueError(f"{name}={bound} needs a baseline; pass compare= to inspect_step")
                raise ValueError(
                    f"{name}={bound} needs peak rates, which are not known for {self.device.kind}; choose a device "
                    "that has them, such as h100"
                )
            if sign * value > sign * bound:
                failures.append(f"{name}={bound} is required, but it is {value:.3f}")
        if failures:
            raise PreflightError(
                "\n".join([f"the step does not meet its requirements on {self.device.kind}", *failures])
            )

    def _wide_gathers(self, least: float) -> list[str]:
        """What is gathered in more than FP8, if that is too much."""
        if math.prod(self.mesh.values()) == 1:
            raise ValueError(f"fp8_gathers={least} needs several devices; pass devices= or mesh= to inspect_step")
        share = self.step.fp8_gathers
        if share is None or share >= least:
            return []
        wide = [
            f"  {collective.kind} of {part.dtype}, {size(part.wire)} each time, {collective.executions} times, in "
            + (label(collective.scope) or collective.scope)
            for collective in self.step.collectives
            for part in collective.parts
            if part.feeds_product and not is_narrow(part.dtype)
        ]
        more = [f"  and {len(wide) - 20} more"] if len(wide) > 20 else []
        return [f"fp8_gathers={least} is required, but {share:.4f} of the bytes are in FP8:", *wide[:20], *more]

    @property
    def asked(self) -> tuple[Verdict, ...]:
        """The verdicts that count as FP8: on a device that emulates it, what was asked for."""
        return (Verdict.FP8, Verdict.EMULATED) if self.device.hardware.emulates else (Verdict.FP8,)

    def _page(self, *, in_full: bool) -> Page:
        devices = math.prod(self.mesh.values())
        where = self.device.kind if devices == 1 else f"{devices} × {self.device.kind}"
        is_emulated = Verdict.EMULATED in self.asked and self.step.share(*self.asked) > 0.0
        share = f"{self.step.words(*self.asked)} on {where}{', emulated' if is_emulated else ''}"
        if self.speedup is None or self.speedup_range is None:
            headline = share
        else:
            low, high = self.speedup_range
            speedup = f"{self.speedup:.2f}× as fast as the baseline (estimate, {low:.2f} to {high:.2f})"
            headline = f"{speedup}, {share}"
        first = first_line(self.flags, self.device, self.step, self.other)
        peaks, programs = self.device.peaks, [self.step] if self.baseline is None else [self.step, self.baseline]
        sections = [every_product(self.step) if in_full else layers(self.step), totals(programs, peaks, self.asked)]
        sections += [sent(self.step)] if self.step.collectives else []
        assumed = [assumptions(self.step, peaks)] if in_full and peaks is not None else []
        return Page(first, headline, sections, self.findings, [*self.caveats, *assumed])

    def to_json(self) -> str:
        """All of it, as JSON."""
        return json.dumps(_plain(self), indent=2, ensure_ascii=False)

    def to_markdown(self, *, in_full: bool = False) -> str:
        """The report for a pull request or a page.

        Args:
            in_full: Whether it has a line for every product, and what the estimate assumes, as `report.in_full` has.
        """
        return as_markdown(self._page(in_full=in_full))

    def __rich__(self) -> RenderableType:
        return as_renderable(self._page(in_full=False))

    @property
    def in_full(self) -> RenderableType:
        """The report with a line for every product, for `rich.print`, and what the estimate assumes; the report itself
        has a line per layer."""
        return as_renderable(self._page(in_full=True))


def _lines(products: list[Product]) -> list[str]:
    first, more = products[:20], len(products[20:])
    what = lambda p: f"{p.layer or p.scope} {p.name} {p.shape} {p.lhs}·{p.rhs} in {p.implementation}"
    lines = [f"{what(p)}: {p.reason}" for p in first]
    return [*lines, f"and {more} more"] if more else lines


def _plain(report: PreflightReport) -> dict[str, Any]:
    """The report's fields and values computed from them."""

    def with_properties(value: Any, *names: str) -> dict[str, Any]:
        return dataclasses.asdict(value) | {name: getattr(value, name) for name in names}

    def program_facts(program: Program | None, estimate: Estimate | None) -> dict[str, Any] | None:
        if program is None:
            return None
        fields = with_properties(program, "flops", "useful_flops", "fp8_share", "fp8_gathers")
        del fields["text"]  # Longer than all the rest.
        of_product, of_collective = ("format", "flops", "useful_flops"), ("wire", "sent", "reduces_gradients")
        by_format = program.by_format(*report.asked)
        return fields | {
            "products": [with_properties(p, *of_product) | {"verdict": p.verdict.value} for p in program.products],
            "collectives": [with_properties(collective, *of_collective) for collective in program.collectives],
            "others": with_properties(program.others, "count", "bytes"),
            "by_format": {name: dataclasses.asdict(one) for name, one in by_format.items()},
            "rotations": sum(product.executions for product in program.rotations),
            "estimate": estimate and with_properties(estimate, "total"),
        }

    device, figures = report.device, ("speedup", "speedup_range", "peak_memory_ratio", "findings", "caveats")
    return {
        "flags": first_line(report.flags, report.device, report.step, report.other),
        "xla_flags": dict(report.flags.values),
        "device": {
            "name": device.name,
            "kind": device.kind,
            "cudnn": device.cudnn if isinstance(device, CompilableGpu) else None,
            "peaks": device.peaks and dataclasses.asdict(device.peaks),
        },
        "mesh": report.mesh,
        "step": program_facts(report.step, report.estimate),
        "baseline": program_facts(report.baseline, report.baseline_estimate),
        **{name: getattr(report, name) for name in figures},
    }


CUBLASLT_FP8 = "cublasLt f8"
"""The only implementation for which XLA pads FP8 operands: Triton and TPUs read any size."""


def first_line(flags: XlaFlags, device: CompilableDevice, step: Program, other: Program | None) -> str:
    """The flags that the step was compiled with; for NVIDIA GPUs, also what changes with the other setting for Triton's
    products, if the step was compiled with that too, and the version of cuDNN, if XLA was told one."""
    line = f"XLA flags: {flags}"
    if device.hardware.platform != "cuda":
        return line
    cudnn = f"; cuDNN {device.cudnn}" if isinstance(device, CompilableGpu) else ""
    setting, opposite = (str(value).lower() for value in (flags.triton_products, not flags.triton_products))
    if TRITON_PRODUCTS not in flags.values:
        line += f" ({TRITON_PRODUCTS}={setting})"
    if other is None:
        return f"{line}; not compiled with {TRITON_PRODUCTS}={opposite}{cudnn}"
    return f"{line}; with {TRITON_PRODUCTS}={opposite}: {', '.join(_changes(device, step, other))}{cudnn}"


def _changes(device: CompilableDevice, step: Program, other: Program) -> list[str]:
    """What the other setting changes, as `there instead of here`."""
    shares = other.words(Verdict.FP8), step.words(Verdict.FP8)
    changes = [
        f"{shares[0]}{' too' if shares[0] == shares[1] else f' instead of {shares[1]}'}",
        f"{other.others.count} other launches instead of {step.others.count}",
    ]
    if device.peaks is not None:
        times = (1e3 * program.estimate(Roofline(device.peaks, WHOLE_STEP)).total for program in (other, step))
        changes.append("an estimated {:.3g} ms instead of {:.3g}".format(*times))
    here, there = (imprecise_sums(program, device) for program in (step, other))
    if here != there:
        changes.append(
            "dgrad and wgrad accumulate in full float32"
            if here
            else "dgrad and wgrad do not accumulate in full float32"
        )
    return changes


def findings(step: Program, baseline: Program | None, device: CompilableDevice) -> tuple[str, ...]:
    """One sentence for each thing that costs speed or precision, or makes the comparison mean less; worst first."""
    sentences = []
    by_reason: dict[tuple[Verdict, str], list[Product]] = {}
    for product in step.without_fp8:
        by_reason.setdefault((product.verdict, product.reason), []).append(product)
    for (verdict, reason), products in by_reason.items():
        share = sum(product.flops for product in products) / (step.flops or 1)
        how = "in high precision" if verdict is Verdict.HIGH_PRECISION else verdict.value
        sentences.append(f"{share:.1%} of the FLOPs are {how}: {reason}")
    if widened := _runs(step, lambda product: product.is_fp8 and bool(product.widened)):
        sentences.append(
            f"products that read FP8 and widen it inside their Triton kernel: {widened}; on the device XLA times it "
            "against cuBLASLt's FP8 product and uses the faster one"
        )
    in_fp4 = _runs(step, lambda product: product.is_fp8 and product.format == "FP4")
    if in_fp4 and isinstance(device, CompilableGpu) and not device.scales_inside:
        newer = ".".join(map(str, SCALES_INSIDE))
        sentences.append(
            f"cuDNN {device.cudnn} leaves the scales of tensors to XLA, in two launches after each of {in_fp4} FP4 "
            f"products: install {newer} or newer"
        )
    if partial := imprecise_sums(step, device):
        sentences.append(
            f"dgrad and wgrad products in Triton, which does not accumulate FP8 in full float32 on Hopper: {partial}; "
            f"with {TRITON_PRODUCTS}=false cuBLASLt does"
        )
    if grouped := [product for product in step.products if product.groups > 1]:
        executed, useful = sum(p.flops for p in grouped), sum(p.useful_flops for p in grouped)
        sentences.append(
            f"grouped products compute {operations(executed)}, of which {operations(useful)} are useful: XLA "
            "multiplies every row by the kernels of all groups, and keeps one"
        )
    is_padded = lambda p: p.is_fp8 and bool(p.indivisible) and p.implementation == CUBLASLT_FP8
    if padded := list(filter(is_padded, step.products)):
        sizes = sorted(set(", ".join(product.indivisible for product in padded).split(", ")))
        count = sum(product.executions for product in padded)
        sentences.append(f"{count} FP8 products are padded, because sizes are not multiples of 16: {', '.join(sizes)}")
    if step.elementwise:
        names, more = step.elementwise[:10], len(step.elementwise[10:])
        sentences.append(
            "XLA computes products with a single row or column element by element, not in FP8, and no figure here "
            f"counts them: {', '.join(names)}{f' and {more} more' if more else ''}"
        )
    if wide := _runs(step, lambda product: product.compute == "f32"):
        # XLA may leave out a cast to bfloat16 that is followed by the quantization, so the model may have one.
        what = "1 product quantizes" if wide == 1 else f"{wide} products quantize"
        sentences.append(
            f"{what} weights from float32: unless the loss casts the model to bfloat16, it computes in float32; "
            "cast_params(model, jnp.bfloat16) casts it"
        )
    in_float32 = sum(product.flops for product in baseline.products if product.written == "f32") if baseline else 0
    if baseline is not None and 2 * in_float32 > baseline.flops:
        sentences.append("the baseline computes in float32: compare with bf16, which is also faster without FP8")
    for name, program in {"step": step, "baseline": baseline}.items():
        if (
            program is not None
            and device.peaks
            and program.estimate(Roofline(device.peaks, WHOLE_STEP)).is_launch_bound
        ):
            runs = program.others.count + _runs(program, lambda product: True)
            sentences.append(
                f"the {name} is launch-bound: the overhead of its {runs} launches takes longer than all their work "
                f"({program.others.small} move less than 1 MB)"
            )
    if baseline is not None and (step.collectives or baseline.collectives):
        sentences.append(
            "no speedup is estimated: the times do not include communication between devices, an unknown part of "
            "which overlaps with other work"
        )
    return tuple(sentences)


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
