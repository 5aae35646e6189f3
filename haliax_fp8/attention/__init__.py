"""Attention in FP8, experimental: `Fp8Attention`."""

from .op import Fp8Attention as Fp8Attention
