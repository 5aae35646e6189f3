"""Comparison: where in the network a converted model and the plain one part."""

from .layer import Distance as Distance, LayerComparison as LayerComparison
from .result import ModelComparison as ModelComparison
from .side_by_side import compare as compare
