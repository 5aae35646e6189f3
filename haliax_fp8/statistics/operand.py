"""Operand: all that the checks know of one operand of one layer; and what they see in it."""

import dataclasses
from collections.abc import Mapping

import numpy as np

from ..formats import Format
from ..layers import Fp8DotGeneral
from ..layers.walk import named_ops
from ..recipes import OperandName, Quantization, Recipe
from ..training import OpState
from .history import History
from .result import OPERANDS, ModelStatistics, OpStatistics, is_concrete, numbered


@dataclasses.dataclass(frozen=True)
class Operand:
    """One operand of one layer: its statistics as numbers, its history, and how it is quantized.

    Args:
        layer: The path of the layer.
        index: Which layer of a stack.
        name: "input", "kernel" or "output_grad".
        numbers: The fields of `OpStatistics`.
        history: The amaxes of past steps; None if the scaling keeps none.
        recipe: The op's recipe.
        numbers_experts: Whether the last number of the index is that of an expert.
    """

    layer: str
    index: tuple[int, ...]
    name: OperandName
    numbers: dict[str, float]
    history: History | None
    recipe: Recipe
    numbers_experts: bool = False

    def __getitem__(self, statistic: str) -> float:
        return self.numbers[statistic]

    @property
    def numbered_layer(self) -> str:
        """The layer, with its number in a stack."""
        return numbered(self.layer, self.index)

    @property
    def layer_of_experts(self) -> str:
        """The same, without the number of an expert."""
        return numbered(self.layer, self.index[:-1] if self.numbers_experts else self.index)

    @property
    def quantization(self) -> Quantization:
        """How it is quantized."""
        return getattr(self.recipe, self.name)

    @property
    def format(self) -> Format:
        """The format that it is quantized to."""
        return self.quantization.format

    @property
    def amax_of_scale(self) -> float:
        """The amax that its scale is made for; with blocks, the largest."""
        return self["scale"] * self.format.max / 2.0 ** getattr(self.quantization.scaling, "margin", 0)

    @property
    def is_reached(self) -> bool:
        """Whether the loss depends on it."""
        return not np.isnan(self.numbers["amax"])


@dataclasses.dataclass(frozen=True)
class Seen:
    """What a check sees in an operand; the last three are fields of `Finding`."""

    operand: Operand
    numbers: Mapping[str, float]
    limits: Mapping[str, float]
    others: tuple[str, ...] = ()


def operands(model: object, statistics: ModelStatistics) -> list[Operand]:
    """Every operand, in the order of the model's tree.

    Args:
        model: The model that the statistics are of.
        statistics: From `quantization_statistics`, outside `jit`.

    Raises:
        ValueError: If they are of another model.
    """
    ops = dict(named_ops(model))
    if ops.keys() != set(statistics.paths):
        missing = sorted(ops.keys() ^ set(statistics.paths))
        raise ValueError(
            f"statistics do not belong to this model: {missing[:3]} are in only one of the two; measure it with "
            "quantization_statistics(model, loss_fn, *batch)"
        )
    if not all(map(is_concrete, statistics.of_ops)):
        raise ValueError(
            "statistics are traced or abstract, and have no numbers; return them from the jitted function, and call "
            "diagnose outside jit"
        )
    operands = []
    for path, op in ops.items():
        stack, measured = _stack(op), statistics[path].amax.shape[:-1]
        if stack not in (None, measured):
            raise ValueError(
                f"statistics do not belong to this model: at {path or 'model'}, the model has a stack of {stack} "
                f"layers, the statistics one of {measured}; measure this model with "
                "quantization_statistics(model, loss_fn, *batch)"
            )
        fields = {name: getattr(statistics[path], name) for name in OpStatistics.__dataclass_fields__}
        arrays = {name: np.asarray(values) for name, values in fields.items() if values is not None}
        for index in np.ndindex(arrays["amax"].shape[:-1]):
            for row, name in enumerate(OPERANDS):
                numbers = {field: float(array[*index, row]) for field, array in arrays.items()}
                history = History.of(op, row, index)
                operands.append(Operand(path, index, name, numbers, history, op.recipe, op.state_per_group))
    return operands


def _stack(op: Fp8DotGeneral) -> tuple[int, ...] | None:
    """The shape of the stack that an op's layer is in; None if the op keeps no state to read it from."""
    table = op.state.table.array if isinstance(op.state, OpState) else None
    return None if table is None else table.shape[:-2]
