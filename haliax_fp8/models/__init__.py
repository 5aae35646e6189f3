"""Models: a family of language models in plain Haliax, which examples train, exports name and `--demo` compiles."""

from .transformer import (
    Attention as Attention,
    Block as Block,
    MixtureOfExperts as MixtureOfExperts,
    SwiGlu as SwiGlu,
    Transformer as Transformer,
    TransformerConfig as TransformerConfig,
    causal_attention as causal_attention,
    hugging_face_config as hugging_face_config,
    rotary_tables as rotary_tables,
    rotate as rotate,
    swiglu as swiglu,
)
