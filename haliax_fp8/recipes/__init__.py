"""Recipes: a format, a scaling and a rounding for each operand; by name, and whether a device multiplies them.

`scaling/` has one file per scaling.
"""

from .._numerics.casts import saturating_cast as saturating_cast
from .._numerics.quantized_array import QuantizedArray as QuantizedArray, quantize as quantize
from .._numerics.rounding import Rounding as Rounding
from ..devices.units import (
    FP4_UNITS as FP4_UNITS,
    FP8_UNITS as FP8_UNITS,
    MX_UNITS as MX_UNITS,
    NO_UNITS as NO_UNITS,
)
from ..formats import (
    E2M1 as E2M1,
    E4M3 as E4M3,
    E4M3FNUZ as E4M3FNUZ,
    E5M2 as E5M2,
    E5M2FNUZ as E5M2FNUZ,
    Format as Format,
)
from .catalog import aliases as aliases, by_name as by_name, named as named
from .compiler_options import training_options as training_options
from .recipe import (
    SCALE_BITS as SCALE_BITS,
    USES as USES,
    OperandName as OperandName,
    Quantization as Quantization,
    Recipe as Recipe,
)
from .scaling import (
    STATISTICS as STATISTICS,
    AbstractAmaxCompute as AbstractAmaxCompute,
    AbstractMemory as AbstractMemory,
    AbstractScaling as AbstractScaling,
    AmaxHistory as AmaxHistory,
    BlockScaling as BlockScaling,
    CastCost as CastCost,
    CurrentScaling as CurrentScaling,
    DelayedScaling as DelayedScaling,
    FolderScales as FolderScales,
    FolderScaling as FolderScaling,
    HadamardScaling as HadamardScaling,
    HighPrecision as HighPrecision,
    MaxOfHistory as MaxOfHistory,
    MeasuredScaling as MeasuredScaling,
    Members as Members,
    MostRecent as MostRecent,
    MovingAverage as MovingAverage,
    MXFP8Scaling as MXFP8Scaling,
    NVFP4Scaling as NVFP4Scaling,
    OperandUse as OperandUse,
    Percentile as Percentile,
    RecoveringMax as RecoveringMax,
    RowwiseScaling as RowwiseScaling,
    StaticScaling as StaticScaling,
    amaxes_of_rows as amaxes_of_rows,
    quantize_by_stored_scale as quantize_by_stored_scale,
    scale_of_amax as scale_of_amax,
)
from .support import Outcome as Outcome, Support as Support, supported as supported
