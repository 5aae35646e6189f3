"""What things are: which operand is the kernel, and which layer a head, a router, frozen, or a part of an adapter."""

import dataclasses

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from haliax_fp8 import Fp8Config, Fp8DotGeneral, describe, filter_grad, fp8_linear_layers, quantize_kernels
from haliax_fp8.folders import convert_folder
from haliax_fp8.huggingface import export_model, import_model
from haliax_fp8.layers import Kernel, LayerRule, default_rules
from haliax_fp8.models import add_lora
from haliax_fp8.serving import quantize_for_inference


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


def assert_recorded(model, x, op_of, rules=default_rules):
    """The histories hold the amax of the input, and of the kernel; also if the kernel is quantized beforehand."""
    for before in (lambda m: m, lambda m: quantize_kernels(m, rules=rules)):
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
        assert_recorded(fp8_linear_layers(layer, config), x, Op(weight), config.rules)


@pytest.mark.parametrize("case", SIZES)
def test_the_kernel_of_equinox_is_the_second_operand(case):
    """A matrix holds examples in its columns, as many as there are outputs or not."""
    Out, In, (_, *columns) = SIZES[case]
    layer = eqx.nn.Linear(In, Out, use_bias=False, key=jax.random.key(0))
    x = drawn(1, (In, columns[0]), 5.0)
    assert_recorded(fp8_linear_layers(layer, amax_history_length=4), x, Op(layer.weight))


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


# --- layers -----------------------------------------------------------------------------------------------------------


def linear(In=32, Out=32):
    return eqx.nn.Linear(In, Out, key=jax.random.key(0))


def in_fp8(model):
    return {row.path for row in describe(model).layers if row.is_fp8}


def assert_left_alone(model, left, tmp_path):
    """What serving, export and the conversion of folders leave in high precision, by default."""
    served = quantize_for_inference(model, "FP8_DYNAMIC")
    exported = export_model(model, tmp_path / "exported", "FP8_DYNAMIC")
    export_model(model, tmp_path / "plain", "BF16")
    converted = convert_folder(tmp_path / "plain", tmp_path / "converted", "FP8_DYNAMIC")
    every = {row.path for row in describe(model).layers}
    assert every - in_fp8(served) == set(exported.ignore) == left
    assert every - {weight.name.removesuffix(".weight") for weight in converted.weights} == left


HEADS = [
    "head",
    "lm_head",
    "score",
    "classifier",
    "embed_out",
    "unembed",
    "logits",
    "to_logits",
    "output_layer",
    "output",
]


@pytest.mark.parametrize("name", HEADS)
def test_heads(name, tmp_path):
    model = {"up": linear(), name: linear(), "attention": {"output": linear()}}
    assert describe(fp8_linear_layers(model)).head == name
    assert_left_alone(model, {name}, tmp_path)


@pytest.mark.parametrize(
    "model, left",
    [
        ({"moe": {"gate": linear(), "experts": [{"up": linear()}]}}, {"moe.gate"}),
        ({"moe": {"router": {"layer": linear()}, "up": linear()}}, {"moe.router.layer"}),
        ({"mlp": {"gate": linear(), "value": linear()}}, set()),
        ({"mlp": {"shared_expert_gate": linear(), "up": linear()}}, {"mlp.shared_expert_gate"}),
    ],
    ids=["gate of experts", "router", "gate of a unit", "gate of a shared expert"],
)
def test_routers(model, left, tmp_path):
    """A gate chooses experts if there are any beside it; otherwise it is that of a gated unit."""
    assert {row.path for row in describe(fp8_linear_layers(model)).layers} - in_fp8(fp8_linear_layers(model)) == left
    assert_left_alone(model, left, tmp_path)


def test_heads_and_routers_by_the_names_of_the_checkpoint(tmp_path):
    """Engines know no others: what the model calls a layer does not matter to them."""
    model = {"up": linear(), "words": linear(), "moe": {"choose": linear(), "expert": linear()}}
    names = {"words": "lm_head", "moe.choose": "mlp.gate", "moe.expert": "mlp.experts.0.up_proj"}
    exported = export_model(model, tmp_path / "folder", "FP8_DYNAMIC", names=names)
    assert exported.quantized == 2 and set(exported.ignore) == {"lm_head", "mlp.gate"}


class Tied(eqx.Module):
    shared: eqx.nn.Shared


def test_a_tied_layer_has_no_weight_to_quantize():
    model = (eqx.nn.Embedding(64, 32, key=jax.random.key(0)), linear(), linear(32, 64))
    tied = Tied(eqx.nn.Shared(model, lambda m: m[2].weight, lambda m: m[0].weight))
    assert in_fp8(quantize_for_inference(tied, "FP8_DYNAMIC")) == {"shared.pytree.1"}
    for converted, options in ((fp8_linear_layers(tied), {}), (tied, {"targets": "2"})):
        with pytest.raises(ValueError, match=r"shared\.pytree\.2.* cannot be quantized: eqx\.nn\.Shared.*exclude it"):
            quantize_for_inference(converted, "FP8_DYNAMIC", **options)


@pytest.fixture
def frozen(tmp_path):
    model = {"up": linear(), "down": linear(), "head": linear()}
    export_model(model, tmp_path / "folder", "FP8_DYNAMIC")
    return import_model(tmp_path / "folder", model, weights="frozen")


def test_frozen_layers_are_not_converted(frozen):
    with pytest.raises(ValueError, match=r"no other layer to convert, and down, up cannot be .*serving\.dequantize"):
        fp8_linear_layers(frozen, exclude="head")
    with pytest.warns(UserWarning, match=r"^down, up cannot be converted.*serving\.dequantize") as caught:
        model = fp8_linear_layers(frozen)
    assert caught[0].filename == __file__ and in_fp8(model) == {"head"}
    assert in_fp8(fp8_linear_layers(frozen, targets="head")) == {"head"}
    with pytest.raises(ValueError, match=r"select up, which cannot be converted: .*serving\.dequantize"):
        fp8_linear_layers(frozen, targets="up")


class Pair(eqx.Module):
    up: hnn.Linear
    down: hnn.Linear

    @staticmethod
    def init(*, key):
        In, Out = hax.make_axes(inner=16, outer=32)
        return Pair(*(hnn.Linear.init(*axes, key=key) for axes in ((In, Out), (Out, In))))


def test_adapters_are_not_converted():
    stack = hnn.Stacked.init(hax.Axis("layers", 3), Pair)(key=jax.random.split(jax.random.key(0), 3))
    for model, prefix in ((stack, "adapted.stacked."), (eqx.nn.MLP(32, 32, 64, 1, key=jax.random.key(0)), "adapted.")):
        adapted = add_lora(model, rank=2, key=jax.random.key(1))
        rows = describe(fp8_linear_layers(adapted)).layers
        assert {row.path.rpartition(".")[2] for row in rows if row.is_fp8} == {"base"}
        assert all("adapter" in row.reason and "a target names it" in row.reason for row in rows if not row.is_fp8)
        assert len(rows) == 6 and all(row.path.startswith(prefix) for row in rows)
        named = in_fp8(fp8_linear_layers(adapted, targets=["A", "B"]))
        assert {path.rpartition(".")[2] for path in named} == {"A", "B"}


@pytest.mark.parametrize("rank, is_high", [(15, False), (16, True), (1000, True)])
def test_a_rank_that_is_not_low(rank, is_high):
    layer = {"rank": rank, "key": jax.random.key(1)}
    if is_high:
        with pytest.warns(UserWarning, match=rf"rank={rank} is not below .*the model itself \(16 -> 32\)"):
            add_lora(linear(16, 32), **layer)
    else:
        add_lora(linear(16, 32), **layer)


@pytest.mark.parametrize(
    "options, pattern",
    [
        ({"exclude": "*"}, r"excluded by '\*'"),
        ({"exclude": ["up", "*.down"]}, r"excluded by '\*\.down'"),
        ({"overrides": {"*": None}}, r"the override '\*'"),
        ({"targets": "up", "exclude": "up"}, "excluded by 'up'"),
    ],
    ids=str,
)
def test_patterns_that_leave_nothing(options, pattern):
    model = {"up": linear(), "block": {"down": linear()}}
    with pytest.warns(UserWarning, match=f"converted no layer: .*{pattern}"):
        assert not in_fp8(fp8_linear_layers(model, **options))
