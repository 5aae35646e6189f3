"""Models of every kind, abstract, and the devices that tests compile them for."""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
import jax.numpy as jnp
import pytest

import haliax_fp8 as fp8
from haliax_fp8.preflight import Program, compilable_devices
from haliax_fp8.preflight.hlo import parse_hlo
from haliax_fp8.preflight.instruction import Call


# So that no two arrays of a step have as many elements, unless they are of the same kind.
LAYERS, TOKENS, EMBED, HIDDEN, EXPERTS = 3, 640, 128, 256, 4
Layers, Token, Embed, Hidden, Experts = hax.make_axes(
    layers=LAYERS, token=TOKENS, embed=EMBED, hidden=HIDDEN, experts=EXPERTS
)
FLOPS = 2 * TOKENS * EMBED * HIDDEN
"""Of one product: all layers are as large."""

DEVICES = ("h100", "b200", "tpu7x")


def on(names: Iterable[str], devices: Iterable[str] = DEVICES) -> list:
    """Each name with each device, skipped where the device's compiler is not installed."""
    names, cases = list(names), []
    for device in devices:
        missing = compilable_devices[device].missing()
        skip = pytest.mark.skipif(missing is not None, reason=missing or "")
        cases += [pytest.param(name, device, marks=[skip, pytest.mark.slow], id=f"{name}-{device}") for name in names]
    return cases


def with_one_architecture(cases: list) -> list:
    """Without experts on a second architecture of NVIDIA's: JAX compiles Pallas kernels for one in a process.

    `test_compiled_grouped.py` compiles for each in a process of its own.
    """
    return [case for case in cases if case.values != ("experts", "b200")]


# --- Blocks -----------------------------------------------------------------------------------------------------------


def haliax_linear(In: hax.Axis, Out: hax.Axis, key: Any, use_bias: bool) -> hnn.Linear:
    return hnn.Linear.init(In, Out, key=key, use_bias=use_bias)


def equinox_linear(In: hax.Axis, Out: hax.Axis, key: Any, use_bias: bool) -> eqx.nn.Linear:
    return eqx.nn.Linear(In.size, Out.size, use_bias=use_bias, key=key)


def expert_linear(In: hax.Axis, Out: hax.Axis, key: Any, use_bias: bool) -> hnn.MoELinear:
    return hnn.MoELinear.init(Experts, In, Out, key=key, use_bias=use_bias)


class SwiGLU(eqx.Module):
    """RMSNorm and SwiGLU, as in Llama."""

    norm: Any
    gate: Any
    up: Any
    down: Any

    names = ("gate", "up", "down")

    @staticmethod
    def init(*, key, linear=haliax_linear):
        keys = jax.random.split(key, 3)
        norm = eqx.nn.RMSNorm(EMBED, use_bias=False) if linear is equinox_linear else hnn.RmsNorm.init(Embed)
        gate, up = (linear(Embed, Hidden, keys[i], False) for i in (0, 1))
        return SwiGLU(norm, gate, up, linear(Hidden, Embed, keys[2], False))

    def __call__(self, x, *sizes):
        h = self.norm(x)
        return x + self.down(hnn.silu(self.gate(h, *sizes)) * self.up(h, *sizes), *sizes)


class Pair(eqx.Module):
    """Two linear layers and nothing between: what is kept for the backward pass is kept for their products."""

    up: Any
    down: Any

    names = ("up", "down")

    @staticmethod
    def init(*, key, linear=haliax_linear):
        keys = jax.random.split(key)
        return Pair(linear(Embed, Hidden, keys[0], True), linear(Hidden, Embed, keys[1], True))

    def __call__(self, x, *sizes):
        return self.down(self.up(x, *sizes), *sizes)


# --- Kinds of models --------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Kind:
    """A way to make a model of blocks.

    Args:
        make: Makes one of blocks of a class.
        call: Applies it to an array `[tokens, EMBED]`.
        blocks: How many blocks it has.
        recomputes: Whether a block's forward pass runs twice, but for its last product, which no gradient reads.
        experts: How many kernels a layer has.
    """

    make: Callable[[Any], Any]
    call: Callable[[Any, Any], Any]
    blocks: int = 1
    recomputes: bool = False
    experts: int = 1

    def runs(self, layers: int) -> dict[str, int]:
        """How often fprop, dgrad and wgrad run in a step, for blocks of so many layers."""
        forward = layers + (layers - 1 if self.recomputes else 0)
        return {"fprop": self.blocks * forward, "dgrad": self.blocks * layers, "wgrad": self.blocks * layers}


def _single(linear):
    return lambda block: block.init(key=jax.random.key(0), linear=linear)


def _stacked(stack, **options):
    return lambda block: stack.init(Layers, block, **options)(key=jax.random.split(jax.random.key(0), LAYERS))


def _named(x):
    return hax.named(x, (Token.resize(x.shape[0]), Embed))


def _fold(model, x):
    return model.fold(_named(x)).array


def _to_experts(model, x):
    return model(_named(x), hax.full(Experts, x.shape[0] // EXPERTS, jnp.int32)).array


def _vmapped_twice(model, x):
    return jax.vmap(jax.vmap(model))(x.reshape(4, -1, EMBED))


KINDS = {
    "unrolled": Kind(_stacked(hnn.BlockSeq), _fold, LAYERS),
    "scan": Kind(_stacked(hnn.Stacked), _fold, LAYERS),
    "scan with checkpointing": Kind(_stacked(hnn.Stacked, gradient_checkpointing=True), _fold, LAYERS, True),
    "vmapped Equinox": Kind(_single(equinox_linear), lambda model, x: jax.vmap(model)(x)),
    "twice vmapped Equinox": Kind(_single(equinox_linear), _vmapped_twice),
    "experts": Kind(_single(expert_linear), _to_experts, experts=EXPERTS),
}
ONE_BLOCK = Kind(_single(haliax_linear), lambda model, x: model(_named(x)).array)


# --- Steps ------------------------------------------------------------------------------------------------------------


def struct(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def inputs(tokens: int = TOKENS) -> jax.ShapeDtypeStruct:
    return struct(tokens, EMBED)


def plain(kind: Kind, block: Any = SwiGLU) -> Any:
    """A model without its arrays, in bfloat16."""
    return abstract(lambda: kind.make(block))


def converted(kind: Kind, block: Any = SwiGLU, recipe: str = "delayed") -> Any:
    """The same with FP8 layers."""
    # What a device would refuse is emulated: so the report has to say.
    config = fp8.Fp8Config(recipe=recipe, emulate=True)
    return abstract(lambda: fp8.fp8_linear_layers(kind.make(block), config))


def abstract(make: Callable[[], Any], dtype: Any = jnp.bfloat16) -> Any:
    """What is made, without its arrays; those in float32 are in a dtype, but for the state of FP8 products."""
    is_state = lambda node: isinstance(node, fp8.OverwriteWithGradient)
    cast = lambda x: struct(*x.shape, dtype=dtype) if getattr(x, "dtype", None) == jnp.float32 else x
    return jax.tree.map(lambda x: x if is_state(x) else cast(x), eqx.filter_eval_shape(make), is_leaf=is_state)


def unknown_calls(program: Program) -> set[str]:
    """The custom calls of a compiled program that the preflight has no word for, wherever they are."""
    calls = (i for c in parse_hlo(program.text).computations.values() for i in c if i.opcode == "custom-call")
    return {i.custom_call_name for i in calls if i.call_kind is Call.UNKNOWN}


def loss_of(call: Callable[[Any, Any], Any]) -> Callable[[tuple[Any, Any]], Any]:
    """A loss of a model and its input; random rounding gets a key."""

    def loss(model_and_x):
        model, x = model_and_x
        model = fp8.with_rounding_keys(model, jax.random.key(0))
        return (call(model, x).astype(jnp.float32) ** 2).mean()

    return loss


def gradient_of(call: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Gradients of the model and of its input, so that all layers have all three products."""
    return lambda model, x: fp8.filter_grad(loss_of(call))((model, x))
