"""What a preflight found, with what it did not look at, and what it can be held to."""

import dataclasses
import json
import math
from typing import Any

from rich.console import Console, RenderableType

from ._product import Product, Verdict
from ._program import Estimate, Program
from ._render import Page, as_markdown, as_renderable
from ._target import Target


class PreflightError(AssertionError):
    """A report does not meet what was required of it."""


@dataclasses.dataclass(frozen=True)
class PreflightReport:
    """What a step compiles to on a target, and what a baseline does.

    Print it, or ask for `to_json()` or `to_markdown()`. Figures are those of one device.

    Args:
        target: What was compiled for.
        mesh: The axes of the mesh and their sizes.
        step: The step.
        baseline: The program that it is compared with; None if there is none.
    """

    target: Target
    mesh: dict[str, int]
    step: Program
    baseline: Program | None = None

    @property
    def products(self) -> tuple[Product, ...]:
        """Every matrix product of the step."""
        return self.step.products

    @property
    def fp8_share(self) -> float:
        """The share of the step's FLOPs that run in FP8."""
        return self.step.fp8_share

    @property
    def estimate(self) -> Estimate | None:
        """The roofline estimate of the step's time; None where no peaks are known."""
        return self.step.estimate(self.target.peaks) if self.target.peaks else None

    @property
    def baseline_estimate(self) -> Estimate | None:
        """The same of the baseline."""
        if self.baseline is None or self.target.peaks is None:
            return None
        return self.baseline.estimate(self.target.peaks)

    @property
    def speedup(self) -> float | None:
        """The baseline's estimated time divided by the step's."""
        if self.estimate is None or self.baseline_estimate is None:
            return None
        return self.baseline_estimate.total / self.estimate.total

    @property
    def peak_memory_ratio(self) -> float | None:
        """The step's peak memory divided by the baseline's."""
        if self.baseline is None:
            return None
        return self.step.memory.peak / self.baseline.memory.peak

    @property
    def findings(self) -> tuple[str, ...]:
        """What a reader should know of the step, worst first."""
        found = []
        by_reason: dict[tuple[Verdict, str], list[Product]] = {}
        for product in self.step.without_fp8:
            by_reason.setdefault((product.verdict, product.reason), []).append(product)
        for (verdict, reason), products in by_reason.items():
            share = sum(product.flops for product in products) / (self.step.flops or 1)
            found.append(f"{share:.1%} of the FLOPs {verdict.value}: {reason}")
        padded = [product for product in self.products if product.is_fp8 and product.indivisible]
        if padded:
            sizes = sorted(set(", ".join(product.indivisible for product in padded).split(", ")))
            count = sum(product.executions for product in padded)
            found.append(f"{count} FP8 products are padded, as sizes are no multiples of 16: {', '.join(sizes)}")
        wide = sum(product.executions for product in self.products if product.compute == "f32")
        if wide:
            found.append(
                f"{wide} products take weights in float32, as the model computes in float32: cast it to bfloat16"
            )
        return tuple(found)

    @property
    def caveats(self) -> tuple[str, ...]:
        """What the report does not know."""
        found = list(self.target.caveats)
        if self.step.unknown_loops:
            found.append(f"{self.step.unknown_loops} loops of unknown length are counted as one run")
        if self.step.branches:
            found.append(f"all branches of {self.step.branches} conditionals are counted")
        if self.step.opaque:
            names = sorted({kernel.target for kernel in self.step.opaque})
            found.append(f"{len(self.step.opaque)} kernels cannot be looked into: {', '.join(names)}")
        if self.step.collectives:
            found.append("communication is not part of the times")
        return tuple(found)

    def require(
        self,
        *,
        fp8_flops: float | None = None,
        asked_flops: float | None = None,
        peak_memory_ratio: float | None = None,
        speedup: float | None = None,
    ) -> None:
        """Holds the step to what it shall reach.

        Args:
            fp8_flops: The least share of FLOPs in FP8.
            asked_flops: The least share of FLOPs in FP8, emulated ones counted: for tests on a CPU.
            peak_memory_ratio: The most peak memory, as a multiple of the baseline's.
            speedup: The least estimated speedup over the baseline.

        Raises:
            PreflightError: If it does not; with the products that are the reason.
            ValueError: If there is no baseline, or no estimate, for what is required.
        """
        failures = []
        for name, least, share in (
            ("fp8_flops", fp8_flops, self.fp8_share),
            ("asked_flops", asked_flops, self.step.share(Verdict.FP8, Verdict.EMULATED)),
        ):
            if least is not None and share < least:
                failures.append(f"{name}={least} is required, but {share:.4f} of the FLOPs run in FP8:")
                wrong = [p for p in self.step.without_fp8 if name == "fp8_flops" or p.verdict is not Verdict.EMULATED]
                failures += [f"  {line}" for line in _lines(wrong)]
        for name, bound, value, sign in (
            ("peak_memory_ratio", peak_memory_ratio, self.peak_memory_ratio, 1),
            ("speedup", speedup, self.speedup, -1),
        ):
            if bound is None:
                continue
            if value is None:
                raise ValueError(f"{name}={bound} needs a baseline and known peaks; pass compare= to preflight")
            if sign * value > sign * bound:
                failures.append(f"{name}={bound} is required, but it is {value:.3f}")
        if failures:
            raise PreflightError(
                "\n".join([f"the step does not meet its requirements on {self.target.kind}", *failures])
            )

    @property
    def _page(self) -> Page:
        devices = math.prod(self.mesh.values())
        where = self.target.kind if devices == 1 else f"{devices} × {self.target.kind}"
        headline = f"{self.fp8_share:.1%} of the FLOPs in FP8 on {where}"
        return Page(headline, self.step, self.baseline, self.target.peaks, self.findings, self.caveats)

    def to_json(self) -> str:
        """All of it, as JSON."""
        return json.dumps(_plain(self), indent=2, ensure_ascii=False)

    def to_markdown(self) -> str:
        """The report for a pull request or a page."""
        return as_markdown(self._page)

    def __rich__(self) -> RenderableType:
        return as_renderable(self._page)

    def __str__(self) -> str:
        console = Console(width=140, color_system=None)
        with console.capture() as capture:
            console.print(self)
        return "\n".join(line.rstrip() for line in capture.get().splitlines())


def _lines(products: list[Product]) -> list[str]:
    return [
        f"{p.layer or p.scope} {p.role} {p.shape} {p.lhs}·{p.rhs} in {p.kernel}: {p.reason}" for p in products[:20]
    ] + ([f"and {len(products) - 20} more"] if len(products) > 20 else [])


def _plain(report: PreflightReport) -> dict[str, Any]:
    """The report's fields and what is computed from them."""

    def program(found: Program | None, estimate: Estimate | None) -> dict[str, Any] | None:
        if found is None:
            return None
        fields = dataclasses.asdict(found)
        fields["products"] = [
            {**dataclasses.asdict(p), "verdict": p.verdict.value, "flops": p.flops} for p in found.products
        ]
        totals = {"flops": found.flops, "fp8_share": found.fp8_share}
        return {**totals, **fields, "estimate": estimate and {**dataclasses.asdict(estimate), "total": estimate.total}}

    return {
        "target": {
            "name": report.target.name,
            "kind": report.target.kind,
            "peaks": report.target.peaks and dataclasses.asdict(report.target.peaks),
        },
        "mesh": report.mesh,
        "step": program(report.step, report.estimate),
        "baseline": program(report.baseline, report.baseline_estimate),
        "speedup": report.speedup,
        "peak_memory_ratio": report.peak_memory_ratio,
        "findings": report.findings,
        "caveats": report.caveats,
    }
