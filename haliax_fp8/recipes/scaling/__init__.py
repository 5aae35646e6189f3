"""Scalings: how one operand gets its scale. One file per scaling."""

from .amax_of_history import (
    AbstractAmaxCompute as AbstractAmaxCompute,
    MaxOfHistory as MaxOfHistory,
    MostRecent as MostRecent,
    MovingAverage as MovingAverage,
    Percentile as Percentile,
    RecoveringMax as RecoveringMax,
    amaxes_of_rows as amaxes_of_rows,
)
from .base import (
    AbstractScaling as AbstractScaling,
    CastCost as CastCost,
    OperandUse as OperandUse,
    of_all_elements as of_all_elements,
)
from .block import BlockScaling as BlockScaling
from .current import CurrentScaling as CurrentScaling, RowwiseScaling as RowwiseScaling
from .delayed import (
    AmaxHistory as AmaxHistory,
    DelayedScaling as DelayedScaling,
    quantize_by_stored_scale as quantize_by_stored_scale,
    scale_of_amax as scale_of_amax,
)
from .folder import FolderScales as FolderScales, FolderScaling as FolderScaling
from .hadamard import HadamardScaling as HadamardScaling
from .high_precision import HighPrecision as HighPrecision
from .measured import (
    STATISTICS as STATISTICS,
    MeasuredScaling as MeasuredScaling,
    ObservedScaling as ObservedScaling,
    statistics_of as statistics_of,
)
from .members import Members as Members
from .memory import AbstractMemory as AbstractMemory
from .multiplier import scale_of as scale_of
from .mxfp8 import MXFP8Scaling as MXFP8Scaling
from .nvfp4 import NVFP4Scaling as NVFP4Scaling
from .static import StaticScaling as StaticScaling
