"""Statistics: what FP8 does to the operands of a model's products."""

from .measure import (
    ModelStatistics as ModelStatistics,
    OpStatistics as OpStatistics,
    quantization_statistics as quantization_statistics,
)
