"""The names under which checkpoint policies find what a product makes."""

FP8_OPERAND = "fp8_operand"
"""The name of the input of a product in FP8, which its backward pass needs."""


FP8_OUTPUT = "fp8_output"
"""The name of a product's result."""
