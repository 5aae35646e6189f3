"""Plots of training in FP8: losses, statistics, operands and scales. They need `haliax-fp8[plot]`.

Each function returns a `matplotlib.figure.Figure`, which notebooks show; `figure.savefig("name.svg")` writes it. Curves
differ in dashes and markers, and heat maps in lightness, so all of them can be read in grey.

Import the module by its name, `from haliax_fp8 import plots`: `import haliax_fp8` alone does not load matplotlib.
"""

try:
    import matplotlib as matplotlib
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "haliax_fp8.plots draws with matplotlib, which is not installed; run pip install 'matplotlib>=3.9', or "
        "`uv add matplotlib` in a project of uv, or install haliax-fp8 with its extra: haliax-fp8[plot]",
        name=error.name,
    ) from error

from .following import delayed_scaling as delayed_scaling
from .heatmaps import statistics_heatmaps as statistics_heatmaps
from .histogram import operand_histogram as operand_histogram
from .losses import loss_curves as loss_curves
