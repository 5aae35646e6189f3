"""muon_dimensions: which arrays Muon orthogonalizes, and as which matrices."""

from typing import Any

import haliax as hax
import haliax.nn as hnn
import jax
from optax.contrib import MuonDimensionNumbers

from .._tensor_names import is_embedding, is_head
from ..layers.checks import require_model, require_no_quantized_kernels
from ..layers.config import Fp8Config, default_rules
from ..layers.quantized_kernels import is_floating
from ..layers.rule import LayerRule, Refused
from ..layers.walk import find_layers, rule_of
from .updates import trainable_part


def muon_dimensions(model: Any, *, rules: tuple[LayerRule, ...] = default_rules) -> Any:
    """For `optax.contrib.muon`: the input and output axes of each linear layer's weight, and None for all else.

    By itself `optax.contrib.muon` takes arrays of two axes, which are embeddings, heads and stacked norms in many
    models, and leaves weights with more axes to Adam. With this tree it orthogonalizes the weight of every linear
    layer as a matrix from all input axes to all output axes, for each layer of a stack, member of an ensemble and
    expert alone. Norms, biases, embeddings, heads, vectors and layers that `describe` lists without axes go to Adam.

    The tree has the structure of `trainable(model)`, so it is a model itself. Optax calls trees that can be called,
    hence the `lambda` in the example. To choose otherwise for a layer, change the tree, as with `eqx.tree_at`.

    Args:
        model: The model that is trained, after conversion.
        rules: The `Fp8Config(rules=...)` with which it was converted, to find the weights of your own layer classes.

    Raises:
        ValueError: If no weight of a linear layer is trained, or a layer's `Kernel` does not tell inputs from outputs.

    Example:
        >>> dimensions = muon_dimensions(model)
        >>> dimensions.layers[0].weight.array
        MuonDimensionNumbers(reduction_axis=(1,), output_axis=(0,))
        >>> optimizer = optax.contrib.muon(1e-3, muon_weight_dimension_numbers=lambda _: dimensions)
        >>> opt_state = TrainStep(loss_fn, optimizer).init(model)
    """
    require_model(model, "muon_dimensions(model)")
    require_no_quantized_kernels(model)
    Fp8Config(rules=rules)  # raises unless they are rules
    dimension_numbers: dict[int, MuonDimensionNumbers] = {}
    for path, (layer, stack) in find_layers(model, rules).items():
        rule = rule_of(layer, rules)
        if isinstance(rule, Refused) or isinstance(layer, hnn.Embedding) or is_head(path) or is_embedding(path):
            continue
        kernel = rule.kernel(layer)
        if not is_floating(kernel):  # in another part, or not an array
            continue
        array = kernel.weight.array if isinstance(kernel.weight, hax.NamedArray) else kernel.weight
        axes = kernel.matrix_axes(stack)
        if axes is None:
            raise ValueError(
                f"the LayerRule of {path or 'the model itself'} does not say which axes of its weight, of shape "
                f"{array.shape}, are inputs and which are outputs. Set them in its Kernel: Kernel(..., "
                "contracted=(0,)), or In and Out"
            )
        sizes = [[array.shape[axis] for axis in part] for part in axes]
        if all(any(size > 1 for size in part) for part in sizes):
            dimension_numbers[id(array)] = MuonDimensionNumbers(*axes)
    dimensions = [dimension_numbers.get(id(x)) for x in jax.tree.leaves(trainable_part(model))]
    if not any(dimensions):
        raise ValueError(
            "model has no linear layer whose weight is trained, so Muon has nothing to do: give it the part that is "
            "trained, or use optax.adamw"
        )
    return jax.tree.unflatten(jax.tree.structure(trainable_part(model)), dimensions)
