"""Memory: what is kept for the backward pass, and what several layers can share."""

from .._product.kernel_residual import KernelResidual as KernelResidual
from .compression import compressed as compressed
from .fused_projections import FusedProjections as FusedProjections
from .policies import save_fp8_operands as save_fp8_operands, save_nothing_but_fp8 as save_nothing_but_fp8
from .rematerialize import rematerialized as rematerialized
from .shared_input import (
    AbstractFusion as AbstractFusion,
    OneProduct as OneProduct,
    SharedInput as SharedInput,
    fuse_projections as fuse_projections,
    projections as projections,
    separate_projections as separate_projections,
)
