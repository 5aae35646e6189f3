"""Compile a training step for a device that you do not have, and see which of its products run in FP8.

    report = preflight(step, model, opt_state, batch, target="h100")

It needs no accelerator and no driver, only XLA's compiler for the device, which `python -m haliax_fp8 install-compiler`
installs.
"""

from .._peaks import Peaks as Peaks
from ._check import check_fp8_call as check_fp8_call, has_fp8_product as has_fp8_product
from ._gpu import GpuTarget as GpuTarget
from ._local import LocalTarget as LocalTarget
from ._preflight import preflight as preflight
from ._product import Product as Product, Verdict as Verdict
from ._program import (
    Collective as Collective,
    Estimate as Estimate,
    Kernels as Kernels,
    Memory as Memory,
    Opaque as Opaque,
    Program as Program,
)
from ._report import PreflightError as PreflightError, PreflightReport as PreflightReport
from ._target import Target as Target
from ._targets import targets as targets
from ._tpu import TpuTarget as TpuTarget
