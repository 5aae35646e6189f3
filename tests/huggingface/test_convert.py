"""Conversion between layouts, and the command line."""

import functools
import json
import tracemalloc

import ml_dtypes
import numpy as np
import pytest
from folders import (
    BLOCKS,
    E4M3,
    FAMILIES,
    LAYOUTS,
    LINEAR,
    checkpoint,
    file_of,
    header_of,
    packed,
    plain,
    quantization,
    quantize,
    write,
)

from haliax_fp8._cli.main import main
from haliax_fp8.checkpoints import BrokenCheckpoint
from haliax_fp8.folders.folder import TensorFolder
from haliax_fp8.huggingface import check_folder, convert_folder
from haliax_fp8.layouts import named


BF16 = np.dtype(ml_dtypes.bfloat16)

headers = functools.partial(check_folder, values=False)


def values(folder, weight):
    """`data * scale` in float64, from the files."""
    tensors = TensorFolder.open(folder)
    data = tensors[weight].astype(np.float64)
    names = [name for name in tensors.tensors if name.startswith(f"{weight}_scale")]
    if not names:
        return data
    scale = tensors[names[0]]
    if scale.dtype == np.uint8:
        scale = np.exp2(scale.astype(np.float64) - 127)
    scale = scale.astype(np.float64)
    scale = scale.reshape((-1, 1) if scale.ndim == 1 else (1, 1) if scale.ndim == 0 else scale.shape)
    if scale.size == 1:
        return data * scale
    rows, columns = (-(-size // count) for size, count in zip(data.shape, scale.shape, strict=True))
    height, width = (128 if size > 1 and rows > 1 else size for size in (rows, columns)) if rows > 1 else (1, columns)
    return data * np.repeat(np.repeat(scale, height, 0), width, 1)[: data.shape[0], : data.shape[1]]


def weights():
    return [name for name in plain() if "_proj" in name]


def power_of_two(layout):
    """A checkpoint whose scales are powers of two."""
    tensors, config = checkpoint(layout)
    for name in [name for name in tensors if "weight_scale" in name]:
        tensors[name] = np.exp2(np.ceil(np.log2(tensors[name]))).astype(np.float32)
    return tensors, config


EXACT = {
    "FP8_TENSOR": ("FP8", "FP8_DYNAMIC", "FP8_BLOCK", "HF_FP8", "W8A16", "modelopt"),
    "FP8_DYNAMIC": ("W8A16",),
    "FP8": ("FP8_DYNAMIC", "W8A16"),
    "FP8_BLOCK": ("HF_FP8",),
    "HF_FP8": ("FP8_BLOCK",),
    "modelopt": ("FP8_TENSOR", "FP8_DYNAMIC"),
}


@pytest.mark.more
def test_where_data_and_scales_can_stay_they_do(tmp_path):
    for before, layouts in EXACT.items():
        source = write(tmp_path / before, *checkpoint(before))
        for after in layouts:
            target = tmp_path / f"{before}-{after}"
            done = convert_folder(source, target, after)
            assert done.is_exact and done.error == 0 and len(done.weights) == len(weights())
            old, new = TensorFolder.open(source), TensorFolder.open(target)
            for name in weights():
                assert old[name].tobytes() == new[name].tobytes()
                assert np.array_equal(values(source, name), values(target, name)), (before, after, name)
            for name in ("lm_head.weight", "model.norm.weight"):
                assert old[name].tobytes() == new[name].tobytes()
            assert check_folder(target).is_sound and check_folder(target).layout == after


def test_there_and_back_is_exact(tmp_path):
    """Between layouts whose scales fit, and through plain float32; through bf16 with powers of two."""
    for layout in ("FP8_DYNAMIC", "HF_FP8", "MXFP8"):
        tensors, config = power_of_two(layout) if layout != "MXFP8" else checkpoint(layout)
        source = write(tmp_path / layout, tensors, config)
        for dtype in ("float32", "bfloat16"):
            done = convert_folder(source, tmp_path / f"{layout}-{dtype}", "BF16", dtype=dtype)
            assert done.is_exact
            for name in weights():
                back = TensorFolder.open(tmp_path / f"{layout}-{dtype}")[name].astype(np.float64)
                assert np.array_equal(back, values(source, name))
    source = tmp_path / "FP8_DYNAMIC"
    assert convert_folder(source, tmp_path / "mx", "MXFP8").is_exact
    for name in weights():
        assert np.array_equal(values(source, name), values(tmp_path / "mx", name))
    there = convert_folder(write(tmp_path / "a", *checkpoint("FP8_BLOCK")), tmp_path / "b", "HF_FP8")
    back = convert_folder(tmp_path / "b", tmp_path / "c", "FP8_BLOCK")
    assert there.is_exact and back.is_exact
    for name, array in checkpoint("FP8_BLOCK")[0].items():
        assert TensorFolder.open(tmp_path / "c")[name].tobytes() == array.tobytes()


# The layout whose numbers a family's checkpoint has.
SAME = {
    "fbgemm_fp8, channel": "FP8_DYNAMIC",
    "modelopt, channel": "FP8_DYNAMIC",
    "modelopt, group": "MXFP8",
    "modelopt, block": "FP8_BLOCK",
    "torchao, channel": "FP8_DYNAMIC",
    "torchao, tensor": "FP8_TENSOR",
    "scale_weight, tensor": "FP8_TENSOR",
}


def test_layouts_that_are_only_read(tmp_path):
    """Checked and converted: to plain weights that are `data * scale`."""
    for layout in LAYOUTS:
        write(tmp_path / layout, *checkpoint(layout))
    for family, made in FAMILIES.items():
        tensors, config = made()
        folder, name = write(tmp_path / "x", tensors, config), f"{family} weights" if family in SAME else family
        report = check_folder(folder)
        assert report.is_sound and report.layout == name and report.quantized, report
        assert report.contents["weights in FP8"].count == report.quantized
        if family == "FP8_DYNAMIC":
            continue
        assert convert_folder(folder, tmp_path / f"{family}-bf16", "BF16", dtype="float32").is_exact
        for weight in weights():
            same = SAME.get(family, "FP8_BLOCK" if "mlp" in weight else "FP8_DYNAMIC")
            np.testing.assert_array_equal(
                values(tmp_path / f"{family}-bf16", weight), values(tmp_path / same, weight).astype(np.float32)
            )
        # What is wrong is said by the names of the file.
        scale = next(x for x in tensors if "q_proj" in x and "scale" in x and "input" not in x)
        del tensors[scale]
        (fault,) = check_folder(write(tmp_path / "x", tensors, config)).errors
        assert fault.tensor == next(x for x in tensors if "q_proj" in x and tensors[x].ndim == 2)


def test_stacked_experts(tmp_path):
    """One array for all experts of a block, in FP8: converted one by one, and each is looked at."""
    tensors, config = FAMILIES["FP8_DYNAMIC"]()
    folder = write(tmp_path / "x", tensors, config)
    assert convert_folder(folder, tmp_path / "plain", "BF16", dtype="float32").is_exact
    layer = "model.layers.0.mlp.experts.up_proj"
    expected = tensors[f"{layer}.weight"].astype(np.float32) * tensors[f"{layer}.weight_scale"]
    np.testing.assert_array_equal(TensorFolder.open(tmp_path / "plain")[f"{layer}.weight"], expected)
    tensors[f"{layer}.weight_scale"][2] = 1e38
    (fault,) = check_folder(write(tmp_path / "x", tensors, config)).errors
    assert fault.tensor == f"{layer}.weight_scale" and "reaches inf" in fault.problem


def test_the_smallest_scales(tmp_path):
    """Powers of two keep their data; engines flush those below 2**-126 to zero, so a folder with them is broken."""
    random = np.random.default_rng(0)
    data = (100 * random.standard_normal((4, 64))).astype(E4M3)
    for exponent in (-126, -127, -130):
        scale = np.array([2.0**exponent, 0.125, 0.125, 0.125], np.float32)[:, None]
        tensors = {"a.weight": data, "a.weight_scale": scale}
        source = write(tmp_path / f"in{exponent}", tensors, {"quantization_config": quantization("FP8_DYNAMIC")})
        if exponent < -126:
            with pytest.raises(BrokenCheckpoint, match=r"a.weight_scale: 1 of 4 scales are below 2\*\*-126"):
                convert_folder(source, tmp_path / f"out{exponent}", "MXFP8")
            continue
        done = convert_folder(source, tmp_path / f"out{exponent}", "MXFP8")
        assert done.is_exact
        assert np.array_equal(data.astype(np.float64) * scale, values(tmp_path / f"out{exponent}", "a.weight"))


def test_a_block_of_zeros_has_the_smallest_scale(tmp_path):
    """It is valid in every engine, and what it multiplies is zero."""
    tensors, config = checkpoint(None)
    name = weights()[0]
    tensors[name][:, :64] = 0
    source = write(tmp_path / "plain", tensors, config)
    for layout, smallest in (("MXFP8", 2.0**-127), ("NVFP4A16", 2.0**-3)):
        convert_folder(source, tmp_path / layout, layout)
        layer = name.removesuffix(".weight")
        scale = TensorFolder.open(tmp_path / layout)[f"{layer}.weight_scale"]
        stored = np.exp2(scale.astype(np.float64) - 127) if layout == "MXFP8" else scale.astype(np.float64)
        width = 64 * scale.shape[1] // tensors[name].shape[1]
        assert (stored[:, :width] == smallest).all() and (stored[:, width:] > smallest).all()
        convert_folder(tmp_path / layout, tmp_path / f"{layout}-plain", "BF16")
        back = TensorFolder.open(tmp_path / f"{layout}-plain")[name].astype(np.float64)
        assert not back[:, :64].any() and back[:, 64:].any()


def test_weights_without_elements_have_no_scale(tmp_path):
    """They are named, also where nothing is quantized; plain weights may have none."""
    for name, (data, scale) in {
        "rows": (np.zeros((0, 64), E4M3), np.zeros((0, 1), np.float32)),
        "columns": (np.zeros((4, 0), E4M3), np.ones((4, 1), np.float32)),
    }.items():
        tensors = {"a.weight": data, "a.weight_scale": scale}
        tensors |= {"b.weight": np.ones((4, 64), E4M3), "b.weight_scale": np.full((4, 1), 0.01, np.float32)}
        source = write(tmp_path / name, tensors, {"quantization_config": quantization("W8A16")})
        plain_source = write(tmp_path / f"{name}-plain", {"a.weight": data.astype(BF16)}, {})
        message = rf"^a.weight has shape \({data.shape[0]}, {data.shape[1]}\): it has no elements, .*; leave it out"
        for folder, layout in ((source, "MXFP8"), (source, "FP8_DYNAMIC"), (plain_source, "FP8_DYNAMIC")):
            with pytest.raises(ValueError, match=message):
                convert_folder(folder, tmp_path / "no", layout)
        convert_folder(source, tmp_path / f"{name}-to-plain", "BF16")
        assert TensorFolder.open(tmp_path / f"{name}-to-plain")["a.weight"].shape == data.shape
    assert not (tmp_path / "no").exists()


@pytest.mark.more
def test_rounding_is_measured(tmp_path):
    source = write(tmp_path / "plain", *checkpoint(None))
    for scales in ("float32", "bfloat16", "power-of-two"):
        target = tmp_path / scales
        done = convert_folder(source, target, "FP8_DYNAMIC", scales=scales)
        assert not done.is_exact
        folder = TensorFolder.open(target)
        for converted in done.weights:
            before, after = plain()[converted.name].astype(np.float64), values(target, converted.name)
            error = np.linalg.norm(after - before) / np.linalg.norm(before)
            np.testing.assert_allclose(converted.error, error, rtol=1e-5)
            # Three bits of significand: at most 1/16 of an element, and 2.6 % on average; subnormals add little.
            assert error < 1 / 16
            scale = folder[f"{converted.name}_scale"]
            exact = {
                "bfloat16": scale.astype(BF16).astype(np.float32),
                "power-of-two": np.exp2(np.rint(np.log2(scale))),
            }
            assert np.array_equal(exact.get(scales, scale), scale)
            # No value is clipped: the largest of a row is within half a step of it.
            amax = np.abs(before).max(1, keepdims=True)
            assert (amax <= scale * 448 * (1 + 1e-6)).all()
    done = convert_folder(write(tmp_path / "x", *checkpoint("FP8_DYNAMIC")), tmp_path / "y", "FP8_BLOCK")
    assert not done.is_exact and 0 < done.error < 1 / 16


def test_scales_of_keys_and_values_stay(tmp_path):
    """By the names of the new layout, and its configuration says so where it can; a plain checkpoint has none."""
    attention, scheme = "model.layers.0.self_attn", {"num_bits": 8, "type": "float", "dynamic": False}
    scales = {"modelopt": ("k_proj.k_scale", "v_proj.v_scale"), "FP8": ("k_scale", "v_scale")}
    for layout, names in scales.items():
        tensors, described = checkpoint(layout)
        described["quantization_config"]["kv_cache_scheme"] = scheme
        tensors |= {f"{attention}.{names[i]}": np.array([2.0**-i], np.float32) for i in range(2)}
        source = write(tmp_path / layout, tensors, described)
        for after in ("FP8_TENSOR", "HF_FP8", "modelopt"):
            new = tmp_path / f"{layout}-{after}"
            done = convert_folder(source, new, after)
            folder, renamed = TensorFolder.open(new), scales.get(after, scales["FP8"])
            cached = {key: float(folder[key][0]) for key in folder.tensors if key.endswith((".k_scale", ".v_scale"))}
            assert cached == {f"{attention}.{renamed[i]}": 2.0**-i for i in range(2)} and done.skipped == ()
            says = folder.config["quantization_config"]
            if after == "modelopt":
                assert says["kv_cache_quant_algo"] == "FP8"
            if after == "FP8_TENSOR":
                assert scheme.items() <= says["kv_cache_scheme"].items()
            problems = [fault.problem for fault in check_folder(new).faults if "keys and values" in fault.problem]
            assert len(problems) == (2 if after == "HF_FP8" else 0), problems
            assert done.is_exact == (layout == "modelopt"), after
        done = convert_folder(source, tmp_path / f"{layout}-plain", "BF16", dtype="float32")
        assert all(weight.is_exact for weight in done.weights) and not done.is_exact
        assert done.skipped == tuple(f"{attention}.{name}" for name in names)
        shown = " ".join(str(done).split())
        assert f"Not written: {attention}.{names[0]}, " in shown and "rounded" not in shown


def test_every_layout_from_plain_is_sound(tmp_path):
    source = write(tmp_path / "plain", *checkpoint(None))
    (source / "tokenizer.json").write_text("{}")
    (source / "pytorch_model.bin").write_bytes(b"never read")
    for layout in LAYOUTS:
        if layout in ("FP8", "FP8_TENSOR", "modelopt"):
            with pytest.raises(ValueError, match="no scale for its input.*calibrate"):
                convert_folder(source, tmp_path / layout, layout)
            assert not (tmp_path / layout).exists()
            continue
        convert_folder(source, tmp_path / layout, layout, shard_bytes=100_000)
        report = check_folder(tmp_path / layout)
        assert report.is_sound and report.layout == layout and report.quantized == len(weights())
        assert (tmp_path / layout / "model.safetensors.index.json").exists()
        assert (tmp_path / layout / "tokenizer.json").read_text() == "{}"
        assert not (tmp_path / layout / "pytorch_model.bin").exists()
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith(".")) == []


def test_a_broken_folder_is_not_converted(tmp_path):
    tensors, config = checkpoint("FP8_DYNAMIC")
    name = f"{weights()[0]}_scale"
    source = write(tmp_path / "x", tensors | {name: tensors[name] * np.float32(np.nan)}, config)
    with pytest.raises(BrokenCheckpoint, match=f"model.safetensors: {name}: .* NaN"):
        convert_folder(source, tmp_path / "y", "FP8_BLOCK")
    assert not (tmp_path / "y").exists()


@pytest.mark.more
def test_little_is_in_memory(tmp_path):
    """Beside the new data of one weight, some rows of it: much less than its values in float32."""
    random = np.random.default_rng(0)
    tensors = {f"layers.{i}.up.weight": random.standard_normal((2048, 4096)).astype(BF16) for i in range(3)}
    write(tmp_path / "x", tensors, {})
    weight = 2048 * 4096
    del tensors
    for before, after in (("x", "FP8_DYNAMIC"), ("FP8_DYNAMIC", "HF_FP8"), ("HF_FP8", "MXFP8"), ("MXFP8", "BF16")):
        tracemalloc.start()
        convert_folder(tmp_path / before, tmp_path / after, after)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        # What is written of a weight, and some rows in float32 and float64.
        assert peak < (2 if after == "BF16" else 1) * weight + 24 * 2**20, (after, peak / weight)


def experts(layout):
    """Three experts in one array, each `[out, in]`, and their scales."""
    random = np.random.default_rng(0)
    plain = (random.standard_normal((3, 256, 128)) * np.array([1, 4, 0.1]).reshape(3, 1, 1)).astype(BF16)
    if layout is None:
        return {"mlp.experts.up.weight": plain}, {}
    parts = [quantize(expert, layout) for expert in plain]
    data, scale = (np.stack([part[i] for part in parts]) for i in (0, 1))
    tensors = {"mlp.experts.up.weight": data, f"mlp.experts.up.weight_scale{'_inv' * (layout == 'HF_FP8')}": scale}
    described = quantization(layout)
    if layout == "FP8_TENSOR":
        tensors["mlp.experts.up.input_scale"] = np.array([0.5, 0.25, 1.0], np.float32)
    described |= {"modules_to_not_convert": []} if layout == "HF_FP8" else {"ignore": []}
    return tensors, {"quantization_config": described}


def test_experts_in_one_array(tmp_path):
    """Each as if it were alone: exactly where scales fit, with its own scale and that of its input."""
    for before, after in (("FP8_TENSOR", "FP8"), ("FP8_BLOCK", "HF_FP8"), ("FP8_DYNAMIC", "W8A16")):
        source, target = write(tmp_path / f"{before}-in", *experts(before)), tmp_path / f"{before}-{after}"
        assert check_folder(source).is_sound
        assert convert_folder(source, target, after).is_exact
        old, new = TensorFolder.open(source), TensorFolder.open(target)
        assert old["mlp.experts.up.weight"].tobytes() == new["mlp.experts.up.weight"].tobytes()
        assert check_folder(target).layout == after
        if before == "FP8_TENSOR":
            assert new["mlp.experts.up.input_scale"].ravel().tolist() == [0.5, 0.25, 1.0]
            scale = old["mlp.experts.up.weight_scale"].reshape(3, 1)
            np.testing.assert_array_equal(new["mlp.experts.up.weight_scale"][..., 0], np.broadcast_to(scale, (3, 256)))
    plain = write(tmp_path / "plain", *experts(None))
    for layout in ("FP8_DYNAMIC", "MXFP8", "HF_FP8"):
        done = convert_folder(plain, tmp_path / layout, layout)
        assert not done.is_exact and 0.01 < done.error < 0.04 and check_folder(tmp_path / layout).is_sound
        tensors = TensorFolder.open(tmp_path / layout)
        data, scale = quantize(experts(None)[0]["mlp.experts.up.weight"][1], layout)
        if layout == "MXFP8":
            assert tensors["mlp.experts.up.weight"][1].tobytes() == data.tobytes()
        assert tensors[f"mlp.experts.up.weight_scale{'_inv' * (layout == 'HF_FP8')}"][1].shape == scale.shape
    back = convert_folder(tmp_path / "MXFP8", tmp_path / "back", "BF16", dtype="float32")
    assert back.is_exact


def test_a_configuration_beside_may_not_be_a_link_out_of_the_folder(tmp_path):
    """What ModelOpt writes beside is held to the same rule as the rest."""
    tensors, config = checkpoint("modelopt")
    described = {"quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}}
    del config["quantization_config"]
    (tmp_path / "elsewhere.json").write_text(json.dumps(described))
    folder = write(tmp_path / "in", tensors, config)
    (folder / "hf_quant_config.json").symlink_to(tmp_path / "elsewhere.json")
    (fault,) = check_folder(folder).errors
    assert fault.file == "hf_quant_config.json" and "a link out of the folder" in fault.problem
    assert check_folder(folder, follow_links=True).is_sound


def test_contents(tmp_path):
    for layout in LAYOUTS:
        tensors, config = checkpoint(layout)
        report = headers(write(tmp_path / layout, tensors, config))
        in_fp8, in_four, scales, others, integers, unknown = report.contents.values()
        assert report.layout == layout and in_fp8.count == len(weights())
        assert in_fp8.bytes == sum(tensors[name].size for name in weights()) and unknown.count == integers.count == 0
        assert scales.bytes == sum(array.nbytes for name, array in tensors.items() if name.endswith(("scale", "inv")))
        assert in_fp8.bytes + scales.bytes + others.bytes == sum(a.nbytes for a in tensors.values())
        assert layout in str(report)
        # Each tensor is in one row: the embedding, the norms and a bias too, and scales of inputs and caches.
        tensors |= {"model.layers.0.self_attn.q_proj.bias": np.zeros(4, BF16)}
        tensors |= {f"model.layers.0.self_attn.{name}_scale": np.ones(1, np.float32) for name in "kv"}
        report = headers(write(tmp_path / "more", tensors, config))
        scales = sum("scale" in name for name in tensors)
        assert [x.count for x in report.contents.values()][2:4] == [scales, len(tensors) - scales - len(weights())]
        (row,) = (line.split() for line in str(report).splitlines() if line.split()[:1] == ["all"])
        assert row[:3] == ["all", str(len(tensors)), f"{sum(array.nbytes for array in tensors.values()):,}"]
    assert BLOCKS and LINEAR
    convert_folder(tmp_path / "FP8_DYNAMIC", tmp_path / "plain", "BF16")
    plain = headers(tmp_path / "plain")
    assert plain.contents["weights in FP8"].count == 0 and "not quantized" in str(plain)


def test_types_that_are_unknown_are_shown(tmp_path):
    tensors, config = checkpoint("FP8")
    tensors |= {"packed": np.zeros(8, np.uint8), "more": np.zeros(6, np.uint8)}
    header, path = header_of(tensors), write(tmp_path / "x", tensors, config)
    before = headers(path)
    header["packed"] |= {"dtype": "F4", "shape": [16]}
    header["more"] |= {"dtype": "F6_E2M3", "shape": [8]}
    (path / "model.safetensors").write_bytes(file_of(tensors, header))
    after = headers(path)
    others, others_before = (x.contents["in integers"] for x in (after, before))
    assert (others.count, others.bytes) == (others_before.count - 2, others_before.bytes - 14)
    (row,) = (line.split() for line in str(after).splitlines() if "unknown" in line)
    assert row == ["of", "unknown", "types", "2", "14", "F4,", "F6_E2M3"]
    assert [line for line in str(after).splitlines() if line.split()[:1] == ["all"]] == [
        line for line in str(before).splitlines() if line.split()[:1] == ["all"]
    ]
    assert "unknown" not in str(before)


def test_no_two_layouts_differ_in_case_alone(tmp_path):
    assert len({name.lower() for name in named}) == len(named)
    source = write(tmp_path / "source", *checkpoint(None))
    for wrong in ("fp8", "Fp8"):
        with pytest.raises(ValueError, match=f"layout='{wrong}' is unknown; the nearest are .*'HF_FP8'"):
            convert_folder(source, tmp_path / "new", wrong)
    assert not (tmp_path / "new").exists()


def test_command_line(tmp_path, capsys, monkeypatch):
    good = write(tmp_path / "good", *checkpoint("FP8_DYNAMIC"))
    tensors, config = checkpoint("FP8_DYNAMIC")
    del tensors[f"{weights()[0]}_scale"]
    broken = write(tmp_path / "broken", tensors, config)
    run = lambda *arguments: main(["checkpoint", *map(str, arguments)])
    assert run("check", good) == 0 and "sound" in capsys.readouterr().out
    assert run("check", broken) == 1
    out = capsys.readouterr().out
    assert "broken" in out and "model.safetensors" in out.replace("\n", "") and max(map(len, out.splitlines())) <= 80
    assert run("check", "--json", broken) == 1
    report = json.loads(capsys.readouterr().out)
    (fault,) = report["faults"]
    assert (fault["file"], fault["tensor"]) == ("model.safetensors", weights()[0]) and fault["remedy"]
    assert report["verdict"] == "broken" and not report["converter"]
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    other = write(tmp_path / "gptq", *packed(config))
    assert run("check", other) == 3 and "not supported here: load it with GPTQModel" in capsys.readouterr().out
    assert run("check", "--json", other) == 3 and json.loads(capsys.readouterr().out)["layout"] == "gptq"
    assert run("check", "--headers", other) == 3 and "gptq" in capsys.readouterr().out
    assert run("convert", other, "--to", "BF16", "--output", tmp_path / "never") == 3
    assert "GPTQModel" in capsys.readouterr().err and not (tmp_path / "never").exists()
    config["quantization_config"] = {"quant_method": "gtpq"}
    assert run("check", "--headers", write(tmp_path / "unknown", tensors, config)) == 1
    assert "quant_method='gtpq' is unknown" in " ".join(capsys.readouterr().out.split())
    assert run("check", "--headers", good) == 0
    out = capsys.readouterr().out
    assert "FP8_DYNAMIC" in out and "values not read" in out and max(map(len, out.splitlines())) <= 80
    assert run("check", "--headers", "--json", good) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["layout"], report["verdict"], report["sound"]) == ("FP8_DYNAMIC", "values not read", False)
    assert report["tensors"]["weights in FP8"]["count"] == len(weights())
    assert run("convert", good, "--to", "W8A16", "--output", tmp_path / "new") == 0
    assert "the same values" in capsys.readouterr().out
    assert run("convert", good, "--to", "FP8_BLOCK", "--output", tmp_path / "blocks", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["before"], report["after"], report["exact"]) == ("FP8_DYNAMIC", "FP8_BLOCK", False)
    assert set(report["weights"]) == set(weights()) and 0 < report["error"] < 0.1
    assert run("convert", good, "--to", "W8A16", "--output", tmp_path / "new") == 2  # not empty
    assert f"--output={str(tmp_path / 'new')!r} exists and is not empty" in capsys.readouterr().err
    below = good / "config.json" / "new"
    assert run("convert", good, "--to", "W8A16", "--output", below) == 2
    assert f"--output={str(below)!r} cannot be made in {str(below.parent)!r}: " in capsys.readouterr().err
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    assert run("convert", good, "--to", "W8A16", "--output", tmp_path / "link") == 2
    assert f"--output={str(tmp_path / 'link')!r} is a link; give the folder" in capsys.readouterr().err
    monkeypatch.chdir(good)
    for options in ((), ("--headers",)):
        assert run("check", *options, ".") == 0 and "good: FP8_DYNAMIC" in capsys.readouterr().out
    assert run("convert", broken, "--to", "W8A16", "--output", tmp_path / "other") == 1
    assert weights()[0] in capsys.readouterr().err
    assert run("check", tmp_path / "nothing") == 2
    for wrong in (
        ("check",),
        ("verify", good),
        (),
        ("convert", good),
        ("convert", good, "--to", "FP9", "--output", "x"),
        ("convert", good, "--to", "fp8", "--output", "x"),
    ):
        with pytest.raises(SystemExit) as stopped:
            run(*wrong)
        assert stopped.value.code == 2
