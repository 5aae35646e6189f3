"""Memory: what is kept for the backward pass, and what layers can share."""

from .._product.spec import KernelResidual as KernelResidual
from .compression import compressed as compressed
from .join import JoinedLinear as JoinedLinear, join_linear as join_linear, split_linear as split_linear
from .offload import HostOptimizer as HostOptimizer, HostState as HostState
from .policies import RecomputeElementwise as RecomputeElementwise, SaveFp8Operands as SaveFp8Operands
from .rematerialized import rematerialized as rematerialized
from .shared_input import (
    projections as projections,
    separate_input_scales as separate_input_scales,
    share_input_scales as share_input_scales,
)
