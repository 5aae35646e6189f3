"""The list of what the package imports from `jax._src`: a new name needs a test of what it has to do."""

import ast
import pathlib

import haliax_fp8


def test_internals_are_the_ones_under_test():
    """A comment says where the names below it are under test, up to the next comment."""
    folder = pathlib.Path(haliax_fp8.__file__).parent
    nodes = [node for path in folder.rglob("*.py") for node in ast.walk(ast.parse(path.read_text()))]
    imports = [node for node in nodes if isinstance(node, ast.ImportFrom) and "jax._src" in (node.module or "")]
    needed = {f"{node.module}.{alias.name}" for node in imports for alias in node.names}
    assert needed == {
        # `tests/jax/test_max_grad.py`.
        "jax._src.ad_util",
        "jax._src.core",
        "jax._src.dtypes",
        "jax._src.earray",
        "jax._src.interpreters.pxla",
        "jax._src.lax.lax.from_edtype_p",
        "jax._src.lax.lax.to_edtype_p",
        # `tests/jax/test_linearization.py`.
        "jax._src.ad_util.Zero",
        "jax._src.interpreters.ad",
        # `tests/jax/test_raised_in.py`.
        "jax._src.traceback_util.api_boundary",
        "jax._src.traceback_util.register_exclusion",
        # `tests/jax/test_opaque.py`.
        "jax._src.interpreters.partial_eval",
        "jax._src.util.cache",
        # `tests/programs/test_compiled_grouped.py`: off inside Pallas kernels.
        "jax._src.config",
        # `tests/jax/test_cudnn_attention.py`; FP8: `tests/experimental/test_platforms.py`, and with XLA's compiler
        # `tests/programs/test_compiled_attention.py`.
        "jax._src.cudnn.fused_attention_stablehlo",
        # `tests/jax/test_cudnn_attention.py`.
        "jax._src.xla_bridge",
        # `tests/sharding/test_blocks.py`.
        "jax._src.custom_partitioning",
        "jax._src.dispatch",
        "jax._src.interpreters.mlir.custom_call",
        "jax._src.sharding_impls.SPMDAxisContext",
        # `tests/sharding/test_blocks.py`, and with XLA's compiler in `tests/programs/test_several_devices.py`.
        "jax._src.sharding_impls.ShardingContext",
    }
