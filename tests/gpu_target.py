"""Compiles for an H100 that is not here: XLA's GPU compiler needs a description of the device, not the device.

Needs the package `jax-cuda13-pjrt` (dependency group `preflight`).
"""

import equinox as eqx
import jax
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec


# A `stream_executor.GpuTargetConfigProto` in text form; figures of the H100 SXM data sheet and CUDA's device query.
H100 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152 shared_memory_per_core: 233472
  threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128 block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535 block_dim_limit_z: 65535 memory_bandwidth: 3352320000000 l2_cache_size: 52428800
  clock_rate_ghz: 1.98 device_memory_size: 84978434048 shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 feature_extension: ACCELERATED_FEATURES }
  registers_per_core_limit: 65536 registers_per_block_limit: 65536 device_interconnect_info { active_links: 18 }
}
platform_name: "CUDA" dnn_version_info { major: 9 minor: 10 } runtime_version { major: 12 minor: 9 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""


def compile_for_h100(function, *args) -> str:
    """The compiled program of a function of pytrees, as text."""
    jax.devices("cpu")  # the default backend is made first, and stays the CPU
    topology = topologies.get_topology_desc("", "cuda", target_config=H100, topology="1x1x1")
    sharding = NamedSharding(topologies.make_mesh(topology, (1,), ("devices",)), PartitionSpec())
    arrays, static = eqx.partition(args, eqx.is_array)
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), arrays)
    called = lambda arrays: eqx.filter(function(*eqx.combine(arrays, static)), eqx.is_array)
    # Without a GPU there is no autotuner to choose between Triton and cuBLAS.
    return jax.jit(called).lower(abstract).compile(compiler_options={"xla_gpu_enable_triton_gemm": False}).as_text()
