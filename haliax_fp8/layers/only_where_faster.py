"""FasterOn: selects the layers that would be faster in FP8."""

import dataclasses
import math
from typing import Any

import haliax as hax

from .._product.spec import KernelResidual
from ..devices.catalog import canonical, peaks
from ..devices.device import Device, devices
from ..devices.peaks import Peaks
from ..devices.roofline import LIKELY, Efficiency
from ..recipes.recipe import Recipe
from .predicted_time import LayerWork, Prediction, predict
from .rule import LayerRule


@dataclasses.dataclass(frozen=True)
class FasterOn:
    """A pattern for `targets`: the layers that FP8 is predicted to make faster in training, on a device that you name.

    FP8 halves the time of a product, but adds casts, amaxes and transpositions, whose time grows with the sizes of the
    matrices and not with their product. So it pays for large layers and many tokens. The prediction is a roofline, see
    `Prediction`; it does not need the device.

    Each layer is judged in isolation. In a model, layers share casts, and casts fuse with the operations around them,
    so FP8 usually adds less than predicted. Its overhead was counted in programs for NVIDIA GPUs; for a TPU it is
    assumed to equal that of a B200.

    Layers that another pattern names are not judged. The prediction assumes that a layer is used once per step, with
    one row per token, in bf16. If that is wrong for a layer, name it in `targets`, `overrides` or `exclude`. If no
    layer would be faster, conversion raises.

    Args:
        device: A device or its name, such as `"h100"`; `"local"` for the local one. It needs known peaks.
        tokens: The number of rows that every layer multiplies in a step, on one device: batch times sequence length.
            With gradient accumulation, those of one microbatch.
        at_least: The speedup over bf16 that FP8 has to reach. A value above 1 adds a margin, since the prediction is an
            estimate.
        experts_per_token: The number of experts of a mixture that each token is sent to.
        efficiency: The shares of its peaks that the device reaches. The default is the middle of the measured range,
            and `Prediction.gain_range` covers its ends; custom shares are used as given.
        peaks: The device's figures, if the package does not know them.

    Raises:
        ValueError: If the device is unknown or has no peaks, a count is not a positive integer, or `at_least` is below
            1.

    References:
        torchao decides by sizes from a similar roofline, `_auto_filter_for_recipe`.

    Example:
        >>> Wide, Narrow, Mlp = hax.make_axes(wide=4096, narrow=64, mlp=14336)
        >>> make = lambda In: hnn.Linear.init(In, Mlp, key=jax.random.key(0), use_bias=False)
        >>> layers = eqx.filter_eval_shape(lambda: {"up": make(Wide), "gate": make(Narrow)})
        >>> config = Fp8Config(targets=FasterOn("h100", tokens=8192))
        >>> table = describe(fp8_linear_layers(layers, config), config=config)
        >>> print(f"{table['up'].prediction.gain:.2f}, {table['gate'].reason}")
        1.46, FP8 would take 1.89 times bf16's time on h100 at 8192 tokens
    """

    device: Device | str
    tokens: int
    at_least: float = 1.1
    experts_per_token: int = 1
    efficiency: Efficiency = LIKELY
    peaks: Peaks | None = None

    def __post_init__(self) -> None:
        for name in ("tokens", "experts_per_token"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name}={value!r} of FasterOn must be a positive integer")
        if not 1.0 <= self.at_least < math.inf:
            raise ValueError(
                f"at_least={self.at_least!r} of FasterOn must be 1 or more: below, FP8 is slower than bf16"
            )
        if not isinstance(self.efficiency, Efficiency):
            raise ValueError(f"efficiency={self.efficiency!r} of FasterOn must be an Efficiency(...)")
        _ = self._peaks  # raises if they are unknown

    def __str__(self) -> str:
        return f"{self.name} at {self.tokens} tokens"

    @property
    def name(self) -> str:
        """The device's name, for messages."""
        return canonical(self.device) if isinstance(self.device, str) else self.device.kind

    @property
    def _device(self) -> Device:
        return Device.of(self.device, of="FasterOn")

    @property
    def _peaks(self) -> Peaks:
        if self.peaks is not None:
            return self.peaks
        kind = self._device.kind
        for name, figures in peaks.items():
            if devices[name].kind == kind:
                return figures
        raise ValueError(
            f"device={self.device!r} has no peaks to predict times with; choose one of {[*peaks]}, or give "
            "FasterOn(..., peaks=haliax_fp8.preflight.Peaks(...)) those of its data sheet"
        )

    def predict(
        self,
        rule: LayerRule,
        layer: Any,
        stack: tuple[hax.Axis, ...],
        recipe: Recipe,
        kernel_residual: KernelResidual,
    ) -> Prediction | None:
        """The time of all layers of a stack; None if its sizes are unknown, or the device would emulate the recipe.

        Args:
            rule: The layer's rule.
            layer: The layer.
            stack: The stacks that it is in.
            recipe: The recipe that it runs or would run.
            kernel_residual: What its backward pass keeps of the kernel.
        """
        kernel = rule.kernel(layer)
        size = kernel.size(stack)
        if size is None or not kernel.support(recipe, self._device).is_native:
            return None
        rows = self.tokens * (self.experts_per_token if size.experts > 1 else 1)
        residual = kernel_residual.decided(measures_again=recipe.measures_kernel_again, stacked=bool(stack))
        work = LayerWork(size, rows, recipe, residual, self._device)
        return predict(work, self._peaks, self.efficiency, repeats=math.prod(axis.size for axis in stack))

    def refusal(
        self,
        rule: LayerRule,
        layer: Any,
        stack: tuple[hax.Axis, ...],
        recipe: Recipe,
        kernel_residual: KernelResidual,
    ) -> str | None:
        """Why a layer stays in high precision; None if it is faster in FP8. Arguments as in `predict`."""
        prediction = self.predict(rule, layer, stack, recipe, kernel_residual)
        if prediction is None:
            support = rule.kernel(layer).support(recipe, self._device)
            if support.is_native:
                return f"its time in FP8 is unknown: the Kernel that {type(rule).__name__} returns has no In and Out"
            return f"FP8 would be emulated on {self.name}: {support.reason}"
        if prediction.gain >= self.at_least:
            return None
        if prediction.gain < 1.0:
            bound = ": launching takes longer than all the work" if prediction.is_launch_bound else ""
            return f"FP8 would take {1 / prediction.gain:.2f} times bf16's time on {self}{bound}"
        return f"FP8 would be {prediction.gain:.2f} times as fast as bf16 on {self}, below {self.at_least:g}"
