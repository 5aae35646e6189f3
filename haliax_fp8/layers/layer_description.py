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
    scales: str = ""
    is_linear: bool = True

    @property
    def is_fp8(self) -> bool:
        """Whether the layer's products run in FP8."""
        return self.recipe is not None

    def __rich__(self) -> Table:
        """What is known of it, a row each."""
        missing = ", ".join(self.uncalibrated)
        rows = {
            "shape": self.shape,
            "stack": self.stacked,
            "runs in": f"high precision: {self.reason}" if self.recipe is None else self.recipe,
            "on device": "" if self.support is None else " ".join(str(self.support).split()),
            "prediction": "" if self.prediction is None else " ".join(str(self.prediction).split()),
            "calibrate": f"first: no scale for {missing}" if missing else "",
            "amaxes": {None: "", True: "recorded", False: "none recorded yet"}[self.recorded],
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
