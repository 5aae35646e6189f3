"""Claim: what a step of Muon costs beside one of AdamW, with experts, on eight devices and with moments in FP8.

    uv run benchmarks/muon_costs_beside_adamw.py [--device h100] [--row TEXT ...] [--markdown] [--json FILE]

Blocks of published models, checkpointed in a scan, with cuDNN's attention and the head in bf16, compiled for a GPU that
need not be here. Launches, bytes and memory are those of XLA's program, with Triton off; the time is an estimate.
Nothing runs.
"""

import argparse
import dataclasses
from collections.abc import Callable
from typing import Any

import optax
from lib import output
from rich.progress import Progress

from haliax_fp8._cli.demo import demo_by_name, demo_config, demo_step
from haliax_fp8.preflight import inspect_step
from haliax_fp8.training import muon_dimensions, quantized_state


LAYERS, TOKENS, LENGTH = 4, 16384, 2048


def muon(model: Any) -> optax.GradientTransformation:
    """Muon for the weights of linear layers, and AdamW for the rest."""
    dimensions = muon_dimensions(model)
    return optax.contrib.muon(1e-4, muon_weight_dimension_numbers=lambda _: dimensions)


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "AdamW": lambda model: optax.adamw(1e-4),
    "AdamW, moments in FP8": lambda model: quantized_state(optax.adamw(1e-4)),
    "Muon": muon,
    "Muon, moments in FP8": lambda model: quantized_state(muon(model)),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """A step that is compiled.

    Args:
        demo: The model whose blocks it trains.
        products: "bf16", or the name of a recipe.
        optimizer: A key of `OPTIMIZERS`.
        devices: How many devices divide the batch and the weights (FSDP).
    """

    demo: str
    products: str
    optimizer: str
    devices: int = 1

    @property
    def row(self) -> str:
        """Its name."""
        where = f", {self.devices} devices" if self.devices > 1 else ""
        return f"{self.demo}{where}: {self.products}, {self.optimizer}"


CASES = [
    *(Case("llama-8b", products, name) for products in ("bf16", "delayed") for name in OPTIMIZERS if "FP8" not in name),
    *(Case("llama-8b", "delayed", name) for name in OPTIMIZERS if "FP8" in name),
    *(Case("llama-8b", "delayed", name, devices=8) for name in OPTIMIZERS if "FP8" not in name),
    *(Case("mixtral-8x7b", "delayed", name) for name in OPTIMIZERS if "FP8" not in name),
]

COLUMNS: dict[str, Callable[[Any], str]] = {
    "step": lambda row: row["row"],
    "products": lambda row: f"{row['products']:,}",
    "other launches": lambda row: f"{row['others']:,}",
    "other GB": lambda row: f"{row['gigabytes']:.1f}",
    "sent, GB": lambda row: f"{row['sent']:.2f}",
    "peak, GB": lambda row: f"{row['peak']:.1f}",
    "estimate, ms": lambda row: f"{row['milliseconds']:.0f}",
}


def figures(case: Case, device: str) -> dict[str, Any]:
    """What the compiled program does."""
    demo = demo_by_name(case.demo)
    step, args = demo_step(
        demo,
        layers=LAYERS if case.demo == "llama-8b" else 1,
        tokens=TOKENS * case.devices,
        length=LENGTH,
        stacking="checkpointed",
        config=None if case.products == "bf16" else demo_config(demo, case.products, ()),
        devices=case.devices,
        fused_attention=True,
        optimizer=OPTIMIZERS[case.optimizer],
    )
    flags = {"xla_gpu_enable_triton_gemm": False}
    report = inspect_step(step, *args, device=device, mesh={"devices": case.devices}, compiler_options=flags)
    program, estimate = report.step, report.estimate
    assert estimate is not None, f"nothing is known of how fast {device} is"
    return {
        "row": case.row,
        "products": sum(product.executions for product in program.products),
        "others": program.others.count,
        "gigabytes": program.others.bytes / 1e9,
        "sent": sum(x.sent for x in program.collectives) / 1e9,
        "peak": program.memory.peak / 1e9,
        "milliseconds": estimate.total * 1e3,
    }


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", default="h100", help="the GPU to compile for; default: %(default)s")
    parser.add_argument("--row", action="append", help="only rows that hold this text")
    output.add_arguments(parser)
    options = parser.parse_args()
    chosen = [case for case in CASES if any(text in case.row for text in options.row or [""])]
    rows = []
    with Progress(transient=True) as progress:
        for case in progress.track(chosen, description="compiling"):
            rows.append(figures(case, options.device))
    output.finish(f"A training step, compiled for {options.device}", COLUMNS, rows, options)


if __name__ == "__main__":
    main()
