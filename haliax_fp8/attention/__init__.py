"""Attention in FP8, experimental: `Fp8Attention`."""

from .op import HEAD_DIMS as HEAD_DIMS, Fp8Attention as Fp8Attention
