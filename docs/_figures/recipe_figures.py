"""Draws what formats and recipes do to numbers: computed with the library, not drawn by hand."""

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from drawing import BLUE, GREEN, GREY, ORANGE, RED, WIDEST
from jaxtyping import Array
from matplotlib.figure import Figure

from haliax_fp8.recipes import (
    E2M1,
    E4M3,
    E5M2,
    AbstractScaling,
    BlockScaling,
    CurrentScaling,
    Format,
    HadamardScaling,
    NVFP4Scaling,
    OperandUse,
    Rounding,
    RowwiseScaling,
    quantize,
    saturating_cast,
)


def sqnr(x: Array, y: Array) -> float:
    """Signal to quantization noise, in dB."""
    return float(20.0 * jnp.log10(jnp.linalg.norm(x) / jnp.linalg.norm(x - y)))


def scale_off() -> Figure:
    """Accuracy under a scale that is too large, as after a spike: range is what E5M2 has more of."""
    x = jax.random.normal(jax.random.key(0), (2**14,))
    best = jnp.max(jnp.abs(x))
    figure, axes = plt.subplots(figsize=(WIDEST, 3.2), layout="constrained")
    binades = np.arange(-4, 27)
    for format, color in ((E4M3, BLUE), (E5M2, ORANGE)):
        curve = [
            sqnr(
                x,
                quantize(
                    x, (best / format.max * 2.0 ** int(k)).reshape(1), format
                ).dequantize(),
            )
            for k in binades
        ]
        axes.plot(binades, curve, color=color, lw=2, label=repr(format))
    axes.axvline(0.0, color=GREY, lw=0.9, ls=":")
    axes.text(0.2, 1.0, "the best scale", color=GREY)
    axes.text(-2.0, 36.5, "clips", color=RED, ha="center")
    axes.text(13.0, 36.5, "small values underflow", color=RED, ha="center")
    ticks = range(-4, 27, 4)
    axes.set_xticks(ticks, [f"2$^{{{k}}}$" for k in ticks])
    axes.set(
        xlabel="scale, relative to amax / max", ylabel="SQNR, dB", ylim=(-1, 40), xlim=(-4, 26)
    )
    axes.legend(loc="upper right", bbox_to_anchor=(1.0, 0.9))
    return figure


def outliers() -> Figure:
    """Accuracy of all other elements, as one of them grows."""
    size = 256
    clean = jax.random.normal(jax.random.key(0), (size, size))
    magnitudes = np.geomspace(10.0, 1e7, 25)
    others = jnp.ones((size, size), bool).at[0, 0].set(False)
    scalings: tuple[tuple[str, AbstractScaling, Format, str, str], ...] = (
        ("tensor, E4M3", CurrentScaling(), E4M3, BLUE, "-"),
        ("tensor, E5M2", CurrentScaling(), E5M2, ORANGE, "-"),
        ("row, E4M3", RowwiseScaling(), E4M3, GREEN, "--"),
        ("block of 128, E4M3", BlockScaling(), E4M3, RED, "-."),
    )
    figure, axes = plt.subplots(figsize=(WIDEST, 3.2), layout="constrained")
    for name, scaling, format, color, style in scalings:
        curve = []
        for magnitude in magnitudes:
            x = clean.at[0, 0].set(float(magnitude))
            q = scaling.quantize(x, OperandUse(format, contracted=(1,))).dequantize()
            curve.append(sqnr(jnp.where(others, x, 0.0), jnp.where(others, q, 0.0)))
        axes.plot(magnitudes, curve, color=color, lw=2, ls=style, label=name)
    axes.set(
        xscale="log",
        xlabel="the outlier, in standard deviations",
        ylabel="SQNR of the others, dB",
    )
    axes.set(ylim=(-1, 36), xlim=(10.0, 1e7))
    axes.legend(loc="lower left")
    return figure


def rounding() -> Figure:
    """The mean of many draws, against rounding to nearest."""
    x = jnp.linspace(0.0, 6.0, 481)
    keys = jax.random.split(jax.random.key(0), 400)
    draws = jax.vmap(lambda key: Rounding.STOCHASTIC.cast(x, E2M1, key).astype(jnp.float32))(
        keys
    )
    nearest = saturating_cast(x, E2M1).astype(jnp.float32)
    figure, axes = plt.subplots(figsize=(5.2, 3.4), layout="constrained")
    axes.plot(x, draws[0], ".", color=ORANGE, ms=2.5, alpha=0.6, label="one draw")
    axes.plot(x, nearest, color=BLUE, lw=1.6, label="to nearest")
    axes.plot(x, draws.mean(axis=0), color=GREEN, lw=1.6, label="mean of 400 draws")
    axes.set(
        xlabel="value, in units of the scale",
        ylabel="rounded to E2M1",
        xlim=(0, 6),
        ylim=(0, 6.2),
    )
    axes.legend(loc="upper left")
    return figure


def hadamard() -> Figure:
    """A group of 16 with an outlier: as it is quantized, and as it comes back."""
    x = jax.random.normal(jax.random.key(3), (16,)).at[5].set(20.0)
    use = OperandUse(E2M1, contracted=(0,))
    rotated = HadamardScaling(NVFP4Scaling()).quantize(x, use)
    panels = (
        ("values", x, NVFP4Scaling().quantize(x, use).dequantize()),
        ("rotated values", rotated.rotation.apply(x), rotated.dequantize_rotated()),
    )
    figure, both = plt.subplots(1, 2, figsize=(WIDEST, 2.9), layout="constrained")
    for axes, (title, exact, rounded) in zip(both, panels, strict=True):
        axes.bar(np.arange(16), exact, color=GREY, alpha=0.4, width=0.8, label="before")
        axes.plot(
            np.arange(16), rounded, "_", color=RED, ms=10, mew=2, label="rounded to E2M1"
        )
        axes.axhline(0.0, color=GREY, lw=0.6)
        axes.set(title=title, xlabel="element of the group", xticks=[0, 5, 10, 15])
    both[0].legend(loc="upper right")
    return figure


FIGURES = {
    "scale-off": scale_off,
    "outliers": outliers,
    "rounding": rounding,
    "hadamard": hadamard,
}
