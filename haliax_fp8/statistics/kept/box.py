"""BlackBox: the operands of a layer's products, and what it takes to compute them again."""

import dataclasses
import json
import os
import pathlib
from importlib import metadata
from typing import Any

import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy
from jax import lax
from rich.console import Group, RenderableType
from rich.text import Text

from ..._printing import Printable, new_table
from ..._product.dimensions import DotDimensions
from ..._product.dot import DotContraction
from ...recipes.recipe import OperandName, ProductName, Recipe
from ..result import numbered
from .recipe_json import recipe_from_json, recipe_to_json


_KIND = "haliax_fp8 black box"


@dataclasses.dataclass(frozen=True, repr=False, eq=False)
class BlackBox(Printable):
    """What `black_box` kept of one layer, as a file holds it. Print it to see what is inside.

    Args:
        input: The layer's input, as its product takes it: with the axes that `vmap` mapped.
        kernel: Its weight, as its product takes it.
        output_grad: The gradient of the product.
        state: The table of the op's state, before the step; None for a stateless recipe.
        key: The words of the key that rounding draws from; None without one.
        contraction: What is multiplied with what.
        recipe: The op's recipe.
        compute_dtype: The op's; None if it has none.
        out_dtype: The dtype of the product.
        precision: The precision of fprop.
        layer: The path of the layer.
        index: Which layer of a stack.
        operand: The operand for which this layer was kept.
        product: The first product that reads it.
        reason: What is wrong with it, in words.
        step: The training step; None if not said.
    """

    input: np.ndarray
    kernel: np.ndarray
    output_grad: np.ndarray
    state: np.ndarray | None
    key: np.ndarray | None
    contraction: DotContraction
    recipe: Recipe
    compute_dtype: np.dtype | None
    out_dtype: np.dtype
    precision: lax.Precision
    layer: str
    index: tuple[int, ...]
    operand: OperandName
    product: ProductName
    reason: str
    step: int | None = None

    @property
    def bytes(self) -> int:
        """The size of all arrays."""
        return sum(x.nbytes for x in self._arrays.values())

    @property
    def where(self) -> str:
        """The layer, in words."""
        return numbered(self.layer, self.index)

    @property
    def _arrays(self) -> dict[str, np.ndarray]:
        arrays = {name: getattr(self, name) for name in ("input", "kernel", "output_grad", "state", "key")}
        return {name: x for name, x in arrays.items() if x is not None}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes a safetensors file, which `replay` and `haliax-fp8 replay FILE` read.

        Args:
            path: The file.

        Raises:
            ValueError: If it cannot be written.
        """
        dims = self.contraction.dimensions
        described: dict[str, Any] = {
            "dimensions": dataclasses.asdict(dims),
            "kernel_first": self.contraction.kernel_first,
            "recipe": recipe_to_json(self.recipe),
            "compute_dtype": None if self.compute_dtype is None else self.compute_dtype.name,
            "out_dtype": self.out_dtype.name,
            "precision": self.precision.name,
            **{name: getattr(self, name) for name in ("layer", "index", "operand", "product", "reason", "step")},
            "versions": {name: metadata.version(name) for name in ("jax", "ml_dtypes", "numpy")},
        }
        arrays = {name: np.ascontiguousarray(x) for name, x in self._arrays.items()}
        try:
            safetensors.numpy.save_file(arrays, path, {"kind": _KIND, "black_box": json.dumps(described)})
        except (safetensors.SafetensorError, OSError) as error:
            raise ValueError(
                f"path={os.fspath(path)!r} cannot be written: {error}; give a file in a folder that exists"
            ) from error

    @staticmethod
    def load(path: str | os.PathLike[str]) -> "BlackBox":
        """Reads what `save` wrote.

        Args:
            path: The file.

        Raises:
            ValueError: If there is none, or it is not such a file.
        """
        path = pathlib.Path(path)
        if not path.is_file():
            what = "is a folder" if path.is_dir() else "does not exist"
            raise ValueError(f"{path} {what}; give a file that black_box(...).save(path) wrote")
        try:
            with safetensors.safe_open(path, "np") as file:
                described = file.metadata() or {}
                # Before the tensors, which may be of types that NumPy lacks.
                if described.get("kind") != _KIND:
                    raise ValueError(f"{path} is not a black box; give a file that black_box(...).save(path) wrote")
                arrays = {name: file.get_tensor(name) for name in file.keys()}
        except (safetensors.SafetensorError, OSError) as error:
            raise ValueError(f"{path} is not a safetensors file: {error}") from error
        try:
            return BlackBox._of_file(json.loads(described["black_box"]), arrays)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(
                f"{path} is damaged, or of another version: {type(error).__name__}: {error}; copy it again, or save "
                "the box again"
            ) from error

    @staticmethod
    def _of_file(found: dict[str, Any], arrays: dict[str, np.ndarray]) -> "BlackBox":
        of_axes: dict[str, Any] = {
            name: tuple(x) if isinstance(x, list) else x for name, x in found["dimensions"].items()
        }
        dtype = found["compute_dtype"]
        return BlackBox(
            *(arrays[name] for name in ("input", "kernel", "output_grad")),
            state=arrays.get("state"),
            key=arrays.get("key"),
            contraction=DotContraction(DotDimensions(**of_axes), kernel_first=found["kernel_first"]),
            recipe=recipe_from_json(found["recipe"]),
            compute_dtype=None if dtype is None else np.dtype(jnp.dtype(dtype)),
            out_dtype=np.dtype(jnp.dtype(found["out_dtype"])),
            precision=lax.Precision[found["precision"]],
            layer=found["layer"],
            index=tuple(found["index"]),
            **{name: found[name] for name in ("operand", "product", "reason", "step")},
        )

    def __rich__(self) -> RenderableType:
        step = "" if self.step is None else f", step {self.step}"
        table = new_table(f"Black box of {self.where}{step}")
        for column in ("operand", "shape", "dtype"):
            table.add_column(column)
        table.add_column("amax", justify="right")
        table.add_column("not finite", justify="right")
        for name in ("input", "kernel", "output_grad"):
            x = getattr(self, name)
            values = np.abs(x.astype(np.float32))
            finite = np.isfinite(values)
            amax = float(values[finite].max()) if finite.any() else 0.0
            table.add_row(name, str(list(x.shape)), x.dtype.name, f"{amax:.3g}", str(int((~finite).sum())))
        why = f"kept for {self.operand}, in {self.product}: {self.reason}"
        return Group(table, Text(why), Text(f"recipe: {self.recipe}; {self.bytes:,} bytes"))
