"""Comparison: where in the network a converted model and the plain one part."""

from .compare import compare as compare
from .result import Distance as Distance, LayerComparison as LayerComparison, ModelComparison as ModelComparison
