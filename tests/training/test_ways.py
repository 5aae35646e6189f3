"""Where JAX cannot take the gradient of state by maximum: an error whose remedy works, such as a plain gradient."""

import equinox as eqx
import equinox.internal as eqxi
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_same, state_is_constant
from jax import lax
from jax.sharding import AxisType, PartitionSpec as P
from transformations import with_custom_vjp, with_filter_custom_jvp

import haliax_fp8 as fp8


CONFIG = fp8.Fp8Config(amax_history_length=4)
LAYER = fp8.fp8_linear_layers(eqx.nn.Linear(4, 4, key=jax.random.key(0)), CONFIG)
X = jax.random.normal(jax.random.key(1), (8, 4))


def batched(layer, x):
    return (jax.vmap(layer)(x) ** 2).mean()


def newest(layer):
    op = layer.dot_general
    return np.asarray([op.amax_history(operand)[..., 0] for operand in ("input", "kernel", "output_grad")])


def jitted_or_not(f):
    return pytest.mark.parametrize("jit", [eqx.filter_jit, lambda f: f], ids=["jit", "eager"])(f)


# --- Models in parts --------------------------------------------------------------------------------------------------


@state_is_constant
def test_weights_alone():
    """LoRA, freezing: the first argument is a model with None where nothing is differentiated."""
    spec = eqx.tree_at(lambda tree: tree.weight, jax.tree.map(lambda _: False, LAYER), True)
    weights, rest = eqx.partition(LAYER, spec)
    gradients = fp8.filter_grad(lambda weights: batched(eqx.combine(weights, rest), X))(weights)
    np.testing.assert_array_equal(gradients.weight, fp8.filter_grad(batched)(LAYER, X).weight)
    assert gradients.dot_general.state.table.array is None and gradients.bias is None


def test_state_and_some_of_the_weights():
    """Freezing as `require_whole_state` advises. A None comes first, and is what JAX says of the two trees."""
    is_state = lambda node: isinstance(node, fp8.OverwriteWithGradient)
    spec = jax.tree.map(is_state, LAYER, is_leaf=is_state)
    trained, frozen = eqx.partition(LAYER, eqx.tree_at(lambda tree: tree.bias, spec, True))
    assert trained.weight is None
    gradient = fp8.filter_grad(lambda trained, frozen: batched(eqx.combine(trained, frozen), X))(trained, frozen)
    expected = fp8.filter_grad(batched)(LAYER, X)
    assert_same(gradient.dot_general, expected.dot_general)
    assert_same(gradient.bias, expected.bias)
    assert gradient.weight is None


def test_trees_that_do_not_fit_are_an_error_as_without_fp8():
    with pytest.raises(ValueError, match="pytree structure error"):
        fp8.filter_grad(lambda layer: batched(layer, X) + jax.tree.map(jnp.add, [X], {"a": X})[0].sum())(LAYER)


@pytest.mark.more
@pytest.mark.parametrize("is_param", [eqx.is_inexact_array, eqx.is_array])
def test_parameters_and_state_put_together_in_the_loss(is_param):
    params, static = eqx.partition(LAYER, is_param)
    loss = lambda params: batched(eqx.combine(params, static), X) + batched(eqx.combine(params, static), 2 * X)
    expected = fp8.filter_grad(lambda layer: batched(layer, X) + batched(layer, 2 * X))(LAYER)
    assert_same(fp8.filter_grad(loss)(params), expected)


class Gate(eqx.Module):
    gate: eqx.nn.Linear
    up: eqx.nn.Linear

    def __call__(self, x):
        return self.gate(x) * self.up(x)


def test_parts_of_a_model_with_shared_input_scales_are_refused_until_they_are_separate():
    keys = jax.random.split(jax.random.key(2))
    model = fp8.fp8_linear_layers(Gate(*[eqx.nn.Linear(4, 4, key=key) for key in keys]), CONFIG)
    shared = fp8.memory.share_input_scales(model)

    def gradient(model):
        params, static = eqx.partition(model, eqx.is_array)
        return fp8.filter_grad(lambda params: batched(eqx.combine(params, static), X))(params)

    with pytest.raises(ValueError, match="separate_input_scales"):
        gradient(shared)
    expected = fp8.filter_grad(lambda model: batched(model, X))(model)
    assert_same(gradient(fp8.memory.separate_input_scales(shared)), expected)


@pytest.mark.more
def test_parts_with_branches_of_each_example_are_explained():
    params, static = eqx.partition(LAYER, eqx.is_array)
    loss = lambda layer, x: jax.vmap(lambda row: lax.cond(row[0] > 0, lambda row: layer(row), lambda row: row, row))(
        x
    ).sum()
    with pytest.raises(ValueError, match="own branch"):
        fp8.filter_grad(lambda params: loss(eqx.combine(params, static), X))(params)


# --- Branches of each example's own -----------------------------------------------------------------------------------

REFUSED = "JAX copied the state of an FP8 layer.*own branch.*eqx.filter_grad"


@pytest.mark.parametrize("stacked", [False, True], ids=["a layer", "a stack in a scan"])
def test_examples_that_skip_the_layer_are_refused_by_name(stacked):
    """Stochastic depth. A plain gradient sums what the examples record: what skipped the layer does not count."""
    keep = jnp.asarray([True, False, True, True, False, True, True, True])
    x = jnp.where(keep[:, None], X, 1000.0 * X)
    layer = jax.tree.map(lambda a: jnp.stack([a, a]), LAYER) if stacked else LAYER

    def through(layer, h, active):
        return lax.cond(active, lambda h: layer(h), lambda h: h, h)

    def selected(layer, h, active):
        return jnp.where(active, layer(jnp.where(active, h, 0.0)), h)

    def loss(layer, rows, keep, one):
        def apply(h, active):
            if not stacked:
                return one(layer, h, active)
            arrays, static = eqx.partition(layer, eqx.is_array)
            return lax.scan(lambda h, a: (one(eqx.combine(a, static), h, active), None), h, arrays)[0]

        return (jax.vmap(apply)(rows, keep) ** 2).sum()

    with pytest.raises(ValueError, match=REFUSED):
        eqx.filter_jit(fp8.filter_grad(loss))(layer, x, keep, through)
    # The remedies.
    largest = newest(eqx.filter_jit(fp8.filter_grad(loss))(layer, X[keep], jnp.ones(keep.sum(), bool), selected))
    np.testing.assert_array_equal(newest(eqx.filter_jit(fp8.filter_grad(loss))(layer, x, keep, selected)), largest)
    summed = newest(eqx.filter_jit(eqx.filter_grad(loss))(layer, x, keep, through))
    assert (summed >= largest).all() and (summed <= len(X) * largest).all()


def test_a_layer_that_is_an_operand_of_its_branch():
    def through(layer, h, active):
        return lax.cond(active, lambda layer, h: layer(h), lambda layer, h: h, layer, h)

    def loss(layer, rows, keep):
        return (jax.vmap(through, (None, 0, 0))(layer, rows, keep) ** 2).sum()

    for keep in (jnp.asarray([False, True] * 4), jnp.zeros(8, bool).at[7].set(True)):
        x = jnp.where(keep[:, None], X, 1000.0 * X)
        with pytest.raises(ValueError, match=REFUSED):
            eqx.filter_jit(fp8.filter_grad(loss))(LAYER, x, keep)
        summed = eqx.filter_jit(eqx.filter_grad(loss))(LAYER, x, keep).dot_general.amax_history("input")[0]
        np.testing.assert_allclose(summed, np.abs(x[keep]).max(axis=1).sum(), rtol=1e-6)


def test_copies_that_a_scan_takes_apart_are_refused_by_name():
    """JAX adds what the copies record: under a plain gradient the amaxes are too large, and never too small."""
    layer = fp8.fp8_linear_layers(eqx.nn.Linear(4, 4, use_bias=False, key=jax.random.key(0)), CONFIG)
    copies = (
        lambda a: jnp.broadcast_to(a, (3, *a.shape)),
        lambda a: jnp.repeat(a[None], 3, 0),
        lambda a: a[None][jnp.zeros(3, int)],
    )
    for copied in copies:

        def loss(layer, x, copied=copied):
            of_all = jax.tree.map(copied, layer)
            return (lax.scan(lambda h, one: (jax.vmap(one)(h), None), x, of_all)[0] ** 2).sum()

        inputs = [X]
        for _ in range(2):
            inputs.append(jax.vmap(layer)(inputs[-1]))
        with pytest.raises(ValueError, match="broadcast into a stack|FP8 state was sliced"):
            eqx.filter_jit(fp8.filter_grad(loss))(layer, X)
        gradient = eqx.filter_jit(eqx.filter_grad(loss))(layer, X)
        np.testing.assert_allclose(newest(gradient)[0], sum(jnp.abs(x).max() for x in inputs), rtol=1e-6)
        np.testing.assert_allclose(newest(gradient)[1], 3 * jnp.abs(layer.weight).max(), rtol=1e-6)


@pytest.mark.more
def test_no_example_takes_the_branch():
    skip = lambda layer, row: lax.cond(row[0] > 99.0, lambda row: layer(row), lambda row: row, row)
    loss = lambda layer, x: jax.vmap(lambda row: skip(layer, row))(x).sum()
    with pytest.raises(ValueError, match=REFUSED):
        fp8.filter_grad(loss)(LAYER, X)
    gradients = eqx.filter_grad(loss)(LAYER, X)
    assert_same(LAYER.dot_general.state.overwritten_by(gradients.dot_general.state), LAYER.dot_general.state)


def test_experts_that_examples_choose_from_a_stack_are_refused_by_name():
    """Each example indexes the stack: under a plain gradient, members that were chosen record the sum of who did."""
    experts = jax.tree.map(lambda a: jnp.stack([a, a, a]), LAYER)
    choice = jnp.asarray([0, 2, 0, 2, 2, 0, 0, 2])

    def loss(experts, x):
        arrays, static = eqx.partition(experts, eqx.is_array)
        chosen = lambda i: eqx.combine(jax.tree.map(lambda a: a[i], arrays), static)
        return (jax.vmap(lambda i, row: chosen(i)(row))(choice, x) ** 2).sum()

    with pytest.raises(ValueError, match="their own layer of a stack.*eqx.filter_grad"):
        eqx.filter_jit(fp8.filter_grad(loss))(experts, X)
    gradients = eqx.filter_jit(eqx.filter_grad(loss))(experts, X)
    expected = [np.abs(X[choice == i]).max(axis=1).sum() if i != 1 else 0.0 for i in range(3)]
    np.testing.assert_allclose(gradients.dot_general.amax_history("input")[:, 0], expected, rtol=1e-6)
    unused = jax.tree.map(lambda a: a[1], experts.dot_general.state.overwritten_by(gradients.dot_general.state))
    assert_same(unused, LAYER.dot_general.state)


def test_an_ensemble_of_equal_members_is_an_ensemble():
    """Copies that the user made are members: equal numbers do not make them one layer."""
    members = jax.tree.map(lambda a: jnp.stack([a, a]), LAYER)
    x = jnp.stack([X, 5 * X])
    loss = lambda layers, x: eqx.filter_vmap(batched)(layers, x).sum()
    got = eqx.filter_jit(fp8.filter_grad(loss))(members, x)
    np.testing.assert_array_equal(newest(got)[0], [np.abs(X).max(), 5 * np.abs(X).max()])


@pytest.mark.more
def test_a_mapped_custom_vjp():
    """JAX differentiates first and maps afterwards: under a plain gradient, all examples make one table."""

    def loss(layer, x):
        arrays, static = eqx.partition(layer, eqx.is_array)
        call = lambda arrays, row: eqx.combine(arrays, static)(row)
        custom = jax.custom_vjp(call)
        custom.defvjp(lambda arrays, row: jax.vjp(call, arrays, row), lambda pullback, grad: pullback(grad))
        return (jax.vmap(lambda row: custom(arrays, row))(x) ** 2).mean()

    with pytest.raises(ValueError, match="a jax.custom_vjp is mapped"):
        eqx.filter_jit(fp8.filter_grad(loss))(LAYER, X)
    gradients = eqx.filter_jit(eqx.filter_grad(loss))(LAYER, X)
    np.testing.assert_array_equal(newest(gradients), newest(fp8.filter_grad(batched)(LAYER, X)))


def test_a_plain_gradient_of_an_ensemble_is_each_members():
    """Of members that have nothing in common but their first state, and one whose output is used for nothing."""
    members = [fp8.fp8_linear_layers(eqx.nn.Linear(4, 4, key=jax.random.key(i)), CONFIG) for i in range(3)]
    scales = jnp.asarray([1.0, 3.0, 0.0])
    x = jnp.stack([X, 5 * X, 7 * X])
    loss = lambda layer, x, scale: scale * batched(layer, x)
    together = jax.tree.map(lambda *leaves: jnp.stack(leaves), *members)
    of_all = lambda layers: eqx.filter_vmap(loss)(layers, x, scales).sum()
    gradients = eqx.filter_jit(eqx.filter_grad(of_all))(together)
    alone = [eqx.filter_grad(loss)(member, x[i], scales[i]) for i, member in enumerate(members)]
    assert_same(gradients.dot_general, jax.tree.map(lambda *leaves: jnp.stack(leaves), *alone).dot_general)


def test_members_whose_kernels_have_the_same_amax_are_told_apart():
    """As those of an ensemble mostly have in bfloat16: 64 uniform kernels have one of two or three amaxes there."""
    scales, x = jnp.asarray([1.0, 3.0, 2.0]), jnp.stack([X, 5 * X, 7 * X])
    for dtype in (jnp.float32, jnp.bfloat16, jnp.float16):
        for residual in fp8.memory.KernelResidual:
            config = fp8.Fp8Config(amax_history_length=4, kernel_residual=residual)
            plain = [eqx.nn.Linear(4, 4, dtype=dtype, key=jax.random.key(i)) for i in range(3)]
            plain = [eqx.tree_at(lambda layer: layer.weight, layer, layer.weight.at[0, 0].set(1)) for layer in plain]
            members = [fp8.fp8_linear_layers(layer, config) for layer in plain]
            loss = lambda layer, x, scale: scale * batched(layer, x).astype(jnp.float32)
            together = jax.tree.map(lambda *leaves: jnp.stack(leaves), *members)
            of_all = lambda layers, x, loss=loss: eqx.filter_vmap(loss)(layers, x, scales).sum()
            gradients = eqx.filter_jit(eqx.filter_grad(of_all))(together, x.astype(dtype))
            alone = [
                eqx.filter_jit(eqx.filter_grad(loss))(each, x[i].astype(dtype), scales[i])
                for i, each in enumerate(members)
            ]
            expected = jax.tree.map(lambda *leaves: jnp.stack(leaves), *alone)
            np.testing.assert_array_equal(newest(gradients), newest(expected), err_msg=f"{dtype}, {residual}")


@pytest.mark.more
@jitted_or_not
@pytest.mark.parametrize("inner", [lambda f: f, jax.jit], ids=["", "jit inside"])
def test_gradients_of_each_example(jit, inner):
    """`vmap` around the gradient, whatever the mapped function closes over."""
    one = lambda row: newest_input(fp8.filter_grad(lambda layer: (layer(row) ** 2).sum())(LAYER))
    newest_input = lambda gradients: gradients.dot_general.amax_history("input")[0]
    np.testing.assert_array_equal(jit(jax.vmap(inner(one)))(X), jnp.abs(X).max(axis=1))


# --- Loops and solvers of others: each remedy that an error names is right -------------------------------------------


def steps(kind):
    body = lambda layer: lambda carry: (carry[0] + 1, jnp.tanh(jax.vmap(layer)(carry[1])))
    return lambda layer, x: (
        eqxi.while_loop(lambda carry: carry[0] < 2, body(layer), (0, x), max_steps=2, kind=kind)[1] ** 2
    ).mean()


def unrolled(layer, x):
    return (jnp.tanh(jax.vmap(layer)(jnp.tanh(jax.vmap(layer)(x)))) ** 2).mean()


@pytest.mark.more
@jitted_or_not
def test_checkpointed_loop_is_refused_by_name(jit):
    with pytest.raises(ValueError, match='while_loop with kind="bounded"'):
        jit(fp8.filter_grad(steps("checkpointed")))(LAYER, X)
    expected = eqx.filter_jit(fp8.filter_grad(unrolled))(LAYER, X)
    np.testing.assert_array_equal(newest(jit(fp8.filter_grad(steps("bounded")))(LAYER, X)), newest(expected))


def test_custom_root_is_refused_by_name():
    def loss(layer, x):
        equation = lambda z: z - 0.3 * jnp.tanh(jax.vmap(layer)(z)) - x
        solve = lambda f, z: lax.fori_loop(0, 20, lambda _, z: z - f(z), z)
        return lax.custom_root(equation, x, solve, lambda g, y: y).sum()

    with pytest.raises(ValueError, match="custom_root.*eqx.filter_grad"):
        fp8.filter_grad(loss)(LAYER, X)
    assert newest(eqx.filter_jit(eqx.filter_grad(loss))(LAYER, X))[0] > 1.0


@jitted_or_not
@pytest.mark.parametrize("solve", ["fixed_point", "root_find"])
def test_implicit_layers_are_refused_by_name(solve, jit):
    """A plain gradient takes it at the fixed point: `z = 0.3 tanh(layer(z)) + x`."""
    optx = pytest.importorskip("optimistix")

    def find(layer, x):
        step = lambda z, layer: 0.3 * jnp.tanh(jax.vmap(layer)(z)) + x
        if solve == "fixed_point":
            return optx.fixed_point(step, optx.FixedPointIteration(1e-6, 1e-6), x, args=layer, throw=False).value
        equation = lambda z, layer: step(z, layer) - z
        return optx.root_find(equation, optx.Newton(1e-6, 1e-6), x, args=layer, throw=False).value

    loss = lambda layer: (find(layer, X) ** 2).mean()
    with pytest.raises(ValueError, match="Optimistix.*eqx.filter_grad"):
        jit(fp8.filter_grad(loss))(LAYER)
    gradients = jit(eqx.filter_grad(loss))(LAYER)
    # The solution differs in its last bits from program to program.
    np.testing.assert_allclose(newest(gradients)[0], np.abs(find(LAYER, X)).max(), rtol=1e-4)
    assert (newest(gradients) > 0).all() and np.abs(gradients.weight).max() > 0


def ode(adjoint):
    diffrax = pytest.importorskip("diffrax")
    term = diffrax.ODETerm(lambda t, y, layer: jnp.tanh(jax.vmap(layer)(y)))
    options = {"adjoint": getattr(diffrax, adjoint)(), "max_steps": 4}
    return lambda layer, x: diffrax.diffeqsolve(term, diffrax.Euler(), 0, 1, 0.5, x, layer, **options).ys.sum()


@pytest.mark.parametrize("adjoint", ["RecursiveCheckpointAdjoint", "BacksolveAdjoint"])
def test_adjoints_that_take_state_for_a_constant_are_refused_by_name(adjoint):
    with pytest.raises(ValueError, match="all adjoints of Diffrax but diffrax.DirectAdjoint"):
        fp8.filter_grad(ode(adjoint))(LAYER, X)


def test_direct_adjoint():
    def euler(layer, x):
        for _ in range(2):
            x = x + 0.5 * jnp.tanh(jax.vmap(layer)(x))
        return x.sum()

    expected = eqx.filter_jit(fp8.filter_grad(euler))(LAYER, X)
    got = eqx.filter_jit(fp8.filter_grad(ode("DirectAdjoint")))(LAYER, X)
    np.testing.assert_allclose(newest(got), newest(expected), rtol=1e-5)


# --- Meshes -----------------------------------------------------------------------------------------------------------


@jitted_or_not
@pytest.mark.parametrize("check_vma", [True, False])
def test_gradient_around_shard_map(jit, check_vma):
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,))
    specs = {"mesh": mesh, "in_specs": (P(), P("x")), "out_specs": P(), "check_vma": check_vma}
    mapped = lambda f: (
        lambda layer, x: jax.shard_map(f(eqx.filter(layer, eqx.is_array, inverse=True)), **specs)(
            eqx.filter(layer, eqx.is_array), x
        )
    )
    around = mapped(lambda static: lambda arrays, x: lax.pmean(batched(eqx.combine(arrays, static), x), "x"))
    inside = mapped(
        lambda static: lambda arrays, x: fp8.filter_grad(batched)(eqx.combine(arrays, static), x).dot_general.state
    )
    expected = newest(fp8.filter_grad(batched)(LAYER, X))
    state = jit(inside)(LAYER, X)
    np.testing.assert_array_equal(state.array[:2, 1], expected[:2])
    if not check_vma:
        with pytest.raises(ValueError, match="check_vma=True"):
            jit(fp8.filter_grad(around))(LAYER, X)
        return
    np.testing.assert_array_equal(newest(jit(fp8.filter_grad(around))(LAYER, X))[:2], expected[:2])


@jitted_or_not
@pytest.mark.parametrize("recompute", [True, False])
def test_a_branch_per_example_in_shard_map_is_refused_by_name(jit, recompute):
    """Without `check_vma` the plain gradient raises as well, so it cannot tell whose error this is."""
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,))
    arrays, static = eqx.partition(LAYER, eqx.is_array)
    take = fp8.filter_grad(
        lambda layer, x: jax.vmap(lambda row: lax.cond(row[0] > 0, lambda row: layer(row), lambda row: row, row))(
            x
        ).sum(),
        recompute_in_scans=recompute,
    )
    inside = lambda arrays, x: eqx.filter(take(eqx.combine(arrays, static), x), eqx.is_array)
    mapped = jax.shard_map(inside, mesh=mesh, in_specs=(P(), P("x")), out_specs=P(), check_vma=False)
    with pytest.raises(ValueError, match=r"each take their own branch.*jnp\.where"):
        jit(mapped)(arrays, X)


@pytest.mark.parametrize("take", [fp8.filter_grad, fp8.filter_value_and_grad, fp8.training.exact_gradients])
def test_choices_of_another_kind(take):
    with pytest.raises(ValueError, match="has_aux=1 of .* must be True or False"):
        take(batched, has_aux=1)


def test_state_of_another_history_length():
    longer = fp8.fp8_linear_layers(eqx.nn.Linear(4, 4, key=jax.random.key(0)), fp8.Fp8Config(amax_history_length=8))
    gradients, others = fp8.filter_grad(batched)(LAYER, X), fp8.filter_grad(batched)(longer, X)
    message = "another recipe.*amax_history_length=8.*the model has .*amax_history_length=4"
    with pytest.raises(ValueError, match=f"overwrites .*{message}"):
        overwrites, updates = (
            fp8.partition_for_grad_overwrite(others)[0],
            fp8.partition_for_grad_overwrite(gradients)[1],
        )
        fp8.apply_updates(LAYER, updates, overwrites)
    with pytest.raises(ValueError, match=f"gradients .*{message}"):
        fp8.accumulate_gradients(gradients, others)


# --- How the user runs things -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("debug", [jax.debug_nans, jax.debug_infs])
def test_debug_nans(debug):
    with debug(True):
        got = fp8.filter_grad(batched)(LAYER, X)
    np.testing.assert_array_equal(newest(got), newest(fp8.filter_grad(batched)(LAYER, X)))


def test_debug_nans_still_finds_them():
    with jax.debug_nans(True), pytest.raises(FloatingPointError):
        fp8.filter_grad(lambda layer, x: jnp.log(-jnp.abs(batched(layer, x)) - 1.0))(LAYER, X)


@pytest.mark.more
def test_disable_jit():
    stack = jax.tree.map(lambda a: jnp.stack([a, a]), LAYER)

    def loss(stack, x):
        arrays, static = eqx.partition(stack, eqx.is_array)
        step = lambda h, a: (jax.vmap(eqx.combine(a, static))(h), None)
        return (lax.scan(step, x, arrays)[0] ** 2).mean()

    with jax.disable_jit():
        got = fp8.filter_grad(loss)(stack, X)
    np.testing.assert_array_equal(newest(got), newest(fp8.filter_grad(loss)(stack, X)))


@jitted_or_not
def test_debug_key_reuse(jit):
    expected = newest(jit(fp8.filter_grad(batched))(LAYER, X))
    with jax.debug_key_reuse(True):
        np.testing.assert_array_equal(newest(jit(fp8.filter_grad(batched))(LAYER, X)), expected)


@jitted_or_not
def test_errors_of_the_function_itself_are_the_users(jit):
    def loss(layer, x):
        assert x.shape == (3, 4), "three rows"
        return batched(layer, x)

    with pytest.raises(AssertionError, match="three rows"):
        jit(fp8.filter_grad(loss))(LAYER, X)
    with pytest.raises(ValueError, match="broadcast"):
        jit(fp8.filter_grad(lambda layer, x: (jax.vmap(layer)(x) + jnp.ones(3)).sum()))(LAYER, X)


@jitted_or_not
@pytest.mark.parametrize("mode", ["off", "tracebackhide", "remove_frames", "quiet_remove_frames"])
def test_whose_assertion_failed_does_not_depend_on_the_frames_that_jax_shows(mode, jit):
    """Equinox asserts without a message, and so may the user."""
    call = with_filter_custom_jvp(with_custom_vjp(lambda op, w, x, flag: op(x, w, (((1,), (0,)), ((), ())))))
    of_equinox = lambda layer, x: call(layer.dot_general, layer.weight.T, x, jnp.asarray(True)).sum()

    def of_user(layer, x):
        out = batched(layer, x)
        assert out.shape == (1,)
        return out

    before = jax.config.jax_traceback_filtering
    jax.config.update("jax_traceback_filtering", mode)
    try:
        with pytest.raises(AssertionError):
            jit(fp8.filter_grad(of_user))(LAYER, X)
        with pytest.raises(ValueError, match="custom derivative of Equinox.*eqx.filter_grad"):
            jit(fp8.filter_grad(of_equinox))(LAYER, X)
    finally:
        jax.config.update("jax_traceback_filtering", before)


def test_a_gradient_outside_of_jit_is_compiled_once_for_each_loss():
    """A loop without `jit` asks for a new gradient function of the same loss every time."""
    calls = []

    def loss(layer, x):
        calls.append(jax.typeof(x))
        return batched(layer, x)

    for i in range(3):
        gradient = fp8.filter_grad(loss)(LAYER, X * i)
        np.testing.assert_array_equal(newest(gradient)[0], np.abs(X * i).max())
    assert len(calls) == 1


@jitted_or_not
def test_casts_of_state_are_explained(jit):
    """JAX calls state float32, and says no more than that it cannot be cast."""
    cast = lambda x: x.astype(jnp.bfloat16) if eqx.is_array(x) else x
    loss = lambda layer: batched(jax.tree.map(cast, layer), X.astype(jnp.bfloat16)).astype(jnp.float32)
    with pytest.raises(ValueError, match="^FP8 state was cast inside the differentiated function"):
        jit(fp8.filter_grad(loss))(LAYER)


def test_a_loss_that_casts_floating_arrays_leaves_state_alone():
    cast = lambda x: x.astype(jnp.bfloat16) if eqx.is_inexact_array(x) else x
    got = fp8.filter_grad(lambda layer, x: batched(*jax.tree.map(cast, (layer, x))))(LAYER, X)
    np.testing.assert_array_equal(newest(got)[0], np.abs(X.astype(jnp.bfloat16)).max())


def test_state_that_equinox_loses_is_refused():
    """Here no rule of the product sees it: the loss changes with the state, and nothing arrives."""
    call = with_filter_custom_jvp(with_custom_vjp(lambda op, w, x, flag: op(x, w, (((1,), (0,)), ((), ())))))
    op = fp8.Fp8DotGeneral.init(fp8.DelayedScaling(amax_history_length=4))
    loss = lambda params: call(*params, X, jnp.asarray(True)).sum()
    with pytest.raises(ValueError, match="filter_custom_jvp.*eqx.filter_grad"):
        fp8.filter_grad(loss)((op, jnp.ones((4, 4))))
