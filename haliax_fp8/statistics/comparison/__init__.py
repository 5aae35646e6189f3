"""Comparison: where in the network a converted model and the plain one part."""

from .result import Distance as Distance, LayerComparison as LayerComparison, ModelComparison as ModelComparison
from .side_by_side import compare as compare
