"""The products of a fused attention: one launch computes two in the forward pass and five in the backward pass."""

from collections.abc import Iterator

from ...devices.peaks import is_narrow
from ..compilable.device import CompilableDevice
from ..hlo.scopes import product_name
from ..hlo.sites import Site
from ..hlo.traffic import touched
from ..hlo.vocabulary import CUDNN_ATTENTION, CUSTOM_CALL, Call, call_of, scores_of
from .product import Product, Verdict
from .reason import indivisible_sizes


def is_attention(launch: Site) -> bool:
    """Whether a launch is a fused attention whose sizes are known."""
    call = launch.instruction
    return call.opcode == CUSTOM_CALL and call_of(call) is Call.ATTENTION and scores_of(call) is not None


def attention_products(launch: Site, device: CompilableDevice) -> Iterator[Product]:
    """The products of a fused attention.

    Forward: scores and output. Backward: the scores again, and the gradients of weights, value, query and key.

    Args:
        launch: A launch for which `is_attention` holds.
        device: The device.
    """
    scores = scores_of(launch.instruction)
    assert scores is not None
    query, key, value = (operand.instruction.shape for operand in launch.operands[:3])
    m, n, width, of_value = scores.queries, scores.keys, query.dims[-1], value.dims[-1]
    sizes = [(m, n, width), (m, of_value, n)]
    if scores.is_backward:
        # The gradients of weights, value, query and key; the output itself is not recomputed.
        sizes = [sizes[0], (m, n, of_value), (n, of_value, m), (m, width, n), (n, width, m)]
    dtypes = query.dtype, key.dtype
    narrow = all(map(is_narrow, dtypes))
    lacking = next((reason for dtype in dtypes if narrow and (reason := device.lacks(dtype)) is not None), None)
    verdict = Verdict.HIGH_PRECISION if not narrow else Verdict.EMULATED if lacking else Verdict.FP8
    reason = lacking or ("" if narrow else f"fused attention in {query.dtype}")
    scope = launch.instruction.op_name
    for m, n, k in sizes:
        yield Product(
            layer="",
            name=product_name(scope),
            scope=scope,
            batch=scores.batch,
            m=m,
            n=n,
            k=k,
            lhs=dtypes[0],
            rhs=dtypes[1],
            widened="",
            out=launch.results[0].dtype,
            compute="",
            written=query.dtype,
            block_scaled=False,
            indivisible=indivisible_sizes(m, n, k),
            implementation=CUDNN_ATTENTION,
            groups=1,
            surplus=1.0,
            executions=launch.executions,
            bytes=touched(launch) // len(sizes),
            verdict=verdict,
            reason=reason,
            in_attention=True,
            halved=scores.is_causal,
        )
