"""FP8 attention in float64 NumPy, head by head, from cuDNN's documentation: an independent model.

    S = softmax(scale Q K^T)    O = E V / rowsum(E), E = exp(scale Q K^T - rowmax)    dV = S^T dO
    dP = scale (dO V^T - rowsum(dO O)) S    dQ = dP K    dK = dP^T Q

Ten tensors are rounded, each with its own scale: Q, K, V, S, O, dO, dP, dQ, dK, dV; and E, by 1/448.
"""

import numpy as np
from helpers import E4M3, float64, quantize


TENSORS = (
    *("query", "key", "value", "weights", "output"),
    *("output_grad", "scores_grad", "query_grad", "key_grad", "value_grad"),
)


def attention(query, key, value, grad, scales, *, is_causal, rounds=True):
    """Output, the gradients of query, key and value, and the amax of each tensor before it is rounded.

    Args:
        query: `[batch, tokens, heads, head_dim]`.
        key: `[batch, keys, kv_heads, head_dim]`.
        value: As the key.
        grad: Of the output.
        scales: Of each tensor, by name.
        is_causal: Whether a query sees only keys up to its own position.
        rounds: Whether anything is rounded.
    """
    amaxes = dict.fromkeys(TENSORS, 0.0)

    def rounded(name, x):
        amaxes[name] = max(amaxes[name], float(np.abs(float64(x)).max()))
        return quantize(np.asarray(x), scales[name], E4M3) if rounds else float64(x)

    factor = 1.0 / np.sqrt(query.shape[-1])
    q, k, v, g = rounded("query", query), rounded("key", key), rounded("value", value), rounded("output_grad", grad)
    out, dq, dk, dv = np.zeros(q.shape), np.zeros(q.shape), np.zeros(k.shape), np.zeros(k.shape)
    for b in range(q.shape[0]):
        for head in range(q.shape[2]):
            of = head // (q.shape[2] // k.shape[2])
            scores = factor * q[b, :, head] @ k[b, :, of].T
            if is_causal:
                scores = np.where(np.tri(*scores.shape, dtype=bool), scores, -np.inf)
            likely = np.exp(scores - scores.max(axis=1, keepdims=True))
            total = likely.sum(axis=1, keepdims=True)
            weights = likely / total
            low = rounded("weights", weights)
            likely = quantize(likely, 1.0 / 448.0, E4M3) if rounds else likely
            exact = likely @ v[b, :, of] / total
            out[b, :, head] = rounded("output", exact)
            along = (g[b, :, head] * out[b, :, head]).sum(axis=1, keepdims=True)
            of_scores = factor * (g[b, :, head] @ v[b, :, of].T - along) * weights
            of_scores = rounded("scores_grad", of_scores)
            dq[b, :, head] = of_scores @ k[b, :, of]
            dk[b, :, of] += of_scores.T @ q[b, :, head]
            dv[b, :, of] += low.T @ g[b, :, head]
    gradients = [rounded(f"{name}_grad", x) for name, x in (("query", dq), ("key", dk), ("value", dv))]
    return out, *gradients, amaxes
