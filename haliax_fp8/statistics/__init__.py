"""Statistics: what FP8 does to the operands of a model's products, and what is wrong where it does harm."""

from .apply import apply_remedies as apply_remedies
from .comparison import (
    Distance as Distance,
    LayerComparison as LayerComparison,
    ModelComparison as ModelComparison,
    compare as compare,
)
from .diagnose import diagnose as diagnose, where_not_finite as where_not_finite
from .finding import (
    Diagnosis as Diagnosis,
    Finding as Finding,
    Problem as Problem,
    Remedy as Remedy,
)
from .measure import quantization_statistics as quantization_statistics
from .monitor import every as every
from .result import ModelStatistics as ModelStatistics, OpStatistics as OpStatistics
from .thresholds import Thresholds as Thresholds
