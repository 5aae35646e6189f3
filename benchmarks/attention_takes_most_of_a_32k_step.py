"""Claim: at 32k tokens, attention takes most of a training step whose linear layers are in FP8.

    JAX_PLATFORMS=cpu uv run benchmarks/attention_takes_most_of_a_32k_step.py [--json FILE] [--markdown] [--device h100]

Where the time of a whole training step of Llama-8B goes: one sequence of 2k, 8k or 32k tokens on each of eight H100s
(FSDP), AdamW, float32 master weights, in bf16 and with FP8 linear layers (the head too). Steps with one and with two
blocks are compiled; what the second adds is taken 31 times. Attention is cuDNN's, the loss takes 4096 tokens at a time,
blocks are not recomputed. Each launch belongs to a part by the scope that it was traced in.

Bytes and FLOPs are read from the programs. Every time is an estimate by the roofline of the preflight, and launches run
one after the other, without idle time; the rates of attention and of collectives are assumed; no collective overlaps
with anything. The last row of each length was not compiled: it takes attention's products at the rate assumed for FP8.
Both steps are compiled with `xla_gpu_enable_triton_gemm=false`, as `TrainStep` compiles those with FP8.
"""

import argparse
from collections import Counter
from typing import Any

from lib import output
from rich.progress import Progress

from haliax_fp8 import Fp8Config
from haliax_fp8._cli.demo import demo_by_name, demo_step
from haliax_fp8.devices.roofline import WHOLE_STEP, Roofline
from haliax_fp8.devices.xla_flags import TRITON_PRODUCTS
from haliax_fp8.preflight import inspect_step
from haliax_fp8.preflight.analyze import is_attention
from haliax_fp8.preflight.hlo import parse_hlo
from haliax_fp8.preflight.instruction import COLLECTIVES
from haliax_fp8.preflight.program import Site, entry_sites, launches, opened
from haliax_fp8.preflight.report import PreflightReport
from haliax_fp8.preflight.sizes import dimensions
from haliax_fp8.preflight.traffic import is_launch, traffic_of


LINK = 0.8 * 450e9
"""Bytes per second between GPUs that NVLink connects: 0.8 of an H100's 450 GB/s in each direction. Assumed."""

PARTS = ("products", "attention", "between", "loss", "optimizer", "collectives")


def part_of(scope: str) -> str:
    """The part of a step that a scope belongs to, for anything but attention and products of blocks."""
    # The loss is the one loop of an unrolled step; what XLA puts into it has the scope of the loop alone.
    if "cross_entropy" in scope or "scan(part)" in scope:
        return "loss"
    return "between" if "jvp(" in scope or not scope else "optimizer"


def scope_of(launch: Site) -> str:
    """The scope of a launch. If XLA gave it none: that of the loop that runs it, or of what it computes last."""
    if launch.instruction.op_name:
        return launch.instruction.op_name
    if launch.caller is not None:
        return scope_of(launch.caller)
    # XLA gives none to a launch that transposes what it writes, as many of the optimizer's do.
    scopes = [inner.instruction.op_name for inner in opened(launch)]
    return next(filter(None, reversed(scopes)), "")


def seconds_of(report: PreflightReport) -> Counter[str]:
    """The estimated seconds of each part; `fp8 attention` is what attention would take in FP8."""
    assert report.device.peaks is not None
    roofline, seconds = Roofline(report.device.peaks, WHOLE_STEP), Counter[str]()
    for product in report.products:
        if product.in_attention:
            work = product.flops, product.bytes * product.executions
            seconds["attention"] += roofline.attention("bf16", *work, product.executions)
            seconds["fp8 attention"] += roofline.attention("f8e4m3fn", work[0], work[1] // 2, product.executions)
            continue
        part = "loss" if part_of(product.scope) == "loss" else "products"
        dtype = "f8e4m3fn" if product.is_fp8 else "bf16"
        moved = product.bytes * product.executions
        seconds[part] += roofline.products(dtype, product.flops, moved, product.executions)
    for launch in launches(entry_sites(parse_hlo(report.step.text))):
        if is_other(launch):
            seconds[part_of(scope_of(launch))] += roofline.others(traffic_of(launch) * launch.executions)
    for collective in report.step.collectives:
        seconds["collectives"] += collective.bytes * collective.executions / LINK
    return seconds


def is_other(launch: Site) -> bool:
    """Whether something runs that is neither a product nor communication."""
    if not is_launch(launch) or is_attention(launch):
        return False
    is_product = any(dimensions(site) is not None for site in opened(launch))
    return not is_product and launch.instruction.opcode.removesuffix("-start") not in COLLECTIVES


def step_seconds(tokens: int, config: Fp8Config | None, device: str, layers: int, devices: int) -> Counter[str]:
    """Of the whole model, from steps with one block and with two."""
    seconds = []
    for count in (1, 2):
        function, args = demo_step(
            demo_by_name("llama-8b"),
            layers=count,
            tokens=devices * tokens,
            length=tokens,
            stacking="unrolled",
            config=config,
            devices=devices,
            fused_attention=True,
        )
        options = {TRITON_PRODUCTS: False}
        report = inspect_step(function, *args, device=device, devices=devices, compiler_options=options)
        seconds.append(seconds_of(report))
    one, two = seconds
    return Counter({name: one[name] + (layers - 1) * (two[name] - one[name]) for name in two})


def row(tokens: int, device: str, layers: int = 32, devices: int = 8) -> list[dict[str, Any]]:
    """The three columns of a length: seconds of each part."""
    bf16 = step_seconds(tokens, None, device, layers, devices)
    fp8 = step_seconds(tokens, Fp8Config(), device, layers, devices)
    both = fp8 | Counter()
    both["attention"] = fp8["fp8 attention"]
    names = {"bf16": bf16, "FP8": fp8, "FP8, attention too": both}
    rows = []
    for name, parts in names.items():
        total, before = (sum(x[part] for part in PARTS) for x in (parts, bf16))
        times = {part: parts[part] for part in PARTS}
        rows.append({"tokens": tokens, "step": name, **times, "total": total, "gain": before / total})
    return rows


COLUMNS = {
    "tokens": lambda r: str(r["tokens"]),
    "step": lambda r: r["step"],
    **{part: (lambda r, part=part: f"{1e3 * r[part]:.0f}") for part in (*PARTS, "total")},
    "gain": lambda r: f"{r['gain']:.2f}",
    "attention's share": lambda r: f"{r['attention'] / r['total']:.0%}",
}


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="h100")
    parser.add_argument("--tokens", type=int, action="append", help="default: 2048, 8192 and 32768")
    output.add_arguments(parser)
    options = parser.parse_args()
    rows = []
    with Progress(transient=True) as progress:
        for tokens in progress.track(options.tokens or (2048, 8192, 32768), description="compiling"):
            rows += row(tokens, options.device)
    output.finish(f"Llama-8B, eight {options.device}, ms of a step: an estimate", COLUMNS, rows, options)


if __name__ == "__main__":
    main()
