"""Statistics: what FP8 does to the operands of a model's products."""

from .measure import quantization_statistics as quantization_statistics
from .result import ModelStatistics as ModelStatistics, OpStatistics as OpStatistics
