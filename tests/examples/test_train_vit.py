"""The example `examples/train_vit/`: its command line, and its claim that FP8 classifies as bf16 does."""

import contextlib
import io
import json
import pathlib
import re
import runpy
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import run_example

from examples.train_vit import train
from examples.train_vit.model import VisionTransformer


TINY = "--seeds 3 --epochs 2 --layers 1 --hidden 16 --heads 2 --mlp 16 --batch-size 256 --amax-history-length 4".split()


def results(folder: pathlib.Path) -> dict:
    return json.loads((folder / "results.json").read_text())


@pytest.fixture(scope="module")
def ran(tmp_path_factory) -> tuple[pathlib.Path, str]:
    """The folder of a run by the module that `python -m` runs, and what it printed."""
    folder = tmp_path_factory.mktemp("ran")
    argv = ["examples/train_vit/__main__.py", *TINY, "--verbose", "--out", str(folder)]
    with (
        pytest.MonkeyPatch.context() as patch,
        jax.numpy_dtype_promotion("standard"),
        contextlib.redirect_stdout(io.StringIO()) as printed,
        pytest.raises(SystemExit) as exit,
    ):
        patch.setattr(sys, "argv", argv)
        runpy.run_module("examples.train_vit", run_name="__main__")
    assert exit.value.code == 0
    return folder, printed.getvalue()


@pytest.mark.more
def test_the_command_line(ran):
    """Table, figure and numbers agree; both models learn, from the same loss on the same batches, not bit by bit."""
    folder, printed = ran
    written = results(folder)
    (bf16,), (fp8,) = written["bf16"], written["FP8"]
    assert written["seeds"] == [3]
    assert written["gaps"] == [fp8["accuracies"][-1] - bf16["accuracies"][-1]]
    assert f"{fp8['accuracies'][-1]:.2f} %" in printed and f"{bf16['accuracies'][-1]:.2f} %" in printed
    words = "FP8: 7 of 8 linear layers, DelayedScaling E4M3/E4M3/E5M2, emulated on cpu"
    assert words in " ".join(printed.split())  # without the breaks of lines that are too long
    assert (folder / "curves.png").read_bytes().startswith(b"\x89PNG")
    for run in (bf16, fp8):
        assert len(run["losses"]) == 2 * (1257 // 256) and len(run["accuracies"]) == 2
        assert run["losses"][-1] < run["losses"][0]
    # Rounding to E4M3 moves each product by a few percent, and the loss of ten classes by less.
    assert bf16["losses"] != fp8["losses"]
    np.testing.assert_allclose(fp8["losses"], bf16["losses"], rtol=0.05)


@pytest.mark.more
def test_which_layers_are_converted(ran, capsys, tmp_path):
    """All but the classifier head, unless a flag asks for it too; and so they are trained."""
    folder, printed = ran
    assert train.main([*TINY, "--verbose", "--convert-head", "--out", str(tmp_path)]) == 0
    printed_with_head = capsys.readouterr().out
    left_alone = lambda text: [line.split()[0] for line in text.splitlines() if re.match(" .*high precision:", line)]
    assert left_alone(printed) == ["head"] and "excluded by 'head'" in " ".join(printed.split())
    assert left_alone(printed_with_head) == [] and "FP8: 8 of 8 linear layers" in " ".join(printed_with_head.split())
    without, with_head = results(folder), results(tmp_path)
    assert with_head["bf16"][0]["losses"] == without["bf16"][0]["losses"]
    assert with_head["FP8"][0]["losses"] != without["FP8"][0]["losses"]


@pytest.mark.parametrize(
    "flags, message",
    [
        ("--hidden 30 --heads 4", "--hidden 30 is not a multiple of --heads 4"),
        ("--epochs 0", "--epochs 0 must be at least 1"),
        ("--test-fraction 1.5", "--test-fraction 1.5 must lie between 0 and 1"),
        ("--seeds -1", "--seeds [-1] must not be negative"),
        ("--patch 3", "invalid choice: 3"),
    ],
)
def test_flags_that_do_not_fit(flags, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        train.main(flags.split())
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_a_batch_larger_than_the_data_set(capsys, tmp_path):
    assert train.main(["--batch-size", "2000", "--out", str(tmp_path)]) == 2
    assert "--batch-size 2000 is more than the 1257 images" in " ".join(capsys.readouterr().out.split())


@pytest.mark.more
def test_a_loss_that_is_not_finite(capsys, tmp_path):
    """One line that names the flag, not a run to its end."""
    assert train.main([*TINY, "--learning-rate", "1e30", "--warmup", "0", "--out", str(tmp_path)]) == 2
    assert "lower --learning-rate 1e+30" in " ".join(capsys.readouterr().out.split())


def test_splits_have_every_class_on_both_sides():
    digits = train.Digits.load(0.3, seed=5)
    assert len(digits.train_labels) + len(digits.test_labels) == 1797
    shares = [np.bincount(labels) / len(labels) for labels in (digits.train_labels, digits.test_labels)]
    np.testing.assert_allclose(*shares, atol=0.01)
    assert digits.train_images.min() == -1.0 and digits.train_images.max() == 1.0


def test_batches_are_those_of_the_seed():
    """One epoch shows each image once; the same generator gives the same batches to both models."""
    digits = train.Digits.load(0.3, seed=5)
    epochs = [list(digits.batches(100, noise, np.random.default_rng(0))) for noise in (0.0, 0.0, 0.5)]
    assert [len(epoch) for epoch in epochs] == [12] * 3
    for (images, labels), (same, same_labels), (noisy, _) in zip(*epochs, strict=True):
        np.testing.assert_array_equal(images, same)
        np.testing.assert_array_equal(labels, same_labels)
        assert noisy.dtype == np.float32 and 0.4 < np.std(noisy - images) < 0.6
    drawn = np.concatenate([images for images, _ in epochs[0]]).reshape(1200, -1)
    assert len(np.unique(drawn, axis=0)) == 1200


def test_patches_cover_the_image():
    """With an identity in place of all that is learned, the tokens are the four quadrants."""
    model = VisionTransformer(patch=4, layers=1, hidden=16, heads=2, mlp=8, key=jax.random.key(0))
    seen = []

    class Record(eqx.Module):
        def __call__(self, x):
            seen.append(x)
            return x

    model = eqx.tree_at(
        lambda m: (m.embed.weight, m.embed.bias, m.positions, m.blocks),
        model,
        (jnp.eye(16), jnp.zeros(16), jnp.zeros((4, 16)), [Record()]),
    )
    image = np.arange(64, dtype=np.float32).reshape(8, 8)
    assert model(jnp.asarray(image)).shape == (10,)
    quadrants = [image[i : i + 4, j : j + 4].reshape(-1) for i in (0, 4) for j in (0, 4)]
    np.testing.assert_array_equal(seen[0], quadrants)


@pytest.mark.more
def test_fp8_classifies_as_bf16_does(tmp_path):
    """What the example is there to show, with its default options: within one point, for the first of its seeds."""
    seed = train.parse_options([]).seeds[0]
    run_example("-m", "examples.train_vit", "--seeds", str(seed), "--out", str(tmp_path))
    written = results(tmp_path)
    (gap,) = written["gaps"]
    assert written["seeds"] == [seed] and abs(gap) <= 1.0
    for run in (*written["bf16"], *written["FP8"]):
        assert run["accuracies"][-1] > 95.0
