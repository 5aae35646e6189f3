"""`choose`: its order, what it does not compile, what it keeps, and the lines that it prints."""

import dataclasses
import json

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
import jax.numpy as jnp
import optax
import pytest

import haliax_fp8 as fp8
from haliax_fp8.preflight import Choice, Choices, LocalDevice, Peaks, choose, inspect_step


TOY = LocalDevice("toy", "a toy", Peaks(fp8=2e12, bf16=1e12, f32=5e11, bandwidth=1e11, source="made up"))
Layers, Hidden, Mlp = hax.make_axes(layers=4, hidden=64, mlp=256)
LISTS = {"recipes": [None, "current"], "recompute": [True, False], "tokens": [1024, 256]}


class Block(eqx.Module):
    up: hnn.Linear
    down: hnn.Linear

    @staticmethod
    def init(*, key):
        up, down = jax.random.split(key)
        linear = lambda In, Out, key: hnn.Linear.init(In, Out, key=key, use_bias=False)
        return Block(linear(Hidden, Mlp, up), linear(Mlp, Hidden, down))

    def __call__(self, x):
        return x + self.down(hnn.gelu(self.up(x)))


def make_step(recipe, recompute, tokens, scale=1.0):
    """A scan over four blocks."""
    init = lambda key: hnn.Stacked.init(Layers, Block, gradient_checkpointing=recompute)(key=jax.random.split(key, 4))
    model = eqx.filter_eval_shape(init, jax.random.key(0))
    model = model if recipe is None else fp8.fp8_linear_layers(model, recipe=recipe)
    step = fp8.TrainStep(
        lambda model, x: scale * hax.mean(hax.square(model.fold(x))).scalar(), optax.sgd(1e-3, momentum=0.9)
    )
    x = eqx.filter_eval_shape(lambda: hax.zeros((hax.Axis("batch", tokens), Hidden)))
    return step, (model, eqx.filter_eval_shape(step.init, model), x)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("kept")


@pytest.fixture(scope="module")
def choices(folder):
    """Of a search that was stopped at its third choice, and called again."""
    seen = []

    def stop_at_third(words):
        seen.append(words)
        if len(seen) == 3:
            raise KeyboardInterrupt

    options = {**LISTS, "device": TOY, "memory": 1e9, "cache": folder}
    with pytest.raises(KeyboardInterrupt):
        choose(make_step, **options, progress=stop_at_third)
    assert seen[2] == "3 of 8: recipe=None, tokens=1024, recompute=True"
    assert len([*folder.iterdir()]) == 2
    return choose(make_step, **options)


def test_all_that_fit_by_tokens_per_second(choices):
    """Against reports of their own, which are compiled once more: what was kept of the first call is right."""
    assert len(choices.fitting) == 8 and not choices.others
    rates = [choice.tokens_per_second for choice in choices.fitting]
    assert rates == sorted(rates, reverse=True) and len({str(choice) for choice in choices.fitting}) == 8
    for choice in choices.fitting[::3]:
        step, args = make_step(**choice.keywords)
        report = inspect_step(step, *args, device=TOY)
        assert choice.peak == report.step.memory.peak and choice.fp8_share == report.fp8_share
        assert choice.tokens_per_second == pytest.approx(choice.tokens / report.estimate.total)
        assert choice.range[0] < choice.tokens_per_second < choice.range[1]


def test_the_printed_lines_make_the_first_choice(choices):
    code = choices.code(choices.fitting[0])
    assert str(choices).endswith(f"first.\n\n{code}")
    namespace = {"device": TOY, "make_step": make_step}
    exec(code, namespace)
    assert namespace["report"].step.memory.peak == choices.fitting[0].peak
    assert choices.fitting[0].tokens / namespace["report"].estimate.total == choices.fitting[0].tokens_per_second


def test_what_was_compiled_is_read_again_unless_the_program_changed(choices, folder):
    options = {"recipes": [None], "recompute": [True], "tokens": [256], "device": TOY, "memory": 1e9, "cache": folder}
    file = next(file for file in folder.iterdir() if "None, tokens=256, recompute=True" in file.read_text())
    original = file.read_text()
    file.write_text(json.dumps(json.loads(original) | {"peak": 17}))
    try:
        assert choose(make_step, **options).fitting[0].peak == 17
        changed = lambda **keywords: make_step(**keywords, scale=2.0)
        assert choose(changed, **options).fitting[0].peak > 17
        assert choose(make_step, **options, compiler_options={"xla_cpu_enable_fast_math": True}).fitting[0].peak > 17
    finally:
        file.write_text(original)


def test_what_needs_more_than_what_does_not_fit_is_not_compiled(choices, folder):
    peak = {tuple(choice.keywords.values()): choice.peak for choice in choices.fitting}
    assert peak[None, 256, True] < peak[None, 256, False] < peak[None, 1024, False]
    made = []

    def make(recipe, recompute, tokens):
        made.append((recipe, tokens, recompute))
        return make_step(recipe, recompute, tokens)

    # 256 tokens fit without recomputing, 1024 do not even if everything is recomputed.
    memory = (max(peak[None, 256, False], 0) + peak[None, 1024, True]) / 2
    assert peak[None, 256, False] < memory < peak[None, 1024, True]
    less = choose(make, **(LISTS | {"recipes": [None]}), device=TOY, memory=memory, cache=folder)
    assert {tuple(choice.keywords.values()) for choice in less.fitting} == {(None, 256, True), (None, 256, False)}
    reasons = {tuple(choice.keywords.values()): choice.reason for choice in less.others}
    larger = "takes more than recipe=None, tokens=1024, recompute=True"
    assert reasons == {(None, 1024, True): "does not fit", (None, 1024, False): larger}
    assert (None, 1024, False) not in made
    # Weights and moments alone: nothing is compiled.
    arguments = inspect_step(*_flat(make_step(None, True, 256)), device=TOY).step.memory.arguments
    nothing = choose(make_step, tokens=[256], recipes=[None], recompute=[True], device=TOY, memory=arguments - 1)
    assert [choice.reason for choice in nothing.others] == ["the arguments alone do not fit"]
    assert nothing.others[0].peak == arguments and "Nothing fits" in str(nothing)


def _flat(made):
    return made[0], *made[1]


def test_ranges_that_overlap_are_too_close_to_call():
    """Under the same assumption, and for each token; whole ranges overlap here without it."""
    first = Choice({"recipe": "a"}, 100, 0, ((1.0, 1.2), (2.0, 2.2)))
    slower = Choice({"recipe": "b"}, 100, 0, ((1.3, 1.4), (2.4, 2.5)))
    close = Choice({"recipe": "c"}, 200, 0, ((2.6, 2.8), (4.3, 4.5)))
    # 4 % slower under each, which is what two errors of 2.4 % can be.
    nearly = Choice({"recipe": "d"}, 100, 0, ((1.25, 1.25), (2.29, 2.29)))
    choices = Choices(TOY, 1e9, (first, close, nearly, slower), (), lambda choice: f"code of {choice}")
    assert choices.too_close_to_call == (close, nearly)
    assert first.tokens_per_second == pytest.approx(100 / 1.2) and first.range == pytest.approx((100 / 2.2, 100.0))
    rows = [line for line in str(choices).splitlines() if line.strip()[:2] in ("a ", "b ", "c ", "d ")]
    assert ["too close to call" in row for row in rows] == [False, True, True, False]
    assert str(choices).endswith("code of recipe='a'")


def test_communication_is_in_the_range():
    """A sum over two devices sends all its bytes in a ring of two: hidden behind the product, or after it."""

    def make(tokens, mesh):
        x, w = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((tokens, 64), (64, 4096)))
        return lambda x, w: (x @ w).sum(axis=0), (x, w), (jax.sharding.PartitionSpec("data"), None)

    step, args, shardings = make(64, {"data": 2})
    alone = inspect_step(step, *args, device=TOY, mesh={"data": 2}, shardings=shardings).estimate.total
    for link in (1e9, 1e6, None):
        device = dataclasses.replace(TOY, peaks=dataclasses.replace(TOY.peaks, link=link))
        (choice,) = choose(make, tokens=[64], meshes=[{"data": 2}], device=device, memory=1e9).fitting
        sending = 0.0 if link is None else 4 * 4096 / link
        exposed = float("inf") if link is None else alone + sending
        assert choice.seconds[0] == pytest.approx((max(alone, sending), exposed))
        assert (choice.range[0] == 0.0) == (link is None) and 0.0 < choice.tokens_per_second < float("inf")
    code = choose(make, tokens=[64], meshes=[{"data": 2}], device=TOY, memory=1e9).code(choice)
    assert "step, args, shardings = make(" in code and "mesh={'data': 2}, shardings=shardings)" in code


def test_exact_and_errors():
    numbers = {"tokens": [64], "recompute": [True], "device": TOY, "memory": 1e9}
    exact = choose(make_step, recipes=["current", None], exact=True, **numbers)
    assert [choice.keywords["recipe"] for choice in exact.fitting] == [None]
    with pytest.raises(ValueError, match="no recipe.*exact=True"):
        choose(make_step, recipes=["current"], exact=True, **numbers)
    with pytest.raises(ValueError, match="recipe='curent' is unknown"):
        choose(make_step, recipes=["curent"], **numbers)
    # If others compile, an error is theirs to explain.
    some = choose(make_step, recipes=["curent", None], **numbers)
    assert len(some.fitting) == 1 and "'curent' is unknown" in some.others[0].reason
    with pytest.raises(ValueError, match="memory of a toy is not known.*memory="):
        choose(make_step, recipes=[None], **(numbers | {"memory": None}))
    with pytest.raises(ValueError, match="'local' has no known peaks"):
        choose(make_step, recipes=[None], **(numbers | {"device": "local"}))
