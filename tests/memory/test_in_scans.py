"""The bodies of scans in differentiated functions: they recompute elementwise work alone, and no value changes."""

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import unchecked
from jax.experimental.xla_metadata import set_xla_metadata
from jax.extend.core import jaxprs_in_params
from jax.sharding import AxisType, PartitionSpec

import haliax_fp8 as fp8
from haliax_fp8.memory import KernelResidual, RecomputeElementwise


Embed, Mlp, Rows, Blocks = hax.make_axes(embed=32, mlp=64, rows=16, block=3)


class Block(eqx.Module):
    """A feed-forward layer with its activation in the block's own code, as most people write it."""

    norm: hnn.RmsNorm
    gate: hnn.Linear
    up: hnn.Linear
    down: hnn.Linear

    @staticmethod
    def init(*, key):
        keys = jax.random.split(key, 3)
        linear = lambda In, Out, key: hnn.Linear.init(In, Out, key=key, use_bias=False)
        layers = linear(Embed, Mlp, keys[0]), linear(Embed, Mlp, keys[1]), linear(Mlp, Embed, keys[2])
        return Block(hnn.RmsNorm.init(Embed, use_bias=False), *layers)

    def __call__(self, x):
        h = self.norm(x)
        return x + self.down(hnn.silu(self.gate(h)) * self.up(h))


def blocks(dtype=jnp.bfloat16, checkpointing=False, **config):
    stacked = hnn.Stacked.init(Blocks, Block, gradient_checkpointing=checkpointing)
    model = stacked(key=jax.random.split(jax.random.key(0), Blocks.size))
    model = jax.tree.map(lambda x: x.astype(dtype) if eqx.is_inexact_array(x) else x, model)
    return fp8.fp8_linear_layers(model, fp8.Fp8Config(**config))


def inputs(dtype=jnp.bfloat16):
    return hax.random.normal(jax.random.key(1), (Rows, Embed)).astype(dtype)


def loss(model, x):
    return (model.fold(x).astype(jnp.float32) ** 2).mean().scalar()


def run(function, *args):
    """Its result, compiled with all the roundings that are written."""
    return eqx.filter_jit(function, compiler_options={"xla_allow_excess_precision": False})(*args)


def assert_same_bits(a, b):
    for one, other in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(one, other)


def scan_of(function, *args):
    """The first scan of a function."""
    arrays, static = eqx.partition(args, eqx.is_array)
    program = jax.make_jaxpr(lambda arrays: eqx.filter(function(*eqx.combine(arrays, static)), eqx.is_array))(arrays)

    def find(program):
        for equation in program.eqns:
            if equation.primitive.name == "scan":
                return equation
            for inside in jaxprs_in_params(equation.params):
                if (found := find(inside)) is not None:
                    return found
        return None

    return find(program)


def stacked_by(function, *args):
    """What its first scan stacks, without scalars."""
    found = [x.aval for x in scan_of(function, *args).outvars if x.aval.shape[:1] == (Blocks.size,)]
    return sorted((x.dtype.name, *x.shape[1:]) for x in found if x.ndim > 2)


ACTIVATION = Rows.size, Mlp.size
NARROW = Rows.size, Embed.size
KEPT = [("bfloat16", *NARROW), *[("bfloat16", *ACTIVATION)] * 2]
"""The block's input and what `gate` and `up` return."""
OPERANDS = [*[("float8_e4m3fn", *NARROW)] * 2, ("float8_e4m3fn", *ACTIVATION)]
KERNELS = [*[("float8_e4m3fn", Mlp.size, Embed.size)] * 2, ("float8_e4m3fn", Embed.size, Mlp.size)]


def both(function, *args):
    """Loss and gradients, which hold the next state, with and without the policy."""
    return [
        run(fp8.filter_value_and_grad(function, recompute_in_scans=recompute), *args) for recompute in (True, False)
    ]


@pytest.mark.parametrize("recipe", fp8.recipes.named)
def test_every_recipe_has_the_same_bits(recipe):
    model = blocks(recipe=recipe)
    if recipe == "static":
        model = fp8.calibrate(model, loss, [inputs()])
    keyed = lambda model, x: loss(fp8.with_rounding_keys(model, jax.random.key(2)), x)
    assert_same_bits(*both(keyed, model, inputs()))


def test_a_scan_stacks_what_products_read_and_return():
    gradient = lambda recompute: fp8.filter_grad(loss, recompute_in_scans=recompute)
    found = stacked_by(gradient(True), blocks(), inputs())
    assert found == sorted(KEPT + OPERANDS)
    assert len(stacked_by(gradient(False), blocks(), inputs())) > 2 * len(found)


@pytest.mark.parametrize(
    ("config", "kernels"),
    [
        ({"kernel_residual": KernelResidual.KEEP}, KERNELS),
        ({"recipe": "current"}, KERNELS),
        ({"kernel_residual": KernelResidual.REQUANTIZE}, []),
    ],
)
def test_kernels_that_are_to_be_kept_are_kept(config, kernels):
    found = stacked_by(fp8.filter_grad(loss), blocks(**config), inputs())
    in_fp8 = [x for x in found if x[0].startswith("float8")]
    assert sorted(in_fp8) == sorted([(name, *shape) for name, *shape in OPERANDS + kernels])


def test_the_policy_of_a_stack_by_hand_does_the_same():
    """For users of `eqx.filter_grad`."""
    model = blocks(checkpointing=RecomputeElementwise())
    assert stacked_by(eqx.filter_grad(loss), model, inputs()) == sorted(KEPT + OPERANDS)


def test_the_policy_in_a_scan_of_ones_own():
    """Of a product, its activation and a norm: what the product reads and returns, and the mean, which is narrow."""

    def body(x, kernel):
        h = jax.nn.silu(x @ kernel)
        return x + h / jnp.sqrt((h**2).mean(axis=-1, keepdims=True)), None

    def of(x, kernels):
        checkpoint = jax.checkpoint(body, policy=RecomputeElementwise(), prevent_cse=False)
        return jax.lax.scan(checkpoint, x, kernels)[0].sum()

    kernels = jnp.ones((Blocks.size, Embed.size, Embed.size))
    found = stacked_by(jax.grad(of, argnums=(0, 1)), jnp.ones(NARROW), kernels)
    assert found == [("float32", *NARROW)] * 2


@pytest.mark.parametrize("checkpointing", [True, RecomputeElementwise()])
def test_a_body_that_is_a_checkpoint_stays(checkpointing):
    bodies = [
        scan_of(fp8.filter_grad(loss, recompute_in_scans=recompute), blocks(checkpointing=checkpointing), inputs())
        for recompute in (True, False)
    ]
    assert str(bodies[0]) == str(bodies[1])


def test_eager_gradients_may_depend_on_values():
    """Outside of compiled programs nothing is traced."""
    by_value = lambda x: x * x if x > 0 else -x
    assert fp8.filter_grad(by_value)(jnp.float32(3.0)) == 6.0


def test_switches_are_checked():
    for make in (fp8.filter_grad, fp8.filter_value_and_grad, lambda f, **k: fp8.TrainStep(f, optax.sgd(0.1), **k)):
        with unchecked(), pytest.raises(ValueError, match="recompute_in_scans='no' .* must be True or False"):
            make(loss, recompute_in_scans="no")


# --- What loops and bodies hold ---------------------------------------------------------------------------------------


def scanned(call):
    """A loss that scans over blocks with `call(block, x)` in the body."""

    return lambda model, x: hax.fold(lambda x, block: call(block, x), Blocks)(x, model.stacked)


def mean_square(fold):
    return lambda model, x: (fold(model, x).astype(jnp.float32) ** 2).mean().scalar()


@jax.custom_vjp
def halved_gradient(x):
    return x


halved_gradient.defvjp(lambda x: (x, x), lambda x, g: (0.5 * g + 0 * x,))


def with_custom_vjp(block, x):
    return hax.named(halved_gradient(block(x).array), x.axes)


def with_while(block, x):
    factor = jax.lax.while_loop(lambda s: s[0] < 3, lambda s: (s[0] + 1, s[1] * 1.25), (0, jnp.float32(1.0)))[1]
    return block(x) * jax.lax.stop_gradient(factor).astype(x.dtype)


def with_scan(block, x):
    """The same block twice, in a loop of its own."""
    factors = jnp.ones((2,), x.dtype)
    return jax.lax.scan(lambda x, factor: (hax.tanh(block(x)) * factor, None), x, factors)[0]


def with_dropout(block, x):
    mask = jax.random.bernoulli(jax.random.key(3), 0.5, x.array.shape)
    return block(hax.named(jnp.where(mask, x.array, jnp.zeros_like(x.array)), x.axes))


def with_attention(block, x):
    """Naive, with a softmax: its reductions are kept."""
    h = block(x)
    scores = hax.dot(h, h.rename({"rows": "keys"}), axis=Embed) * 0.1
    return hax.dot(hnn.softmax(scores, "keys"), h.rename({"rows": "keys"}), axis="keys")


def with_branch(block, x):
    return jax.lax.cond(x.array.sum() > 0, lambda x: block(x), lambda x: x, x)


def in_jit(model, x):
    return eqx.filter_jit(scanned(lambda block, x: eqx.filter_jit(block)(x)))(model, x)


def in_branch(model, x):
    return jax.lax.cond(x.array.sum() > -1e6, lambda x: scanned(lambda block, x: block(x))(model, x), lambda x: x, x)


def in_vmap(model, x):
    fold = scanned(lambda block, x: block(x))
    return hax.vmap(lambda x: fold(model, x), Rows)(x)


def in_shard_map(model, x):
    """Devices sum something in the body."""
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    fold = scanned(lambda block, x: block(x) + 1e-3 * jax.lax.psum(x.array.sum(), "data"))
    arrays, static = eqx.partition(model, eqx.is_array)

    def local(arrays, x):
        rows = hax.named(x, (Rows.resize(x.shape[0]), Embed))
        return fold(eqx.combine(arrays, static), rows).array

    parts = PartitionSpec(), PartitionSpec("data")
    return hax.named(jax.shard_map(local, mesh=mesh, in_specs=parts, out_specs=parts[1])(arrays, x.array), x.axes)


CONSTRUCTS = {
    "jit": in_jit,
    "a while loop in the body": scanned(with_while),
    "a custom_vjp in the body": scanned(with_custom_vjp),
    "shard_map": in_shard_map,
    "vmap": in_vmap,
    "a scan in the body": scanned(with_scan),
    "dropout in the body": scanned(with_dropout),
    "attention in the body": scanned(with_attention),
    "a branch in the body": scanned(with_branch),
    "a branch": in_branch,
}


@pytest.mark.parametrize("name", CONSTRUCTS)
def test_constructs_have_the_same_bits_and_stack_less(name):
    function, model, x = mean_square(CONSTRUCTS[name]), blocks(), inputs()
    gradients = [fp8.filter_value_and_grad(function, recompute_in_scans=recompute) for recompute in (True, False)]
    assert_same_bits(*both(function, model, x))
    size = lambda gradient: sum(x.aval.size * x.aval.dtype.itemsize for x in scan_of(gradient, model, x).outvars)
    assert size(gradients[0]) < 0.7 * size(gradients[1])


def test_reductions_are_kept():
    """The softmax's, and nothing else as small: each of them takes another pass over the scores."""
    scores = Rows.size, Rows.size
    gradient = fp8.filter_grad(mean_square(scanned(with_attention)))
    outvars = scan_of(gradient, blocks(), inputs()).outvars
    sums = [x.aval for x in outvars if x.aval.shape == (Blocks.size, Rows.size)]
    # The norm's mean square, and the softmax's maximum and sum.
    assert len(sums) == 3
    assert [x for x in stacked_by(gradient, blocks(), inputs()) if x[1:] == scores] == [("bfloat16", *scores)]


def test_effects_happen_once():
    """A body that prints, or reports, is left alone."""
    calls = []

    def reporting(block, x):
        jax.debug.callback(lambda _: calls.append(1), x.array.sum())
        return block(x)

    run(fp8.filter_grad(mean_square(scanned(reporting))), blocks(), inputs())
    jax.effects_barrier()
    assert len(calls) == Blocks.size


def test_the_context_of_an_equation_stays_its_own():
    """The body's first product has metadata for XLA, which the checkpoint's others must not get."""

    def of(kernels, x):
        def body(x, kernel):
            with set_xla_metadata(marked="yes"):
                x = x @ kernel
            return jnp.tanh(x) @ kernel.T, None

        return jax.lax.scan(body, x, kernels)[0].sum()

    def marked_products(recompute):
        gradient = jax.jit(fp8.filter_grad(of, recompute_in_scans=recompute))
        text = gradient.lower(jnp.ones((3, 8, 8)), jnp.ones((4, 8))).as_text()
        return sum("marked" in line for line in text.splitlines() if "dot_general" in line)

    assert marked_products(True) == marked_products(False) > 0


def test_complex_numbers():
    """JAX's checkpoints cannot keep them: it rounds what is kept with `reduce_precision`, which takes reals alone."""

    def of(kernels, x):
        def body(x, kernel):
            waves = jnp.fft.rfft(jnp.tanh(x @ kernel))
            return jnp.fft.irfft(waves * jnp.conj(waves)), None

        return jax.lax.scan(body, x, kernels)[0].sum()

    assert_same_bits(*both(of, jnp.full((3, 8, 8), 0.1), jnp.ones((4, 8))))


def test_forward_mode_over_the_gradient():
    """Of a model without FP8, with and without checkpoints."""
    model = fp8.restore_linear_layers(blocks(jnp.float32))
    arrays, static = eqx.partition(model, eqx.is_array)

    def directional(recompute):
        gradient = fp8.filter_grad(loss, recompute_in_scans=recompute)
        of = lambda arrays: eqx.filter(gradient(eqx.combine(arrays, static), inputs(jnp.float32)), eqx.is_array)
        return jax.jit(lambda arrays: jax.jvp(of, (arrays,), (arrays,))[1])(arrays)

    for a, b in zip(jax.tree.leaves(directional(True)), jax.tree.leaves(directional(False)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
