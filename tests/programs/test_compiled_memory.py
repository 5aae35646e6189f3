"""What a step keeps and what devices send each other: of each operand its FP8 copy, and no other."""

import functools
from collections import Counter

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import pytest
from compiled_models import (
    EMBED,
    EXPERTS,
    HIDDEN,
    KINDS,
    LAYERS,
    ONE_BLOCK,
    TOKENS,
    Pair,
    converted,
    gradient_of,
    inputs,
    loss_of,
    on,
    plain,
    struct,
    with_one_architecture,
)
from jax.sharding import PartitionSpec
from kept_arrays import kept_arrays, residuals, xla_name

import haliax_fp8 as fp8
from haliax_fp8.preflight import inspect_step
from haliax_fp8.preflight.hlo import parse_hlo
from haliax_fp8.preflight.program import entry_sites, launches, opened
from haliax_fp8.preflight.sizes import dimensions
from haliax_fp8.preflight.traffic import is_launch


E4M3 = "f8e4m3fn"
NARROW, WIDE, KERNEL = TOKENS * EMBED, TOKENS * HIDDEN, EMBED * HIDDEN
"""Elements of the activations that are as wide as the model, of those between its layers, and of a kernel."""

# 640 rows are so few that XLA for TPUs takes most amaxes of the forward pass during the backward pass: all activations
# fit in VMEM, so it costs no memory that they wait there.
ENOUGH = {"tpu7x": 8}
"""Times as many rows, for what a program keeps."""


def of_all_blocks(name, arrays):
    """The arrays of one block, for a model: a loop stacks those of its blocks, checkpoints keep none."""
    if name == "scan with checkpointing":
        return Counter()
    if name == "scan":
        return Counter({(dtype, LAYERS * size): count for (dtype, size), count in arrays.items()})
    return Counter({array: KINDS[name].blocks * count for array, count in arrays.items()})


# --- What JAX keeps ---------------------------------------------------------------------------------------------------


def large_residuals(kind, model):
    """Without scales and histories, which are small."""
    arrays = residuals(loss_of(kind.call), (model, inputs()))
    return Counter({(dtype, size): count for (dtype, size), count in arrays.items() if size >= KERNEL})


@pytest.mark.parametrize("name", KINDS)
def test_fp8_copies_are_kept_in_place_of_operands(name):
    """The block needs for itself what SiLU and the norm read, and keeps that as before."""
    kind = KINDS[name]
    before, after = large_residuals(kind, plain(kind)), large_residuals(kind, converted(kind))
    # Kernels are parameters, there to be quantized again; a stack would keep the slices of them, and keeps copies.
    kernels = 3 * name.startswith("scan")
    # Devices that gather kernels need what they gathered. XLA drops it from programs whose devices have whole kernels.
    sent_kernels = 3 if kind.experts == 1 else kernels
    kernel = kind.experts * KERNEL
    # The norm's output, operand of two layers; what `down` reads; three kernels.
    operands = {("bf16", NARROW): 1, ("bf16", WIDE): 1, ("bf16", kernel): kernels}
    # Layers have scales of their own, and so copies of their own.
    copies = {(E4M3, NARROW): 2, (E4M3, WIDE): 1, (E4M3, kernel): sent_kernels}
    assert before - after == +of_all_blocks(name, operands)
    assert after - before == +of_all_blocks(name, copies)


@pytest.mark.parametrize("recipe", fp8.recipes.named)
def test_every_recipe_keeps_what_its_gradients_multiply(recipe):
    before = large_residuals(ONE_BLOCK, plain(ONE_BLOCK))
    after = large_residuals(ONE_BLOCK, converted(ONE_BLOCK, recipe=recipe))
    products = fp8.recipes.named[recipe].products
    (for_wgrad, _), (_, for_dgrad) = products["wgrad"], products["dgrad"]
    # Where the amax would have to be taken again, copies of kernels are kept.
    kernels = 3 * fp8.recipes.named[recipe].measures_kernel_again
    operands = Counter({("bf16", KERNEL): kernels})
    # Of stored scales, both are there until XLA drops one.
    sent_kernels = 3 if for_dgrad.scaling.stores_scale else kernels
    copies = Counter({(xla_name(for_dgrad.format.storage), KERNEL): sent_kernels})
    if for_wgrad.scaling.quantizes:
        dtype = xla_name(for_wgrad.format.storage)
        operands += Counter({("bf16", NARROW): 1, ("bf16", WIDE): 1})
        copies += Counter({(dtype, NARROW): 2, (dtype, WIDE): 1})
    assert (before - after, after - before) == (+operands, +copies)


@jax.custom_vjp
def read_in_backward(x):
    """The same; its gradient reads x as it is."""
    return x


read_in_backward.defvjp(lambda x: (x, x), lambda x, grad: (grad + 0 * x,))


class KeepsBoth(eqx.Module):
    """A faulty op: it quantizes its input, and keeps it in bfloat16 as well."""

    op: fp8.Fp8DotGeneral

    def __call__(self, lhs, rhs, *args, **kwargs):
        return self.op(read_in_backward(lhs), rhs, *args, **kwargs)


def sabotaged(model):
    is_op = lambda node: isinstance(node, fp8.Fp8DotGeneral)
    return jax.tree.map(lambda node: KeepsBoth(node) if is_op(node) else node, model, is_leaf=is_op)


@pytest.mark.parametrize("name", ["unrolled", "scan"])
def test_an_op_that_keeps_both_is_found(name):
    kind = KINDS[name]
    good, faulty = converted(kind), sabotaged(converted(kind))
    beside = large_residuals(kind, faulty) - large_residuals(kind, good)
    assert beside.keys() == of_all_blocks(name, {("bf16", NARROW): 1, ("bf16", WIDE): 1}).keys()


# --- What a program keeps ---------------------------------------------------------------------------------------------


@pytest.fixture
def activations(compiled):
    """The activations that a step keeps, as a device's compiler has it, as if there were `TOKENS` rows."""

    def activations_of(call, model, device):
        times = ENOUGH.get(device, 1)
        text, report = compiled(gradient_of(call), model, inputs(times * TOKENS), device=device)
        counts = {
            (dtype, size // times): count
            for (dtype, size), count in kept_arrays(text).items()
            if (size % (times * NARROW) == 0 or size % EDGED == 0) and dtype in (E4M3, "bf16", "f32")
        }
        return Counter(counts), report

    return activations_of


def widths(arrays):
    """In FP8, or wider: GPUs keep the output of a layer in float32, and round it where they read it."""
    counts = Counter()
    for (dtype, size), count in arrays.items():
        counts[E4M3 if dtype == E4M3 else "wider", size] += count
    return counts


# A grouped GPU kernel takes the first and the last piece of 64 rows of each expert once more; XLA keeps the input so.
EDGED = NARROW + 2 * EXPERTS * 64 * EMBED

OUTPUT = Counter({("wider", NARROW): 1})
"""Of the model: the loss reads it."""


@pytest.mark.parametrize(
    ("name", "device"), with_one_architecture(on(name for name in KINDS if name != "twice vmapped Equinox"))
)
def test_what_a_program_keeps_is_in_fp8(name, device, activations):
    """Nothing but the products of this model asks for its activations."""
    narrow = EDGED if (name, device) == ("experts", "h100") else NARROW
    expected = of_all_blocks(name, {(E4M3, narrow): 1, (E4M3, WIDE): 1}) + OUTPUT
    if name == "scan with checkpointing":
        expected["wider", LAYERS * NARROW] += 1  # The blocks' inputs.
    if name == "scan":
        # A body that recomputes measures its products' inputs again, from what it keeps: its own input, and the first
        # layer's output, between which and the second nothing is computed.
        expected += of_all_blocks(name, {("wider", NARROW): 1, ("wider", WIDE): 1})
    arrays, report = activations(KINDS[name].call, converted(KINDS[name], Pair), device)
    assert widths(arrays) == expected
    report.require(fp8_flops=1.0)


@pytest.mark.parametrize(("name", "device"), on(["unrolled", "scan"], ["h100", "tpu7x"]))
def test_what_is_kept_in_bfloat16_is_found(name, device, activations):
    """The same reading, on a model that is not converted and on a faulty op."""
    kind = KINDS[name]
    in_bf16 = of_all_blocks(name, {("wider", NARROW): 1, ("wider", WIDE): 1}) + OUTPUT
    if name == "unrolled":
        in_bf16["wider", NARROW] -= 1  # The first block's input is an argument.
    arrays, _ = activations(kind.call, plain(kind, Pair), device)
    assert {dtype for dtype, _ in arrays} == {"bf16"} and widths(arrays) == in_bf16
    copies = of_all_blocks(name, {(E4M3, NARROW): 1, (E4M3, WIDE): 1})
    arrays, _ = activations(kind.call, sabotaged(converted(kind, Pair)), device)
    assert widths(arrays) >= in_bf16 + copies


# --- What a program reads ---------------------------------------------------------------------------------------------


class Gated(eqx.Module):
    """SwiGLU with the sizes of Llama-8B: how XLA fuses depends on them."""

    gate: eqx.nn.Linear
    up: eqx.nn.Linear
    down: eqx.nn.Linear

    rows = (8192, 4096)
    inner = 14336

    @staticmethod
    def init(*, key, linear):
        width = Gated.rows[1]
        linear = functools.partial(eqx.nn.Linear, use_bias=False, key=key)
        return Gated(linear(width, Gated.inner), linear(width, Gated.inner), linear(Gated.inner, width))

    def __call__(self, x):
        return self.down(self.activation(self.gate(x), self.up(x)))

    @staticmethod
    def activation(gate, up):
        return jax.nn.silu(gate) * up


class GatedInFloat32(Gated):
    """The same, its activation rematerialized."""

    @staticmethod
    def init(*, key, linear):
        gated = Gated.init(key=key, linear=linear)
        return GatedInFloat32(gated.gate, gated.up, gated.down)

    @staticmethod
    def activation(gate, up):
        return fp8.memory.rematerialized(Gated.activation, compute_dtype=jnp.float32)(gate, up)


CALLS = {"plain": lambda model, x: jax.vmap(model)(x)}
CALLS["checkpointed"] = lambda model, x: eqx.filter_checkpoint(CALLS["plain"])(model, x)


@pytest.mark.parametrize("model", [Gated, GatedInFloat32])
@pytest.mark.parametrize(("name", "device"), on(CALLS, ["h100"]))
def test_an_activation_is_read_once_in_each_pass(name, device, model, compiled):
    """Quantized forward; backward, quantized again or measured, together with both of its gradients."""
    step, rows = gradient_of(CALLS[name]), struct(*Gated.rows)
    text, _ = compiled(step, converted(KINDS["vmapped Equinox"], model), rows, device=device)
    sites = [site for site in launches(entry_sites(parse_hlo(text))) if is_launch(site)]
    products = [site for site in sites if any(dimensions(inside) for inside in opened(site))]
    others = [site for site in sites if site not in products]
    wide = (Gated.rows[0], Gated.inner)
    reading = [site for site in sites if sum(operand.instruction.shape.dims == wide for operand in site.operands) >= 2]
    assert len(products) == 9 + 2 * (name == "checkpointed")
    assert len(reading) == 2 and all(site in others for site in reading)
    # One gradient in bfloat16, before it is cast; none where the derivative is computed in float32.
    written = [shape for site in others for shape in site.results if shape.dims == wide and shape.dtype == "bf16"]
    assert len(written) == (model is Gated)


# --- What devices send each other -------------------------------------------------------------------------------------


def by_rows(x):
    return hax.named(jax.lax.with_sharding_constraint(x.array, PartitionSpec("data", None)), x.axes)


class DividedPair(Pair):
    """Activations stay divided by their rows."""

    @staticmethod
    def init(*, key):
        pair = Pair.init(key=key)
        return DividedPair(pair.up, pair.down)

    def __call__(self, x):
        return by_rows(self.down(by_rows(self.up(x))))


@pytest.mark.parametrize(("name", "device"), on(["unrolled", "scan"]))
def test_weights_are_gathered_in_one_byte_each(name, device):
    """Kernels divided over devices (FSDP), rows too: each layer's kernel is gathered in FP8, at most twice."""
    model = converted(KINDS[name], DividedPair)
    is_kernel = lambda x: isinstance(x, jax.ShapeDtypeStruct) and x.dtype == jnp.bfloat16 and x.size >= KERNEL
    divided = PartitionSpec(*[None] * (name == "scan"), "data", None)
    report = inspect_step(
        gradient_of(KINDS[name].call),
        model,
        inputs(),
        device=device,
        mesh={"data": 4 if device == "tpu7x" else 8},
        shardings=(jax.tree.map(lambda x: divided if is_kernel(x) else None, model), PartitionSpec("data", None)),
    )
    report.require(fp8_flops=1.0)
    gathers = [c for c in report.step.collectives if c.kind == "all-gather"]
    assert {c.dtype for c in gathers} == {E4M3}
    weights = LAYERS * 2 * KERNEL
    # The amaxes of a kernel's rows travel too.
    rows = 2 * LAYERS * (EMBED + HIDDEN)
    assert weights <= sum(c.bytes * c.executions for c in gathers) <= 2 * weights + rows
