"""Attention in FP8, experimental: `Fp8Attention`.

**Names and numbers may change without notice.** On a GPU it binds JAX's private primitives for cuDNN's attention
(`jax._src.cudnn`), which any release of JAX may change or drop. They are imported when a program is compiled for a GPU,
so nothing else fails with them.

**What runs where.** NVIDIA GPUs from Hopper on run cuDNN's fused kernels, which keep no scores in memory. They have run
on an H200; for an H100 and a B200 they have only been compiled. A CPU emulates them, with all scores in memory. Other
devices raise an error unless you ask for `Fp8Attention.init(emulate=True)`.

The files, from the model down to the device: `op.py` has the layer, its checks and its state; `primitive.py` the
derivative, and `vmap`; `platforms.py` what each platform runs; `emulated.py` the arithmetic, with every rounding.
"""

from .op import Fp8Attention as Fp8Attention
