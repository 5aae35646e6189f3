"""The ten tensors of attention that have a scale, in the order in which state stores them."""

from typing import Final


OPERANDS: Final = ("query", "key", "value")
"""The inputs of attention."""

FORWARD: Final = (*OPERANDS, "weights", "output")
"""The tensors of the forward pass; `weights` is the softmax of the scores."""

BACKWARD: Final = ("output_grad", "scores_grad", "query_grad", "key_grad", "value_grad")
"""The tensors of the backward pass."""

TENSORS: Final = (*FORWARD, *BACKWARD)
"""All ten tensors."""
