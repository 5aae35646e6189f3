"""cuDNN's fused attention in bfloat16, which never stores the scores, compiled without a GPU.

JAX's public function asks a GPU for its compute capability and its version of cuDNN, and so compiles only on a machine
with that GPU. The call itself needs neither. Callers keep the limits that JAX would check.
"""

import inspect
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from .private import needs


def attention(
    query: Float[Array, "batch tokens heads head_dim"],
    key: Float[Array, "batch keys kv_heads head_dim"],
    value: Float[Array, "batch keys kv_heads head_dim"],
    *,
    scale: float,
    is_causal: bool,
) -> Float[Array, "batch tokens heads head_dim"]:
    """`jax.nn.dot_product_attention(implementation="cudnn")` for bfloat16 or float16, compiled without a device.

    Args:
        query: The queries.
        key: The keys.
        value: The values.
        scale: Multiplies the scores.
        is_causal: Whether a query sees only keys up to its own position.
    """
    with needs("attention by cuDNN"):
        from jax._src.cudnn import fused_attention_stablehlo as cudnn

        call, mask, layout = cudnn._dot_product_attention, cudnn.MaskType, cudnn.AttentionLayout.BTNH.value
    none = jnp.zeros(0, query.dtype)
    empty = ("bias", "q_seqlen", "kv_seqlen", "q_offsets", "kv_offsets", "page_table_k", "page_table_v")
    static: dict[str, Any] = {
        "scale": scale,
        "seed": 42,
        "dropout_rate": 0.0,
        "variadic_args": (False, False),
        "mask_type": mask.CAUSAL if is_causal else mask.NO_MASK,
        "layout": layout,
        "sliding_window_length": None,
        # JAX passes it to its own checks, all of which accept newer versions.
        "cudnn_version": 91000,
        "return_residual": False,
    }
    # JAX 0.11 has no functions of scores.
    if "score_mod" in inspect.signature(call).parameters:
        static |= {"score_mod_args": (), "score_mod": None}
    return call(query, key, value, **dict.fromkeys(empty, none), **static)
