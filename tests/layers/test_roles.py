"""Which operand is the kernel, as a rule says."""

import dataclasses

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from haliax_fp8 import Fp8Config, Fp8DotGeneral, filter_grad, fp8_linear_layers, quantize_kernels
from haliax_fp8.layers import Kernel, LayerRule, default_rules


# --- operands ---------------------------------------------------------------------------------------------------------


class Pointwise(eqx.Module):
    """A 1x1 convolution, `weight @ x`: the kernel is the first operand."""

    weight: jax.Array | hax.NamedArray
    op: Fp8DotGeneral | None = None

    @staticmethod
    def init(weight):
        return Pointwise(weight)

    def __call__(self, x):
        weight = self.weight.array if isinstance(self.weight, hax.NamedArray) else self.weight
        dot = jax.lax.dot_general if self.op is None else self.op
        return dot(weight, x, (((1,), (0,)), ((), ())))


@dataclasses.dataclass(frozen=True)
class PointwiseRule(LayerRule):
    first: bool | None = None
    layer_type = Pointwise

    def refusal(self, layer):
        return None

    def kernel(self, layer):
        if isinstance(layer.weight, hax.NamedArray):
            Out, In = (layer.weight.resolve_axis(name) for name in ("out", "in"))
            return Kernel(layer.weight, In, Out, first=self.first)
        return Kernel(layer.weight, *layer.weight.shape[:-3:-1], contracted=(1,), first=self.first)

    def op(self, layer):
        return layer.op

    def with_op(self, layer, op):
        return dataclasses.replace(layer, op=op)


def config_of(first):
    return Fp8Config(rules=(PointwiseRule(first), *default_rules), amax_history_length=4)


def drawn(seed, shape, scale=1.0):
    return scale * jax.random.normal(jax.random.key(seed), shape)


def amax(x):
    return np.max(np.abs(x))


def assert_recorded(model, x, op_of, config):
    """The histories hold the amax of the input, and of the kernel; also if the kernel is quantized beforehand."""
    for before in (lambda m: m, lambda m: quantize_kernels(m, config)):
        op = op_of(filter_grad(lambda m, before=before: jnp.sum(before(m)(x) ** 2))(model))
        assert op.amax_history("input")[0] == amax(x)
        assert op.amax_history("kernel")[0] == amax(op_of.weight)


@dataclasses.dataclass
class Op:
    weight: jax.Array

    def __call__(self, model):
        return model.dot_general if isinstance(model, eqx.nn.Linear) else model.op


SIZES = {"wide": (64, 32, (32, 8, 8)), "batch is Out": (64, 32, (32, 64)), "square": (32, 32, (32, 32))}


@pytest.mark.parametrize("is_named", [False, True], ids=["sizes", "names"])
@pytest.mark.parametrize("case", SIZES)
def test_a_kernel_that_is_the_first_operand(case, is_named):
    Out, In, shape = SIZES[case]
    weight, x = drawn(0, (Out, In)), drawn(1, shape, 5.0)
    layer = Pointwise(hax.named(weight, ("out", "in")) if is_named else weight)
    # Sizes tell, unless both operands could be the kernel.
    for first in (None, True) if case == "wide" else (True,):
        config = config_of(first)
        assert_recorded(fp8_linear_layers(layer, config), x, Op(weight), config)


@pytest.mark.parametrize("case", SIZES)
def test_the_kernel_of_equinox_is_the_second_operand(case):
    """A matrix holds examples in its columns, as many as there are outputs or not."""
    Out, In, (_, *columns) = SIZES[case]
    layer = eqx.nn.Linear(In, Out, use_bias=False, key=jax.random.key(0))
    x = drawn(1, (In, columns[0]), 5.0)
    assert_recorded(fp8_linear_layers(layer, amax_history_length=4), x, Op(layer.weight), None)


def test_the_order_of_a_stack():
    """Each block has the histories of its operands, where sizes do not decide."""
    weights = drawn(0, (3, 32, 32), 0.1)
    stack = hnn.Stacked.init(hax.Axis("layers", 3), Pointwise)(hax.named(weights, ("layers", "out", "in")))
    model = fp8_linear_layers(stack, config_of(True))
    x = drawn(1, (32, 32), 5.0)
    op = filter_grad(lambda m: jnp.sum(m.fold(x) ** 2))(model).stacked.op
    np.testing.assert_array_equal(op.amax_history("kernel")[:, 0], np.max(np.abs(weights), axis=(1, 2)))
    assert op.amax_history("input")[0, 0] == amax(x)


def test_an_order_that_sizes_contradict():
    layer = fp8_linear_layers(Pointwise(drawn(0, (64, 32))), config_of(False))
    with pytest.raises(ValueError, match=r"only the first has .* \(64,\); .*kernel_first=False.*Kernel\(first=False\)"):
        layer(drawn(1, (32, 8)))
