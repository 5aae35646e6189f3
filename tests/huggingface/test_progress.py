"""What long work on folders says of itself: calls with names and bytes, a bar on a terminal, nothing in a pipe."""

import os
import pty
import sys

import jax
import pytest
from helpers import unchecked

from haliax_fp8.huggingface import check_folder, convert_folder, export_model, import_model
from haliax_fp8.models import Transformer, TransformerConfig
from haliax_fp8.serving import quantize_for_inference


MODEL = Transformer.init(TransformerConfig(layers=1, hidden=32, heads=1, mlp=64, unroll=1), key=jax.random.key(0))


def passes(calls):
    """Cuts the calls where `done` starts anew, and checks that each pass adds up."""
    by_pass = []
    for name, done, total in calls:
        if not by_pass or by_pass[-1][-1][1] == by_pass[-1][-1][2]:
            by_pass.append([])
        before = by_pass[-1][-1][1] if by_pass[-1] else 0
        assert before < done <= total
        by_pass[-1].append((name, done, total))
    assert all(calls[-1][1] == calls[-1][2] for calls in by_pass)
    return by_pass


def test_each_pass_names_every_tensor_and_ends_with_all_bytes(tmp_path):
    calls = []
    tell = lambda *call: calls.append(call)

    def taken():
        by_pass = passes(calls)
        calls.clear()
        return by_pass

    export_model(MODEL, tmp_path / "a", progress=tell)
    written, compared, checked = taken()
    stored = (tmp_path / "a" / "model.safetensors").stat().st_size
    assert 0 < stored - written[-1][2] < 16_000  # The rest is the header.
    assert {name for name, *_ in written} == {name for name, *_ in checked} > {name for name, *_ in compared}

    check_folder(tmp_path / "a", progress=tell)
    assert [len(checked)] == [len(calls) for calls in taken()]
    convert_folder(tmp_path / "a", tmp_path / "b", "HF_FP8", progress=tell)
    assert len(taken()) == 3
    import_model(tmp_path / "b", MODEL, progress=tell)
    (read,) = taken()
    assert read[-1][2] == sum(array.nbytes for array in _arrays(tmp_path / "b"))
    quantize_for_inference(MODEL, "FP8_DYNAMIC", progress=tell)
    (quantized,) = taken()
    assert len(quantized) == 7


def _arrays(directory):
    from haliax_fp8.folders.folder import TensorFolder

    folder = TensorFolder.open(directory)
    return [folder[name] for name in folder.tensors]


def test_what_is_not_a_function_is_refused(tmp_path):
    calls = (
        lambda: export_model(MODEL, tmp_path / "new", progress=True),
        lambda: quantize_for_inference(MODEL, "FP8_DYNAMIC", progress=True),
    )
    for call in calls:
        with unchecked(), pytest.raises(ValueError, match="progress=True is not a function; give one"):
            call()
    assert list(tmp_path.iterdir()) == []


def test_an_export_that_is_interrupted_leaves_nothing(tmp_path):
    def interrupt(name, done, total):
        if done > total / 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export_model(MODEL, tmp_path / "new", progress=interrupt)
    assert list(tmp_path.iterdir()) == []


def test_a_bar_on_a_terminal_and_nothing_in_a_pipe(tmp_path, monkeypatch, capfd):
    for name in ("TERM", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    export_model(MODEL, tmp_path / "piped")
    assert capfd.readouterr() == ("", "")
    main, terminal = pty.openpty()
    monkeypatch.setenv("COLUMNS", "120")
    with os.fdopen(terminal, "w") as stream, monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", stream)
        export_model(MODEL, tmp_path / "shown")
        stream.flush()
        shown = os.read(main, 1 << 20).decode()
    assert "writing" in shown and "checking" in shown and "kB" in shown
