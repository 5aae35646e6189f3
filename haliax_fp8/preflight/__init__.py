"""Compiles a training step for a device that you do not have, and shows which of its products run in FP8.

    report = inspect_step(step, model, opt_state, batch, device="h100")

It needs no accelerator and no driver, only XLA's compiler for the device, which `python -m haliax_fp8 install-compiler`
installs.
"""

from ..devices import Peaks as Peaks
from .check import check_fp8_call as check_fp8_call
from .choose import Choice as Choice, Choices as Choices, choose as choose
from .collectives import Collective as Collective, Part as Part
from .compile import Memory as Memory
from .devices import (
    CompilableDevice as CompilableDevice,
    CompilableGpu as CompilableGpu,
    CompilableTpu as CompilableTpu,
    LocalDevice as LocalDevice,
    compilable_devices as compilable_devices,
)
from .product import (
    Estimate as Estimate,
    Opaque as Opaque,
    OtherLaunches as OtherLaunches,
    Product as Product,
    Program as Program,
    Verdict as Verdict,
)
from .report import PreflightError as PreflightError, PreflightReport as PreflightReport
from .step import inspect_step as inspect_step
