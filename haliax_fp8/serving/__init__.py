"""Serving: models for inference with FP8 weights, which compute the same numbers as in training."""

from .._numerics.stored_array import StoredArray as StoredArray
from .for_inference import dequantize as dequantize, freeze as freeze, quantize_for_inference as quantize_for_inference
from .kernel import QuantizedKernel as QuantizedKernel
from .layers import (
    QuantizedEmbedding as QuantizedEmbedding,
    QuantizedEquinoxLinear as QuantizedEquinoxLinear,
    QuantizedLinear as QuantizedLinear,
    QuantizedMoELinear as QuantizedMoELinear,
)
from .layout import layouts as layouts
from .log_probabilities import (
    ImportanceWeights as ImportanceWeights,
    TokenMismatch as TokenMismatch,
    importance_weights as importance_weights,
    log_probability_mismatch as log_probability_mismatch,
)
from .parity import Difference as Difference, Mismatch as Mismatch, serving_mismatch as serving_mismatch
from .unstack import unstacked as unstacked
