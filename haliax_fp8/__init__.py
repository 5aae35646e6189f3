"""FP8 training for JAX models written in Equinox and Haliax.

    model = fp8_linear_layers(model)

converts a model; `partition_for_grad_overwrite` and `apply_updates` make its training step. See `docs/`.

What is here is enough to train. The rest is in modules by subject, such as `haliax_fp8.recipes`, which are loaded when
they are first used.
"""

import importlib
from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    from . import (
        checkpoints as checkpoints,
        devices as devices,
        experimental as experimental,
        folders as folders,
        formats as formats,
        huggingface as huggingface,
        layers as layers,
        layouts as layouts,
        memory as memory,
        models as models,
        ops as ops,
        plots as plots,
        preflight as preflight,
        recipes as recipes,
        scopes as scopes,
        serving as serving,
        sharding as sharding,
        statistics as statistics,
        training as training,
    )
    from ._einsum import Fp8Einsum
    from ._op import Fp8DotGeneral
    from .layers import Fp8Config, describe, fp8_linear_layers, quantize_kernels, restore_linear_layers
    from .recipes import DelayedScaling, Recipe
    from .statistics import quantization_statistics
    from .training import (
        OverwriteWithGradient as OverwriteWithGradient,
        TrainStep,
        accumulate_gradients,
        apply_updates,
        calibrate,
        cast_params,
        filter_grad,
        filter_value_and_grad,
        fp32_max_grad as fp32_max_grad,
        partition_for_grad_overwrite,
        trainable,
        transfer_optimizer_state,
        with_rounding_keys,
    )


__version__ = "0.1.0"

__all__ = [
    # Converting a model, and seeing what was converted.
    "fp8_linear_layers",
    "restore_linear_layers",
    "Fp8Config",
    "Recipe",
    "DelayedScaling",
    "describe",
    "quantize_kernels",
    # Training it.
    "TrainStep",
    "trainable",
    "filter_grad",
    "filter_value_and_grad",
    "partition_for_grad_overwrite",
    "apply_updates",
    "accumulate_gradients",
    "calibrate",
    "cast_params",
    "transfer_optimizer_state",
    "with_rounding_keys",
    # What its numbers became.
    "quantization_statistics",
    # For layers of your own.
    "Fp8DotGeneral",
    "Fp8Einsum",
]

_MODULES = (
    "checkpoints",
    "devices",
    "experimental",
    "folders",
    "formats",
    "huggingface",
    "layers",
    "layouts",
    "memory",
    "models",
    "ops",
    "plots",
    "preflight",
    "recipes",
    "scopes",
    "serving",
    "sharding",
    "statistics",
    "training",
)


# What Haliax calls them.
_OTHER_NAMES = {
    "quantize_linear_layers": "use fp8_linear_layers(model, Fp8Config(...)), which takes the model first",
    "QuantizationConfig": "use Fp8Config(targets=..., recipe=...)",
    "Fp8DotGeneralOp": "use Fp8DotGeneral.init(recipe)",
    "DotGeneralOp": "any function like jax.lax.dot_general will do, such as Fp8DotGeneral.init(recipe)",
    "DefaultDotGeneralOp": "use restore_linear_layers(model), whose layers multiply as Haliax's do",
    "Int8DotGeneralOp": "use Fp8DotGeneral.init(recipe), or haliax.quantization's for INT8",
    "fp8_scaled_dot_general": "use Fp8DotGeneral.init(recipe), which holds the scales",
}


# Where each name is: loaded when it is first used, so that what needs no JAX, such as `folders`, starts without.
_NAMES = {
    "Fp8Einsum": "_einsum",
    "Fp8DotGeneral": "_op",
    # Documented in `training`, and here for whoever comes from Flax or Haliax.
    **dict.fromkeys(("OverwriteWithGradient", "fp32_max_grad"), "training"),
    "quantization_statistics": "statistics",
    **dict.fromkeys(
        ("Fp8Config", "describe", "fp8_linear_layers", "quantize_kernels", "restore_linear_layers"), "layers"
    ),
    **dict.fromkeys(("DelayedScaling", "Recipe"), "recipes"),
}


def __getattr__(name: str) -> Any:
    """The modules by subject, loaded when they are first used, and the one function that comes from such a module."""
    if name in _MODULES:
        return importlib.import_module(f".{name}", __name__)
    if name in __all__ or name in _NAMES:
        return getattr(importlib.import_module(f".{_NAMES.get(name, 'training')}", __name__), name)
    hint = f"; {_OTHER_NAMES[name]}" if name in _OTHER_NAMES else ""
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}")


def __dir__() -> list[str]:
    return sorted((*__all__, *_MODULES, "__version__"))
