"""What `recipes_train_like_bf16.py` compares with bf16: recipes, parts of recipes, and ways to start."""

import dataclasses

from haliax_fp8 import DelayedScaling, Fp8Config
from haliax_fp8.recipes import (
    E2M1,
    E4M3,
    HighPrecision,
    MostRecent,
    NVFP4Scaling,
    Quantization,
    Recipe,
    Rounding,
    named,
)
from lib.training_runs import Variant


def _config(recipe: Recipe | DelayedScaling | str, *exclude: str) -> Fp8Config:
    return Fp8Config(recipe=recipe, exclude=("head", *exclude))


def _variant(recipe: Recipe | DelayedScaling | str, *exclude: str, calibrated: bool = False) -> Variant:
    return Variant(_config(recipe, *exclude), calibrated)


def _hybrid(recipe: Recipe | str, *patterns: str) -> Fp8Config:
    """MXFP8 in some layers."""
    return Fp8Config(recipe=recipe, exclude="head", overrides=dict.fromkeys(patterns, "mxfp8"))


BASELINE = Variant()

TWIN = Variant(ulp=True)

RECIPES = {
    "bf16 + 1 ulp": TWIN,
    "delayed": _variant("delayed", calibrated=True),
    "delayed, not calibrated": _variant("delayed"),
    "current": _variant("current"),
    "rowwise": _variant("rowwise"),
    "rowwise_wgrad_bf16": _variant("rowwise_wgrad_bf16"),
    "deepseek": _variant("deepseek"),
    "mxfp8": _variant("mxfp8"),
    "mxfp8_square": _variant("mxfp8_square"),
    "mxfp4_mxfp8": _variant("mxfp4_mxfp8"),
    "static": _variant("static", calibrated=True),
    "nvfp4": _variant("nvfp4"),
}

_SHORT = DelayedScaling(amax_history_length=16)

DELAYED = {
    "bf16 + 1 ulp": TWIN,
    "delayed, not calibrated": _variant("delayed"),
    "delayed": _variant("delayed", calibrated=True),
    "history of 16, not calibrated": _variant(_SHORT),
    "history of 16": _variant(_SHORT, calibrated=True),
    "newest amax, not calibrated": _variant(DelayedScaling(amax_history_length=1, amax_compute=MostRecent())),
    "delayed, current in the first tenth": Variant(_config("current"), switches=((0.1, _config("delayed")),)),
    "current": _variant("current"),
}

_NVFP4 = named["nvfp4"]
_HIGH = Quantization(E4M3, HighPrecision())
_RECTANGLES = Quantization(E2M1, NVFP4Scaling())


def _nearest(quantization: Quantization | None) -> Quantization | None:
    return None if quantization is None else dataclasses.replace(quantization, rounding=Rounding.TO_NEAREST)


def _four_over_six(recipe: Recipe) -> Recipe:
    def changed(quantization: Quantization | None) -> Quantization | None:
        if quantization is None:
            return None
        scaling = quantization.scaling
        if isinstance(scaling, NVFP4Scaling):
            scaling = dataclasses.replace(scaling, four_over_six=True)
        else:
            scaling = dataclasses.replace(scaling, scaling=dataclasses.replace(scaling.scaling, four_over_six=True))
        return dataclasses.replace(quantization, scaling=scaling)

    fields = [field.name for field in dataclasses.fields(recipe) if field.name != "state_of"]
    return Recipe(**{name: changed(getattr(recipe, name)) for name in fields})


_UNROTATED = dataclasses.replace(_NVFP4, input_for_wgrad=None, output_grad_for_wgrad=None)
_FORWARD_ONLY = Recipe(
    input=_NVFP4.input, kernel=_NVFP4.kernel, output_grad=_HIGH, kernel_for_dgrad=_HIGH, input_for_wgrad=_HIGH
)
_BACKWARD_ONLY = _NVFP4.backward_only()

NVFP4 = {
    "bf16 + 1 ulp": TWIN,
    "nvfp4": _variant("nvfp4"),
    "fprop alone": _variant(_FORWARD_ONLY),
    "dgrad and wgrad alone": _variant(_BACKWARD_ONLY),
    "wgrad in bf16": _variant(dataclasses.replace(_NVFP4, input_for_wgrad=_HIGH, output_grad_for_wgrad=_HIGH)),
    "not rotated": _variant(_UNROTATED),
    "rounded to nearest": _variant(
        dataclasses.replace(
            _NVFP4,
            output_grad=_nearest(_NVFP4.output_grad),
            output_grad_for_wgrad=_nearest(_NVFP4.output_grad_for_wgrad),
        )
    ),
    "four over six": _variant(_four_over_six(_NVFP4)),
    "four over six, not rotated": _variant(_four_over_six(_UNROTATED)),
    "kernels in strips": _variant(dataclasses.replace(_NVFP4, kernel=_RECTANGLES)),
    "kernels in strips, four over six": _variant(_four_over_six(dataclasses.replace(_NVFP4, kernel=_RECTANGLES))),
    "last block in bf16": _variant("nvfp4", "blocks.blocks.1.*"),
    "first block in bf16": _variant("nvfp4", "blocks.blocks.0.*"),
    "attention in bf16": _variant("nvfp4", "*.attention.*"),
}
"""Without `nvfp4`'s name: its parts, each changed alone. `fprop alone`: the two other products are in bf16."""

_FIRST_BLOCK = "blocks.blocks.0.*"


def _first_blocks(count: int) -> tuple[str, ...]:
    return tuple(f"blocks.blocks.{index}.*" for index in range(count))


def _in_high_precision_at_the_end(recipe: str, *patterns: str, first: float = 0.0) -> Variant:
    """The forward pass in bf16 in the last quarter of the steps, and all of it in the first share."""
    config, end = _hybrid(recipe, *patterns), ((0.75, _at_the_end(recipe, *patterns)),)
    return Variant(None, switches=((first, config), *end)) if first else Variant(config, switches=end)


def _at_the_end(recipe: str, *patterns: str) -> Fp8Config:
    config = _hybrid(f"{recipe}_bprop", *patterns)
    return dataclasses.replace(config, overrides=dict.fromkeys(patterns, "mxfp8_bprop"))


FOUR_BITS = {
    "bf16 + 1 ulp": TWIN,
    "nvfp4": _variant("nvfp4"),
    "four over six": _variant(_four_over_six(_NVFP4)),
    "wgrad without bias": _variant(dataclasses.replace(_NVFP4, input_for_wgrad=_NVFP4.output_grad_for_wgrad)),
    "a scale for each row": _variant(dataclasses.replace(_NVFP4, input=Quantization(E2M1, NVFP4Scaling(per_row=True)))),
    "delayed tensor scale": _variant("nvfp4_delayed", calibrated=True),
    "last block in MXFP8": Variant(_hybrid("nvfp4", "blocks.blocks.1.*")),
    "attention in MXFP8": Variant(_hybrid("nvfp4", "*.attention.*")),
    "attention of the first block in MXFP8": Variant(_hybrid("nvfp4", "blocks.blocks.0.attention.*")),
    "feed-forward of the first block in MXFP8": Variant(_hybrid("nvfp4", "blocks.blocks.0.mlp.*")),
    **{
        f"first {count} blocks in MXFP8" if count > 1 else "first block in MXFP8": Variant(
            _hybrid("nvfp4", *_first_blocks(count))
        )
        for count in (1, 2, 4)
    },
    "fprop in bf16 at the end": _in_high_precision_at_the_end("nvfp4"),
    "attention in MXFP8, fprop in bf16 at the end": _in_high_precision_at_the_end("nvfp4", "*.attention.*"),
    "first block in MXFP8, fprop in bf16 at the end": _in_high_precision_at_the_end("nvfp4", _FIRST_BLOCK),
    "first block in MXFP8, first quarter in bf16, fprop at the end": _in_high_precision_at_the_end(
        "nvfp4", _FIRST_BLOCK, first=0.25
    ),
}
"""What lowers NVFP4's gap. At the end: in the last quarter of the steps."""

MXFP4 = {
    "mxfp4_mxfp8": _variant("mxfp4_mxfp8"),
    "first block in MXFP8": Variant(_hybrid("mxfp4_mxfp8", _FIRST_BLOCK)),
    "fprop in bf16 at the end": _in_high_precision_at_the_end("mxfp4_mxfp8"),
    "first block in MXFP8, fprop in bf16 at the end": _in_high_precision_at_the_end("mxfp4_mxfp8", _FIRST_BLOCK),
}
"""The same, shorter, for kernels alone in four bits."""

_CURRENT = named["current"]
_ALL_HIGH = Recipe(_HIGH, _HIGH, _HIGH, _HIGH, _HIGH, _HIGH)


def _alone(**operands: Quantization | None) -> Recipe:
    return dataclasses.replace(_ALL_HIGH, **operands)


PARTS = {
    "bf16 + 1 ulp": TWIN,
    "current": _variant("current"),
    "fprop alone": _variant(_alone(input=_CURRENT.input, kernel=_CURRENT.kernel)),
    "dgrad alone": _variant(_alone(output_grad=_CURRENT.output_grad, kernel_for_dgrad=_CURRENT.kernel)),
    "wgrad alone": _variant(
        _alone(input_for_wgrad=_CURRENT.input, output_grad_for_wgrad=_CURRENT.output_grad),
    ),
    "gradients in E4M3": _variant(
        dataclasses.replace(_CURRENT, output_grad=dataclasses.replace(_CURRENT.output_grad, format=E4M3))
    ),
    "last block in bf16": _variant("current", "blocks.blocks.1.*"),
    "attention in bf16": _variant("current", "*.attention.*"),
    "attention of the first block in bf16": _variant("current", "blocks.blocks.0.attention.*"),
    "queries and keys in bf16": _variant("current", "*.query", "*.key"),
    "values in bf16": _variant("current", "*.value"),
    "feed-forward in bf16": _variant("current", "*.mlp.*"),
}
"""Parts of an 8-bit recipe, each product alone in FP8."""

WITHOUT_ATTENTION = {"bf16 + 1 ulp": TWIN} | {
    f"{name}, attention in bf16": _variant(name, "*.attention.*", calibrated=name == "delayed")
    for name in ("delayed", "current", "rowwise", "deepseek", "mxfp8")
}
"""8-bit recipes, with the projections of attention in bf16."""


def _in_part(recipe: str, *exclude: str, first: float = 0.0, last: float = 0.0) -> Variant:
    """bf16 in the first and the last share of the steps, the recipe between them."""
    config, calibrated = _config(recipe, *exclude), recipe in ("delayed", "static")
    end = ((1.0 - last, None),) if last else ()
    return (
        Variant(None, calibrated, switches=((first, config), *end))
        if first
        else Variant(config, calibrated, switches=end)
    )


_SHARES = {"tenth": 0.1, "quarter": 0.25, "half": 0.5}
_QUARTERS = {"first quarter": 0.0, "first and last quarter": 0.25}


def _parts(recipe: str) -> dict[str, Variant]:
    return {
        recipe: _variant(recipe),
        **{f"{recipe}, last {name} in bf16": _in_part(recipe, last=share) for name, share in _SHARES.items()},
        **{f"{recipe}, first {name} in bf16": _in_part(recipe, first=share) for name, share in _SHARES.items()},
        f"{recipe}, first and last tenth in bf16": _in_part(recipe, first=0.1, last=0.1),
        f"{recipe}, first tenth and last quarter in bf16": _in_part(recipe, first=0.1, last=0.25),
        f"{recipe}, first quarter and last tenth in bf16": _in_part(recipe, first=0.25, last=0.1),
        f"{recipe}, first and last quarter in bf16": _in_part(recipe, first=0.25, last=0.25),
    }


def _quarters(recipe: str, *exclude: str, also: str = "") -> dict[str, Variant]:
    return {
        f"{recipe}, {also}{part} in bf16": _in_part(recipe, *exclude, first=0.25, last=last)
        for part, last in _QUARTERS.items()
    }


PHASES = (
    {"bf16 + 1 ulp": TWIN}
    | _parts("current")
    | _parts("nvfp4")
    | _quarters("current", "*.attention.*", also="attention and ")
    | _quarters("nvfp4", "*.attention.*", also="attention and ")
    | _quarters("nvfp4", "blocks.blocks.0.*", also="first block and ")
)
"""A recipe in a part of the steps."""

MIDDLE = {"bf16 + 1 ulp": TWIN} | {
    name: variant
    for recipe in ("delayed", "current", "rowwise", "rowwise_wgrad_bf16", "deepseek", "mxfp8", "static")
    for name, variant in _quarters(recipe).items()
}
"""8-bit recipes with the first quarter of the steps in bf16, and the last one too."""

OVER_STEPS = {
    "bf16 + 1 ulp": TWIN,
    "bf16, 95 % of the steps": Variant(share=0.95),
    "bf16, 98 % of the steps": Variant(share=0.98),
    "delayed": RECIPES["delayed"],
    "current": RECIPES["current"],
    "mxfp8": RECIPES["mxfp8"],
    "nvfp4": RECIPES["nvfp4"],
    "current, first quarter in bf16": _in_part("current", first=0.25),
    "current, attention in bf16": _variant("current", "*.attention.*"),
    "nvfp4, first block in MXFP8, fprop in bf16 at the end": FOUR_BITS[
        "first block in MXFP8, fprop in bf16 at the end"
    ],
}
"""Recipes and phases over the steps, beside bf16 with fewer of them."""

MEMORY = {
    "bf16 + 1 ulp": TWIN,
    "moments in FP8": Variant(moments_in_fp8=True),
    "bf16 weights, rounded stochastically": Variant(bf16_weights=True),
    "both": Variant(moments_in_fp8=True, bf16_weights=True),
}
"""What takes less memory than float32 weights and moments, all else in bf16. FP8 moments need `--hidden 128`: blocks of
128 elements lie along the last axis."""

STRESS = {name: RECIPES[name] for name in RECIPES if name not in ("rowwise_wgrad_bf16", "static")} | MEMORY

SUITES = {
    "recipes": RECIPES,
    "delayed": DELAYED,
    "parts": PARTS,
    "attention": WITHOUT_ATTENTION,
    "nvfp4": NVFP4,
    "four_bits": FOUR_BITS,
    "mxfp4": MXFP4,
    "over_steps": OVER_STEPS,
    "phases": PHASES,
    "middle": MIDDLE,
    "memory": MEMORY,
    "stress": STRESS,
}
"""Variants by name; bf16 is compared with in each."""
