"""Scalings: how one operand gets its scale. One file per scaling."""

from ._amax import round_up_scale as round_up_scale
from ._amax_compute import (
    AbstractAmaxCompute as AbstractAmaxCompute,
    MaxOfHistory as MaxOfHistory,
    MostRecent as MostRecent,
    MovingAverage as MovingAverage,
    Percentile as Percentile,
    RecoveringMax as RecoveringMax,
)
from ._base import (
    AbstractScaling as AbstractScaling,
    AbstractStatefulScaling as AbstractStatefulScaling,
    OperandUse as OperandUse,
    stores_scale as stores_scale,
)
from ._block import BlockScaling as BlockScaling
from ._current import CurrentScaling as CurrentScaling, RowwiseScaling as RowwiseScaling
from ._delayed import DelayedScaling as DelayedScaling, usable as usable
from ._guard import SHORT_BITS as SHORT_BITS, is_changed as is_changed
from ._hadamard import HadamardScaling as HadamardScaling
from ._high_precision import HighPrecision as HighPrecision
from ._measured import MeasuredScaling as MeasuredScaling
from ._mxfp8 import MXFP8Scaling as MXFP8Scaling
from ._nvfp4 import NVFP4Scaling as NVFP4Scaling
from ._observed import ObservedScaling as ObservedScaling
from ._static import StaticScaling as StaticScaling
from ._table import (
    completed as completed,
    completion as completion,
    first_table as first_table,
    guarded as guarded,
    measures as measures,
    next_table as next_table,
    overwriting as overwriting,
    overwritten as overwritten,
    record_length as record_length,
    scales_in as scales_in,
    unguarded as unguarded,
    updated as updated,
)
