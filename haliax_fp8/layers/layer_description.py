"""What describe says of one layer."""

import dataclasses

from rich.table import Table
from rich.text import Text

from .._printing import Printable, new_table
from ..recipes.support import Support
from .prediction import Prediction


@dataclasses.dataclass(frozen=True, repr=False)
class LayerDescription(Printable):
    """One linear layer. Print it for a table.

    Args:
        path: Its path in the model.
        shape: Its input and output axes.
        stacked: The stacks that repeat it, such as `layers 12`.
        recipe: The recipe that it runs, or how it is quantized for inference; None in high precision.
        reason: Why it stays in high precision; empty for a converted layer.
        support: How its products run on the requested device; None in high precision.
        prediction: Its predicted times in bf16 and in FP8, whichever it runs in; None if not requested, or if unknown.
        uncalibrated: The operands whose static scale is not calibrated yet.
        recorded: Whether its delayed scales have recorded an amax; None if it has none. Abstract ones count
            as recorded.
        unrecorded: The operands with delayed scales that have recorded none; without the output gradient, which may be
            all zeros.
        uncalled: Why the loss never calls it, so that no product of it runs in FP8; empty if it does, and None if that
            is not known.
        is_fp4: Whether its kernel is in FP4.
        scales: How whole-tensor scales are rounded when they are applied; empty if the layer has none.
        is_linear: Whether it counts as a linear layer: not an embedding, unless it was converted, nor a convolution.
    """

    path: str
    shape: str
    stacked: str
    recipe: str | None
    reason: str
    support: Support | None = None
    prediction: Prediction | None = None
    uncalibrated: tuple[str, ...] = ()
    recorded: bool | None = None
    unrecorded: tuple[str, ...] = ()
    uncalled: str | None = None
    is_fp4: bool = False
    scales: str = ""
    is_linear: bool = True

    @property
    def is_fp8(self) -> bool:
        """Whether the layer's products run in FP8, or in FP4: it is converted, and not known to be never called."""
        return self.recipe is not None and not self.uncalled

    @property
    def precision(self) -> str:
        """What its products run in, in a word."""
        return ("FP4" if self.is_fp4 else "FP8") if self.is_fp8 else "high precision"

    @property
    def _amaxes(self) -> str:
        if self.recorded and self.unrecorded:
            return f"none of {' and '.join(self.unrecorded)} yet: zero, masked or not finite"
        return {None: "", True: "recorded", False: "none recorded yet"}[self.recorded]

    def __rich__(self) -> Table:
        """What is known of it, a row each."""
        missing = ", ".join(self.uncalibrated)
        rows = {
            "shape": self.shape,
            "stack": self.stacked,
            "runs in": f"high precision: {self.reason}" if self.recipe is None else self.uncalled or self.recipe,
            "on device": "" if self.support is None else " ".join(str(self.support).split()),
            "prediction": "" if self.prediction is None else " ".join(str(self.prediction).split()),
            "calibrate": f"first: no scale for {missing}" if missing else "",
            "amaxes": self._amaxes,
            "scales": self.scales,
        }
        table = new_table(self.path or "(the module itself)")
        table.show_header = False
        table.add_column(no_wrap=True)
        table.add_column(overflow="fold")
        for name, text in rows.items():
            if text:
                table.add_row(name, Text(text))
        return table
