"""On NVIDIA's devices every product reads FP8 and takes its scale, whatever the flags and XLA's rewriting."""

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
import jax.numpy as jnp
import pytest
from compiled_models import abstract, gradient_of, on, struct
from jax.sharding import PartitionSpec

import haliax_fp8 as fp8
from haliax_fp8.preflight.hlo import parse_hlo
from haliax_fp8.preflight.program import entry_sites, launches, opened


ROWS = 1024
In, Out, Row = hax.make_axes(embed=512, mlp=256, row=ROWS)


def scale_of(site):
    """What cuBLASLt multiplies by, beside a 1: the scalar that is not constant, behind what may be added."""
    scalars = [operand.instruction for operand in site.operands if operand.instruction.shape.dims == ()]
    return next((scalar for scalar in scalars if scalar.opcode != "constant"), scalars[0])


def products(text):
    sites = launches(entry_sites(parse_hlo(text)))
    return [site for outer in sites for site in opened(outer) if "$lt$matmul$f8" in str(site.instruction)]


def linear(In, Out):
    return hnn.Linear.init(In, Out, key=jax.random.key(0), use_bias=False)


class Projections(eqx.Module):
    """Three layers that read the same: XLA would merge their products, which are small."""

    query: hnn.Linear
    key: hnn.Linear
    value: hnn.Linear

    @staticmethod
    def init():
        return Projections(*(linear(In, Out) for _ in range(3)))

    def __call__(self, x):
        return self.query(x) + self.key(x) * self.value(x)


class Layer(eqx.Module):
    layer: hnn.Linear

    @classmethod
    def init(cls, In=In, Out=Out):
        return cls(linear(In, Out))

    def __call__(self, x):
        return self.layer(x)


class TwoInputs(Layer):
    """Two products with one kernel, neither of which waits for the other."""

    def __call__(self, x):
        return self.layer(x) * self.layer(x * x)


class OneInput(Layer):
    """The second product is the first; not so those of their gradients."""

    def __call__(self, x):
        first, second = self.layer(x), self.layer(x)
        return first * hax.sin(second)


def converted(model, change=lambda model: model, **config):
    """In bfloat16 and without its arrays."""
    return abstract(lambda: change(fp8.fp8_linear_layers(model, fp8.Fp8Config(**config))))


ODD = hax.Axis("embed", 500), hax.Axis("mlp", 250)

# A model, its input, and how many products its gradients have; None where XLA merges those with the same operand.
CASES = {
    "shared input": (lambda: converted(Projections.init(), fp8.memory.share_input_scales), (ROWS, 512), 9),
    # Layers that read the same have the very same FP8 input, and XLA merges their small products.
    "current scaling": (lambda: converted(Projections.init(), recipe="current"), (ROWS, 512), None),
    "two inputs": (lambda: converted(TwoInputs.init()), (ROWS, 512), None),
    "one input twice": (lambda: converted(OneInput.init()), (ROWS, 512), None),
    "padded": (lambda: converted(Layer.init(*ODD)), (1000, 500), 3),
}


def call(model, x):
    axes = Row.resize(x.shape[0]), In.resize(x.shape[1])
    return model(hax.named(x, axes)).array


both_flags = pytest.mark.parametrize("triton", [False, True], ids=["cuBLASLt", "XLA's defaults"])


@both_flags
@pytest.mark.parametrize(("name", "device"), on(CASES, ["h100", "b200"]))
def test_every_product_reads_fp8_and_its_scale(name, device, triton, compiled):
    make, shape, count = CASES[name]
    flags = {"xla_gpu_enable_triton_gemm": triton}
    text, report = compiled(gradient_of(call), make(), struct(*shape), device=device, compiler_options=flags)
    report.require(fp8_flops=1.0)
    assert count in (None, sum(product.executions for product in report.step.products))
    if triton:
        return
    sites = products(text)
    assert sites and count in (None, len(sites))
    for site in sites:
        # Where XLA merges, fills up or adds, the scale, which bfloat16 holds, comes in another launch.
        assert scale_of(site).shape.dtype == "f32"
        assert name != "shared input" or scale_of(site).opcode != "constant"


@pytest.mark.parametrize(
    ("rows", "kernel"),
    [(("data", None), (None, None)), ((None, "data"), (None, "data"))],
    ids=["data", "contraction"],
)
@pytest.mark.parametrize(("name", "device"), on(["divided"], ["h100"]))
def test_sums_over_devices_are_of_scaled_products(rows, kernel, name, device, compiled):
    """XLA adds what devices have before it does anything else with a product."""
    del name
    model = converted(Layer.init())
    is_kernel = lambda x: isinstance(x, jax.ShapeDtypeStruct) and x.dtype == jnp.bfloat16
    text, report = compiled(
        gradient_of(call),
        model,
        struct(ROWS, 512),
        device=device,
        mesh={"data": 8},
        shardings=(
            jax.tree.map(lambda x: PartitionSpec(*kernel) if is_kernel(x) else None, model),
            PartitionSpec(*rows),
        ),
    )
    report.require(fp8_flops=1.0)
    assert any(c.kind in ("all-reduce", "reduce-scatter") and c.dtype == "bf16" for c in report.step.collectives)
    assert products(text)


@pytest.mark.parametrize(("name", "device"), on(["mapped"], ["h100"]))
def test_mapped_gradients_multiply_in_fp8(name, device, compiled):
    """Of members with scales of their own. cuBLASLt takes one number, so another launch multiplies what it stored."""
    del name
    make = lambda: eqx.filter_vmap(lambda key: Layer(hnn.Linear.init(In, Out, key=key, use_bias=False)))(
        jax.random.split(jax.random.key(0), 3)
    )
    models = converted(eqx.filter_eval_shape(make))
    step = eqx.filter_vmap(gradient_of(call))
    text, report = compiled(step, models, struct(3, ROWS, 512), device=device)
    report.require(fp8_flops=1.0)
    assert len(products(text)) == 3
