"""The check of a folder: every good one passes, and in every broken one the fault is named."""

import functools
import json
import re

import ml_dtypes
import numpy as np
import pytest
from folders import (
    FOUR_BITS,
    HIDDEN,
    LAYERS,
    LAYOUTS,
    LINEAR,
    checkpoint,
    file_of,
    four_bits,
    header_of,
    packed,
    plain,
    quantization,
    quantize,
    write,
)

from haliax_fp8.folders.check import check_folder
from haliax_fp8.folders.configuration import NotSupported, layout_of
from haliax_fp8.folders.convert import convert_folder
from haliax_fp8.folders.folder import TensorFolder
from haliax_fp8.folders.patterns import matcher
from haliax_fp8.folders.strict_json import BrokenCheckpoint
from haliax_fp8.folders.tensors import tensors_in


LAYER = "model.layers.1.self_attn.k_proj"
WEIGHT, SCALE, INPUT = f"{LAYER}.weight", f"{LAYER}.weight_scale", f"{LAYER}.input_scale"
SQUARE = "model.layers.0.self_attn.o_proj"
CONFIG = "config.json"

headers = functools.partial(check_folder, values=False)


@pytest.mark.smoke
def test_good_checkpoints_pass(tmp_path):
    for layout in (None, *LAYOUTS):
        report = check_folder(write(tmp_path / str(layout), *checkpoint(layout)))
        assert report.faults == () or (
            layout in ("FP8_TENSOR", "modelopt", "HF_FP8", "FP8_BLOCK") and report.is_sound
        ), f"{layout}: {report}"
        assert report.quantized == (0 if layout is None else LAYERS * len(LINEAR))
        assert report.layout == (layout or "not quantized")


def test_other_good_checkpoints_pass(tmp_path):
    """As libraries and people write them: patterns, bf16 scales, other shapes of scales, tied heads."""
    for layout in ("FP8_DYNAMIC", "FP8"):
        tensors, config = checkpoint(layout)
        config["quantization_config"]["ignore"] = ["re:.*lm_head", "re:(model|visual)\\.embed.*"]
        for name in [name for name in tensors if name.endswith("scale")]:
            tensors[name] = tensors[name].astype(ml_dtypes.bfloat16).reshape(-1)
        report = check_folder(write(tmp_path / f"{layout}-bf16", tensors, config))
        assert report.is_sound, report
    tensors, config = checkpoint("FP8_DYNAMIC")
    del tensors["lm_head.weight"]
    report = check_folder(write(tmp_path / "tied", tensors, config | {"tie_word_embeddings": True}))
    assert report.faults == (), report
    for i, change in enumerate(
        (
            tie(None, ("re:.*lm_head",)),
            tie(True),
            rope(**LLAMA3, original_max_position_embeddings=8192),
            rope(rope_type="default"),
            rope(type="linear", factor=2.0),
            put(SCALE, lambda s: s / 1e4),
        )
    ):
        tensors, config = checkpoint("FP8_DYNAMIC")
        change(tensors, config)
        report = check_folder(write(tmp_path / f"sound-{i}", tensors, config))
        assert report.faults == (), report
    # What no byte tells is a remark: an input that may be so large, and data that may be for another format.
    tensors, config = checkpoint("FP8")
    tensors["model.layers.0.mlp.down_proj.input_scale"] *= np.float32(448)
    (remark,) = check_folder(write(tmp_path / "input", tensors, config)).faults
    assert not remark.is_error and "448 times the median" in remark.problem
    tensors, config = checkpoint("FP8_DYNAMIC")
    tensors[WEIGHT] = (tensors[WEIGHT].astype(np.float32) / 2).astype(tensors[WEIGHT].dtype)
    (remark,) = check_folder(write(tmp_path / "half", tensors, config)).faults
    assert not remark.is_error and "the largest of each block is 224 and not 448" in remark.problem
    tensors, config = checkpoint("HF_FP8")
    config["quantization_config"]["scale_fmt"] = "ue8m0"
    for name in [name for name in tensors if name.endswith("scale_inv")]:
        exponents = np.ceil(np.log2(tensors[name])) + 127
        tensors[name] = exponents.astype(np.uint8).view(ml_dtypes.float8_e8m0fnu)
    report = check_folder(write(tmp_path / "ue8m0", tensors, config))
    assert report.is_sound, report
    tensors, config = checkpoint("FP8_DYNAMIC")
    # One output is large, and the others are as they were; and rows and columns that all reach the largest value.
    tensors[SCALE] = at_first(tensors[SCALE], 0.5)
    np.fill_diagonal(tensors[f"{SQUARE}.weight"], 448.0)
    report = check_folder(write(tmp_path / "large", tensors, config))
    assert report.faults == (), report
    # A last block that predicts further tokens.
    block = f"model.layers.{LAYERS - 1}."
    more = {name.replace(block, f"model.layers.{LAYERS}."): x for name, x in tensors.items() if name.startswith(block)}
    report = check_folder(write(tmp_path / "next", tensors | more, config | {"num_nextn_predict_layers": 1}))
    assert report.faults == (), report
    tensors, config = checkpoint("modelopt")
    inner = {"quant_algo": "FP8", "kv_cache_quant_algo": None, "exclude_modules": ["lm_head*"]}
    del config["quantization_config"]
    path = write(tmp_path / "modelopt", tensors, config)
    (path / "hf_quant_config.json").write_text(json.dumps({"quantization": inner}))
    assert check_folder(path).is_sound and check_folder(path).layout == "modelopt"


def test_patterns_that_may_take_years_are_refused():
    for pattern in (
        *(r"(a+)+$", r"(a|aa)+$", "a?" * 30 + "a" * 30, "(a|a)" * 31 + "x", ".*" * 6 + "!", r"(.*a){30}b"),
        *("(?x)(a+ #)\n)+", "(?#[)(a+)+]", r"[(](a+)+[)]", r"\((a{1,9}){2,}", "(a*?)+", r"(?P<n>(\w+\s?)*)x"),
        r"(?=(a*)*b)",
    ):
        with pytest.raises(BrokenCheckpoint, match="may take years to match a name; write it with"):
            matcher("ignore", f"re:{pattern}", "compressed-tensors")


def test_patterns_of_published_folders_match():
    for pattern, layer in {
        r".*lm_head.*": "lm_head",
        r".*(q|k)_proj$": "model.layers.0.self_attn.q_proj",
        r".*mlp\.(gate|up)_proj$": "model.layers.0.mlp.up_proj",
        r"^(?!.*visual)(?!.*embed).*$": "model.norm",
        r"(.*\.)?lm_head": "language_model.lm_head",
        r"^model\.layers\.(?:[0-9]|[1-3][0-9])\.mlp\.(?:gate|up|down)_proj$": "model.layers.31.mlp.down_proj",
        r".*\.layers\.\d+\..*experts\.\d+\..*_proj": "model.layers.7.mlp.experts.12.up_proj",
        r"(?i).*\bEXPERTS\.": "model.experts.0",
        r"model\.layers\.\d{1,3}\.[]m[]lp": "model.layers.10.mlp",
    }.items():
        matches = matcher("ignore", f"re:{pattern}", "compressed-tensors")
        assert matches(layer) and not matches("model.visual"), pattern


WITHOUT_BLOCKS = {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]}


def without_blocks(scale, inputs):
    """A checkpoint of `fp8` with one scale for a weight and one for its input, by these names."""
    tensors, config = checkpoint("FP8_TENSOR")
    renamed = {name.replace("weight_scale", scale).replace("input_scale", inputs): x for name, x in tensors.items()}
    return renamed, config | {"quantization_config": WITHOUT_BLOCKS}


def test_fp8_without_blocks_has_either_name(tmp_path):
    """As AutoFP8 and vLLM write it, and as Transformers does; not both at once, and not neither."""
    for scale, inputs in (("weight_scale", "input_scale"), ("weight_scale_inv", "activation_scale")):
        tensors, config = without_blocks(scale, inputs)
        report = check_folder(write(tmp_path / scale, tensors, config))
        assert report.is_sound and report.quantized == LAYERS * len(LINEAR), report
        # Those that engines merge, and that they quantize again.
        assert all(f"{scale} of " in fault.problem for fault in report.faults) and report.faults
        done = convert_folder(tmp_path / scale, tmp_path / f"{scale}-new", "FP8_TENSOR")
        assert done.is_exact
        for name, array in checkpoint("FP8_TENSOR")[0].items():
            assert TensorFolder.open(tmp_path / f"{scale}-new")[name].tobytes() == array.tobytes()
        for part, says in ((scale, "has no model.layers.1.self_attn.k_proj.weight_scale or "), (inputs, "missing")):
            fewer = {name: x for name, x in tensors.items() if name != f"{LAYER}.{part}"}
            (fault,) = check_folder(write(tmp_path / "fewer", fewer, config)).errors
            assert says in fault.problem
        for part, others in (
            (scale, ("weight_scale", "weight_scale_inv")),
            (inputs, ("input_scale", "activation_scale")),
        ):
            more = {f"{LAYER}.{other}": tensors[f"{LAYER}.{part}"] for other in others}
            (fault,) = check_folder(write(tmp_path / "more", tensors | more, config)).errors
            assert fault.tensor == f"{LAYER}.{others[1]}" and f"{LAYER}.{others[0]} is there too" in fault.problem


def test_exponents_in_floats(tmp_path):
    """As DeepSeek-V3.1 has them in blocks: `ue8m0`, and powers of two in float32."""
    tensors, config = checkpoint("HF_FP8")
    config["quantization_config"]["scale_fmt"] = "ue8m0"
    for name in [name for name in tensors if name.endswith("scale_inv")]:
        tensors[name] = np.exp2(np.ceil(np.log2(tensors[name]))).astype(np.float32)
    report = check_folder(write(tmp_path / "float", tensors, config))
    assert report.is_sound and report.layout == "HF_FP8", report
    assert convert_folder(tmp_path / "float", tmp_path / "new", "FP8_BLOCK").is_exact
    shown = lambda: " ".join(str(headers(tmp_path / "float")).split())
    assert "powers of two in float32" in shown() and "E8M0" not in shown()
    for name in [name for name in tensors if name.endswith("scale_inv")]:
        tensors[name] = (np.log2(tensors[name]) + 127).astype(np.uint8)
    write(tmp_path / "float", tensors, config)
    assert "(128, 128) elements, E8M0" in shown() and "powers" not in shown()
    tensors[f"{LAYER}.weight_scale_inv"] = np.ones((1, 1), np.float32)
    write(tmp_path / "float", tensors, config)
    assert "E8M0, and powers of two in float32" in shown()


def group(config):
    return config["quantization_config"]["config_groups"]["group_0"]


def fnuz(tensors):
    tensors[WEIGHT] = tensors[WEIGHT].view(ml_dtypes.float8_e4m3fnuz)


def put(name, value):
    return lambda tensors, config: tensors.update({name: np.asarray(value(tensors[name]))})


def at_first(array, value):
    array = array.copy()
    array.reshape(-1)[0] = value
    return array


def configured(**changes):
    return lambda tensors, config: config["quantization_config"].update(changes)


def renamed(old, new):
    return lambda tensors, config: tensors.update({new: tensors.pop(old)})


def twice(tensors, config):
    # FP8 data quantized again, as weights: their largest magnitudes are 448 already.
    again, scale = quantize(tensors[WEIGHT].astype(np.float32), "FP8_DYNAMIC")
    tensors.update({WEIGHT: again, SCALE: scale})


def to_fp8(name):
    def change(tensors, config):
        data, scale = quantize(tensors[f"{name}.weight"].reshape(-1, HIDDEN), "FP8_DYNAMIC")
        tensors[f"{name}.weight"] = data.reshape(tensors[f"{name}.weight"].shape)
        tensors[f"{name}.weight_scale"] = scale

    return change


def dequantized(tensors, config):
    tensors[WEIGHT] = (tensors[WEIGHT].astype(np.float32) * tensors.pop(SCALE)).astype(ml_dtypes.bfloat16)


def set_group(part, **changes):
    return lambda tensors, config: group(config)[part].update(changes)


def negative(scale):
    return at_first(scale, -scale.reshape(-1)[0])


def again(factor, format=ml_dtypes.float8_e4m3fn, limit=448, sizes=1.0):
    """The weight with a scale of `factor * amax / limit` for each row, in a format's codes, under the label E4M3FN."""

    def change(tensors, config):
        values = tensors[WEIGHT].astype(np.float64) * tensors[SCALE] * sizes
        scale = (np.abs(values).max(axis=1, keepdims=True) / limit * factor).astype(np.float32)
        largest = float(ml_dtypes.finfo(format).max)
        data = np.clip(values / scale, -largest, largest).astype(format)
        tensors.update({WEIGHT: data.view(ml_dtypes.float8_e4m3fn), SCALE: scale})

    return change


# Half of the weights so small that they are rounded to 0 and -0.
SMALL = np.where(np.arange(HIDDEN) % 2, 1.0, 1e-7)


def tied_head(tensors, config):
    to_fp8("lm_head")(tensors, config)
    config["quantization_config"]["ignore"] = []
    config["tie_word_embeddings"] = True


def two_groups(tensors, config):
    config["quantization_config"]["config_groups"]["group_1"] = dict(group(config))


def zeros(name):
    return put(name, np.zeros_like)


def tie(equal, ignore=("lm_head",)):
    """A tied model: with a head that is equal to its embedding, or another one; without one for None."""

    def change(tensors, config):
        config["tie_word_embeddings"] = True
        config["quantization_config"]["ignore"] = [*ignore]
        if equal is None:
            del tensors["lm_head.weight"]
        elif equal:
            tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]

    return change


def rope(**settings):
    return lambda tensors, config: config.update(rope_scaling=settings)


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}

# The layout of the good checkpoint, the change, the tensor of the fault, and what it has to say.
BROKEN = {
    "scales near zero": ("FP8_DYNAMIC", put(SCALE, lambda s: 0 * s + np.float32(1e-20)), SCALE, "adds nothing"),
    "exponents near zero": ("MXFP8", put(SCALE, lambda s: s - 100), SCALE, "adds nothing"),
    "scale of blocks transposed": (
        "FP8_BLOCK",
        put("model.layers.0.mlp.up_proj.weight_scale", lambda s: s.T.copy()),
        "model.layers.0.mlp.up_proj.weight_scale",
        "it is transposed; transpose the scale",
    ),
    "scale of rows transposed": ("FP8_DYNAMIC", put(SCALE, lambda s: s.T.copy()), SCALE, "; transpose the scale"),
    "blocks of a transposed weight": (
        "FP8_BLOCK",
        put("model.layers.0.mlp.up_proj.weight", lambda w: w.T.copy()),
        "model.layers.0.mlp.up_proj.weight_scale",
        "; transpose the weight",
    ),
    "one input, two scales": ("FP8", put(INPUT, lambda s: 448 * s), INPUT, "differ by a factor of 448"),
    "tied head is another": ("FP8_DYNAMIC", tie(False), "lm_head.weight", "it is not model.embed_tokens.weight"),
    "tied head is quantized": ("FP8_DYNAMIC", tie(None, ()), "quantization_config", "does not list lm_head"),
    "rope without its keys": ("FP8_DYNAMIC", rope(rope_type="llama3"), "rope_scaling", "needs factor, low_freq_factor"),
    "rope without a length": ("FP8_DYNAMIC", rope(**LLAMA3), "rope_scaling", "needs original_max_position_embeddings"),
    "scale missing": ("FP8_DYNAMIC", lambda t, c: t.pop(SCALE), WEIGHT, "has no"),
    "scale of what is absent": ("FP8_DYNAMIC", put(SCALE, lambda s: at_first(s, -1.0)), SCALE, "zero or negative"),
    "scale NaN": ("FP8_DYNAMIC", put(SCALE, lambda s: at_first(s, np.nan)), SCALE, "NaN"),
    "scale infinite": ("FP8_DYNAMIC", put(SCALE, lambda s: at_first(s, np.inf)), SCALE, "infinite"),
    "scale zero": ("FP8_DYNAMIC", put(SCALE, lambda s: at_first(s, 0)), SCALE, "zero or negative"),
    "scale negative": ("FP8_TENSOR", put(SCALE, negative), SCALE, "zero or negative"),
    "scale of fewer rows": ("FP8_DYNAMIC", put(SCALE, lambda s: s[:-1]), SCALE, "shape (63, 1)"),
    "scale of columns": (
        "FP8_DYNAMIC",
        put(SCALE, lambda s: np.ones((1, HIDDEN), np.float32)),
        SCALE,
        "shape (1, 128)",
    ),
    "scale of a tensor": ("FP8_DYNAMIC", put(SCALE, lambda s: s[:1, 0]), SCALE, "shape (1,)"),
    "scale in whole numbers": ("FP8_DYNAMIC", put(SCALE, lambda s: s.astype(np.uint8)), SCALE, "uint8"),
    "scale in FP8": ("FP8_DYNAMIC", put(SCALE, lambda s: s.astype(ml_dtypes.float8_e4m3fn)), SCALE, "FP8"),
    "scale by another name": ("FP8_DYNAMIC", renamed(SCALE, SCALE + "_inv"), SCALE + "_inv", "weight_scale"),
    "scale_inv by another name": ("HF_FP8", renamed(SCALE + "_inv", SCALE), WEIGHT, "has no"),
    "scale of no weight": ("FP8_DYNAMIC", lambda t, c: t.update(x_scale=t.pop(SCALE)), WEIGHT, "has no"),
    "weight of no scale": ("FP8_DYNAMIC", lambda t, c: t.pop(WEIGHT), SCALE, "is missing"),
    "blocks of the transposed": (
        "FP8_BLOCK",
        put(f"{SQUARE[:-16]}mlp.up_proj.weight_scale", lambda s: s.T),
        None,
        "shape",
    ),
    "exponents in float": ("MXFP8", put(SCALE, lambda s: s.astype(np.float32)), SCALE, "float32"),
    "exponent NaN": ("MXFP8", put(SCALE, lambda s: at_first(s, 255)), SCALE, "NaN"),
    "exponents of 16": ("MXFP8", put(SCALE, lambda s: np.repeat(s, 2, 1)), SCALE, "shape (64, 8)"),
    "input scale missing": ("FP8", lambda t, c: t.pop(INPUT), INPUT, "missing"),
    "input scale NaN": ("FP8", put(INPUT, lambda s: at_first(s, np.nan)), INPUT, "NaN"),
    "input scale of rows": ("FP8", put(INPUT, lambda s: np.ones(4, np.float32)), INPUT, "shape (4,)"),
    "input scale missing, ModelOpt": ("modelopt", lambda t, c: t.pop(INPUT), INPUT, "missing"),
    "cache scale zero": ("FP8", lambda t, c: t.update({f"{LAYER}.k_scale": np.zeros(1, np.float32)}), None, "zero"),
    "data NaN": ("FP8_DYNAMIC", put(WEIGHT, lambda w: at_first(w, np.nan)), WEIGHT, "NaN"),
    "weight E5M2": ("FP8_DYNAMIC", put(WEIGHT, lambda w: w.astype(ml_dtypes.float8_e5m2)), WEIGHT, "e5m2"),
    "weight fnuz": ("FP8_DYNAMIC", lambda t, c: fnuz(t), WEIGHT, "fnuz"),
    "weight transposed": ("FP8_DYNAMIC", put(WEIGHT, lambda w: np.ascontiguousarray(w.T)), SCALE, "transposed"),
    "square weight transposed": (
        "FP8_DYNAMIC",
        put(f"{SQUARE}.weight", lambda w: w.T.copy()),
        f"{SQUARE}.weight",
        "trans",
    ),
    "plain weight transposed": (None, put(WEIGHT, lambda w: w.T.copy()), WEIGHT, "transposed"),
    "quantized twice": ("FP8_DYNAMIC", twice, SCALE, "quantized twice"),
    "scales lost": ("FP8_DYNAMIC", put(SCALE, np.ones_like), SCALE, "lost"),
    "not quantized": ("FP8_DYNAMIC", dequantized, WEIGHT, "`ignore` does not list"),
    "half of fused": ("FP8_DYNAMIC", dequantized, "model.layers.1.self_attn.q_proj.weight", "some are not"),
    "head in FP8 and ignored": ("FP8_DYNAMIC", to_fp8("lm_head"), "lm_head.weight", "`ignore` lists"),
    "head not ignored": ("FP8_DYNAMIC", configured(ignore=[]), "lm_head.weight", "head"),
    "embedding in FP8": ("FP8_DYNAMIC", to_fp8("model.embed_tokens"), "model.embed_tokens.weight", "embeddings"),
    "norm in FP8": ("FP8_DYNAMIC", to_fp8("model.norm"), "model.norm.weight", "norms"),
    "ignored layer in FP8": ("FP8_DYNAMIC", configured(ignore=["lm_head", "re:.*k_proj"]), WEIGHT, "`ignore` lists"),
    "no quantization_config": ("FP8_DYNAMIC", lambda t, c: c.pop("quantization_config"), WEIGHT, "quantization_config"),
    "nothing in FP8": (
        None,
        lambda t, c: c.update(quantization_config=quantization("FP8")),
        None,
        "no tensor is in FP8",
    ),
    "router not ignored": (
        "FP8_DYNAMIC",
        lambda t, c: t.update(
            {
                "model.layers.0.mlp.gate.weight": np.ones((4, HIDDEN), ml_dtypes.bfloat16),
                "model.layers.0.mlp.experts.norm.weight": np.ones(HIDDEN, ml_dtypes.bfloat16),
            }
        ),
        "model.layers.0.mlp.gate.weight",
        "router",
    ),
    "norm NaN": (None, put("model.norm.weight", lambda w: at_first(w, np.nan)), "model.norm.weight", "NaN"),
    "unknown method": ("FP8", configured(quant_method="float8"), "quantization_config", "quant_method='float8'"),
    "no method": ("FP8", configured(quant_method=None), "quantization_config", "quant_method=None"),
    "unknown format": ("FP8", configured(format="fp8"), "quantization_config", "format='fp8'"),
    "no status": ("FP8", configured(quantization_status=None), "quantization_config", "quantization_status"),
    "no groups": ("FP8", configured(config_groups={}), "quantization_config", "config_groups"),
    "unknown strategy": ("FP8", set_group("weights", strategy="row"), "quantization_config", "strategy='row'"),
    "other block": ("FP8_BLOCK", set_group("weights", block_structure=[64, 64]), None, "shape (1, 1)"),
    "no block": ("FP8_BLOCK", set_group("weights", block_structure=None), "quantization_config", "block_structure"),
    "four bits": ("FP8", set_group("weights", num_bits=4), "quantization_config", "num_bits=4"),
    "static tokens": ("FP8", set_group("input_activations", strategy="token"), "quantization_config", "static inputs"),
    "strategy of rows": ("FP8_TENSOR", set_group("weights", strategy="channel"), SCALE, "shape (1,)"),
    "ignore is a text": ("FP8", configured(ignore="lm_head"), "quantization_config", "list of names"),
    "a pattern without end": (
        "FP8",
        configured(ignore=["lm_head", "re:(([a-z0-9._])+)+!"]),
        "ignore",
        "repeats what is itself repeated",
    ),
    "ignore is no pattern": ("FP8", configured(ignore=["re:(lm_head"]), "ignore", "not a regular expression"),
    "long pattern": ("FP8", configured(ignore=["re:" + "a|" * 1000]), "ignore", "at most 2000"),
    "targets are no pattern": (
        "FP8",
        lambda t, c: group(c).update(targets=["re:(mlp"]),
        "targets",
        "not a regular expression",
    ),
    "quantization is a list": ("FP8", lambda t, c: c.update(quantization_config=[1]), "quantization_config", "object"),
    "another ModelOpt": ("modelopt", configured(quant_algo="FP9"), "quantization_config", "quant_algo='FP9'"),
    "sizes": ("FP8_DYNAMIC", lambda t, c: c.update(intermediate_size=256), None, "config.json says (256, 128)"),
    "size of a text": ("FP8_DYNAMIC", lambda t, c: c.update(hidden_size="128"), "hidden_size", "whole number"),
    "size negative": ("FP8_DYNAMIC", lambda t, c: c.update(num_hidden_layers=-1), "num_hidden_layers", "whole number"),
    "more blocks": ("FP8_DYNAMIC", lambda t, c: c.update(num_hidden_layers=3), "num_hidden_layers", "model.layers.2"),
    "fewer blocks": ("FP8_DYNAMIC", lambda t, c: c.update(num_hidden_layers=1), "num_hidden_layers", "model.layers.1"),
    "no head": ("FP8_DYNAMIC", lambda t, c: t.pop("lm_head.weight"), "tie_word_embeddings", "lm_head"),
    "clipped": ("FP8_DYNAMIC", again(1 / 8), WEIGHT, "are 448 or -448"),
    "clipped a little": ("FP8_DYNAMIC", again(1 / 2), WEIGHT, "are 448 or -448"),
    "range unused": ("FP8_DYNAMIC", again(64), WEIGHT, "64 times too large"),
    "codes of fnuz": ("FP8_DYNAMIC", again(1, ml_dtypes.float8_e4m3fnuz, 240, SMALL), WEIGHT, "fnuz"),
    "scale of overflow": ("FP8_DYNAMIC", put(SCALE, lambda s: at_first(s, 1e38)), SCALE, "reaches inf"),
    "scale subnormal": ("FP8_DYNAMIC", put(SCALE, lambda s: at_first(s, 1e-40)), SCALE, "2**-126"),
    "exponent subnormal": ("MXFP8", put(SCALE, np.zeros_like), SCALE, "2**-126"),
    "input scale subnormal": ("FP8", put(INPUT, lambda s: at_first(s, 1e-40)), INPUT, "NaN or zeros"),
    "input scale too large": ("FP8", put(INPUT, lambda s: at_first(s, 1e38)), INPUT, "NaN or zeros"),
    "tied head in FP8": ("FP8_DYNAMIC", tied_head, "lm_head.weight", "tie_word_embeddings"),
    "weight zero": ("FP8_DYNAMIC", zeros(WEIGHT), WEIGHT, "all of its elements are zero"),
    "plain weight zero": (None, zeros(WEIGHT), WEIGHT, "all of its elements are zero"),
    "norm zero": ("FP8_DYNAMIC", zeros("model.norm.weight"), "model.norm.weight", "all of its elements are zero"),
    "targets of nothing": ("FP8", lambda t, c: group(c).update(targets=["Foo"]), "targets", "bytes for the weights"),
    "pattern of nothing": (
        "FP8",
        lambda t, c: group(c).update(targets=["re:.*q_proj"]),
        "targets",
        "and 11 more, which are in FP8",
    ),
    "zero points": ("FP8", set_group("weights", symmetric=False), "quantization_config", "symmetric=False"),
    "bits of a float": ("FP8", set_group("weights", num_bits=8.0), "quantization_config", "num_bits=8.0"),
    "one group twice": ("FP8", two_groups, "quantization_config", "'Linear' in two groups"),
    "caches of a text": ("FP8", configured(kv_cache_scheme={"num_bits": "x"}), "quantization_config", "num_bits='x'"),
    "caches of a number": ("modelopt", configured(kv_cache_scheme=7), "quantization_config", "kv_cache_scheme=7"),
    "unknown dtype": ("FP8", lambda t, c: c.update(torch_dtype="float7"), "torch_dtype", "float7"),
    "blocks too large": ("HF_FP8", configured(weight_block_size=[2**70] * 2), "quantization_config", "from 1 to"),
    "layer missing": (None, lambda t, c: t.pop(WEIGHT), WEIGHT, "no file has it"),
}


@pytest.mark.parametrize(("layout", "change", "tensor", "says"), BROKEN.values(), ids=BROKEN)
def test_every_fault_is_named(tmp_path, layout, change, tensor, says):
    tensors, config = checkpoint(layout)
    change(tensors, config)
    report = check_folder(write(tmp_path / "x", tensors, config))
    errors = [error for error in report.errors if tensor in (None, error.tensor) and says in error.line]
    assert errors, report
    assert all(fault.remedy and fault.line.endswith(fault.remedy) for fault in report.faults)
    assert all(error.file in (CONFIG, "model.safetensors") for error in errors)
    assert errors[0].file == CONFIG or tensor not in ("quantization_config", "ignore", "targets")


# The same of remarks.
REMARKS = {
    "codes of fnuz": ("FP8_DYNAMIC", again(1, ml_dtypes.float8_e4m3fnuz, 224, SMALL), WEIGHT, "fnuz"),
    "status": ("FP8_DYNAMIC", configured(quantization_status="frozen"), "quantization_config", "frozen"),
    "old scale of caches": (
        "FP8_DYNAMIC",
        lambda t, c: (
            configured(kv_cache_scheme={"num_bits": 8, "type": "float"})(t, c),
            t.update({"model.layers.0.self_attn.kv_scale": np.ones(1, np.float32)}),
        ),
        "model.layers.0.self_attn.kv_scale",
        "k_scale and as v_scale",
    ),
    "zeros where norms do not multiply": (
        None,
        lambda t, c: (zeros("model.norm.weight")(t, c), c.update(model_type="gemma")),
        "model.norm.weight",
        "zero",
    ),
}


@pytest.mark.parametrize(("layout", "change", "tensor", "says"), REMARKS.values(), ids=REMARKS)
def test_remarks_do_not_break_a_folder(tmp_path, layout, change, tensor, says):
    tensors, config = checkpoint(layout)
    change(tensors, config)
    (fault,) = check_folder(write(tmp_path / "x", tensors, config)).faults
    assert (fault.tensor, fault.is_error) == (tensor, False) and says in fault.line


def test_shared_experts_have_a_width_that_is_not_the_experts(tmp_path):
    """As in Qwen2-MoE: `moe_intermediate_size` is that of the others, and the second block has no experts."""
    random, tensors = np.random.default_rng(0), plain()
    mlp = "model.layers.0.mlp"
    for name in [name for name in tensors if name.startswith(mlp)]:
        del tensors[name]
    for layer, inner in {"experts.0": 64, "experts.1": 64, "shared_expert": 256}.items():
        for part in ("gate_proj", "up_proj", "down_proj"):
            shape = (HIDDEN, inner) if part == "down_proj" else (inner, HIDDEN)
            tensors[f"{mlp}.{layer}.{part}.weight"] = random.standard_normal(shape).astype(ml_dtypes.bfloat16)
    tensors[f"{mlp}.gate.weight"] = random.standard_normal((2, HIDDEN)).astype(ml_dtypes.bfloat16)
    tensors[f"{mlp}.shared_expert_gate.weight"] = random.standard_normal((1, HIDDEN)).astype(ml_dtypes.bfloat16)
    sizes = {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 256, "num_experts": 2}
    config = {**checkpoint(None)[1], "model_type": "qwen2_moe", "mlp_only_layers": [1], **sizes}
    report = check_folder(write(tmp_path / "sound", tensors, config))
    assert report.errors == (), report
    tensors[f"{mlp}.experts.1.up_proj.weight"] = tensors[f"{mlp}.shared_expert.up_proj.weight"]
    (error,) = check_folder(write(tmp_path / "broken", tensors, config)).errors
    assert error.tensor == f"{mlp}.experts.1.up_proj.weight"


def test_weights_of_other_distributions_are_sound(tmp_path):
    """Of few values, uniform, with many zeros of both signs, with blocks of zeros; and scaled a little too small."""
    random = np.random.default_rng(0)
    shape, signs = (64, HIDDEN), random.choice([-1.0, 1.0], (64, HIDDEN))
    kinds = {
        "ternary": signs * random.integers(0, 2, shape),
        "four bits": random.integers(-7, 8, shape) * 1.0,
        "uniform": random.uniform(-1, 1, shape),
        "small": random.standard_normal(shape) * SMALL,
        "a row of zeros": random.standard_normal(shape) * (np.arange(64) < 63)[:, None],
    }
    for name, values in kinds.items():
        for layout in ("FP8_DYNAMIC", "FP8_BLOCK", "MXFP8"):
            tensors, config = checkpoint(layout)
            with np.errstate(divide="ignore", invalid="ignore"):
                data, scale = quantize(values.astype(ml_dtypes.bfloat16), layout)
            # Zeros have the smallest scale in E8M0, and any other will do.
            smallest = np.uint8(0) if layout == "MXFP8" else np.float32(1e-40)
            tensors[SCALE] = np.where((scale > 0) & (values.any(1, keepdims=True)), scale, smallest).astype(scale.dtype)
            tensors[SCALE] = tensors[SCALE][:1, :1] if layout == "FP8_BLOCK" else tensors[SCALE]
            tensors[WEIGHT] = np.nan_to_num(data.astype(np.float32)).astype(data.dtype)
            report = check_folder(write(tmp_path / f"{name}-{layout}", tensors, config))
            faults = [fault for fault in report.faults if fault.tensor in (WEIGHT, SCALE)]
            # Zeros that are none of rounding have one sign, as those of FNUZ.
            assert not any(fault.is_error or "fnuz" not in fault.problem for fault in faults), f"{name}: {report}"
            assert not faults or name in ("ternary", "four bits", "a row of zeros"), f"{name}: {report}"
    tensors, config = checkpoint("FP8_DYNAMIC")
    again(0.95)(tensors, config)
    assert not check_folder(write(tmp_path / "clipped", tensors, config)).faults


def test_four_bits_are_sound(tmp_path):
    """As compressed-tensors, ModelOpt, gpt-oss and DeepSeek-V4 have them; and a layer of each kind in one folder."""
    for kind in FOUR_BITS:
        tensors, config, meant = four_bits(kind)
        folder = write(tmp_path / kind, tensors, config)
        report = check_folder(folder)
        assert report.is_sound and not [f for f in report.faults if "is the name of no layer" not in f.problem], report
        assert report.quantized == len(meant) and report.tensors == len(tensors)
        assert report.in_four_bits == len(meant) - (kind == "DeepSeek-V4")
        assert kind in report.layout or (kind, report.layout) == ("DeepSeek-V4", "HF_FP8 and fp8, MXFP4")
        assert "weights in four bits" in " ".join(str(report).split()) and "E2M1" in str(headers(folder))
        assert sum(kind.bytes for kind in report.contents.values()) == sum(x.nbytes for x in tensors.values())
        read = tensors_in(TensorFolder.open(folder))
        for name, values in meant.items():
            for index in np.ndindex(values.shape[:-2]):
                assert np.array_equal(read[name].read(index).dequantized(), values[index]), f"{kind}, {name}"
    tensors, config = mixed_bits()
    report = check_folder(write(tmp_path / "mixed", tensors, config))
    assert not report.faults and (report.quantized, report.in_four_bits) == (14, 6), report
    assert report.layout == "FP8_DYNAMIC and NVFP4A16"


def mixed_bits():
    """A checkpoint whose attention is in FP8 and whose MLPs are in four bits."""
    (tensors, config), (packed, described, _) = checkpoint("FP8_DYNAMIC"), four_bits("NVFP4A16")
    mixed = {name: x for name, x in tensors.items() if ".mlp." not in name}
    mixed |= {name: x for name, x in packed.items() if ".mlp." in name}
    groups = {"group_0": group(config) | {"format": "float-quantized"}}
    groups["group_1"] = group(described) | {"targets": ["re:.*mlp.*"], "format": "nvfp4-pack-quantized"}
    config["quantization_config"] |= {"format": "mixed-precision", "config_groups": groups}
    return mixed, config


PACKED, UNIT = f"{LAYER}.weight_packed", f"{LAYER}.weight_global_scale"

# As `BROKEN`, of checkpoints in four bits.
BROKEN_IN_FOUR_BITS = {
    "no scales": ("MXFP4", lambda t, c: t.pop(SCALE), PACKED, "four bits and has no"),
    "exponent NaN": ("MXFP4", put(SCALE, lambda s: at_first(s, 255)), SCALE, "NaN"),
    "scales lost": ("MXFP4", put(SCALE, lambda s: np.full_like(s, 127)), SCALE, "all of its scales are 1"),
    "groups of 16": ("MXFP4", put(SCALE, lambda s: np.repeat(s, 2, 1)), SCALE, "shape (64, 8)"),
    "half of the bytes": ("MXFP4", put(PACKED, lambda w: w[:, ::2].copy()), None, "shape (64, 64)"),
    "bytes without scales": (
        "MXFP4",
        lambda t, c: (t.pop(SCALE), t.update({WEIGHT: t.pop(PACKED)})),
        WEIGHT,
        "is in uint8, and `ignore` does not list",
    ),
    "exponents in float": ("MXFP4", put(SCALE, lambda s: np.exp2(s.astype(np.float32) - 127)), SCALE, "float32"),
    "weights zero": ("MXFP4", put(PACKED, np.zeros_like), PACKED, "all of its elements are zero"),
    "global scale missing": ("NVFP4", lambda t, c: t.pop(UNIT), UNIT, "is missing"),
    "global scale zero": ("NVFP4A16", put(UNIT, np.zeros_like), UNIT, "it is 0.0"),
    "global scale NaN": ("NVFP4", put(UNIT, lambda s: s * np.nan), UNIT, "it is nan"),
    "global scale of rows": ("NVFP4", put(UNIT, lambda s: np.repeat(s, 4)), UNIT, "shape (4,)"),
    "scales in float": ("NVFP4", put(SCALE, lambda s: s.astype(np.float32)), SCALE, "float8_e4m3fn"),
    "scale negative": ("NVFP4", put(SCALE, negative), SCALE, "zero or negative"),
    "scales of blocks zero": ("NVFP4", put(SCALE, np.zeros_like), PACKED, "all of its elements are zero"),
    "format not a name": ("NVFP4", configured(format=["nvfp4-pack-quantized"]), "quantization_config", "format="),
    "input scale missing": ("NVFP4", lambda t, c: t.pop(f"{LAYER}.input_global_scale"), INPUT, "missing"),
    "input scale zero": (
        "NVFP4",
        put(f"{LAYER}.input_global_scale", np.zeros_like),
        f"{LAYER}.input_global_scale",
        "infinite",
    ),
    "second scale missing": (
        "modelopt, NVFP4",
        lambda t, c: t.pop(f"{LAYER}.weight_scale_2"),
        f"{LAYER}.weight_scale_2",
        "is missing",
    ),
    "scale of an expert missing": (
        "DeepSeek-V4",
        lambda t, c: t.pop("layers.0.ffn.experts.1.w1.scale"),
        "layers.0.ffn.experts.1.w1.weight",
        "is in int8, and `ignore` does not list",
    ),
    "attention in four bits": (
        "mxfp4, MXFP4 weights",
        lambda t, c: t.update(four_bit_attention()),
        "model.layers.0.self_attn.q_proj_blocks",
        "`ignore` lists",
    ),
    "experts' exponent NaN": (
        "mxfp4, MXFP4 weights",
        put("model.layers.0.mlp.experts.down_proj_scales", lambda s: at_first(s, 255)),
        "model.layers.0.mlp.experts.down_proj_scales",
        "NaN",
    ),
    "format of the other": ("MXFP4", configured(format="nvfp4-pack-quantized"), "quantization_config", "groups of 16"),
    "eight bits": ("MXFP4", set_group("weights", num_bits=8), "quantization_config", "num_bits=8"),
    "ignored": ("NVFP4", configured(ignore=["lm_head", "re:.*k_proj"]), PACKED, "`ignore` lists"),
    "no quantization_config": ("NVFP4A16", lambda t, c: c.pop("quantization_config"), PACKED, "four bits, and config"),
}


def four_bit_attention():
    tensors, _, _ = four_bits("mxfp4, MXFP4 weights")
    part = "model.layers.0.mlp.experts.down_proj"
    return {f"model.layers.0.self_attn.q_proj_{x}": tensors[f"{part}_{x}"] for x in ("blocks", "scales")}


@pytest.mark.parametrize(("layout", "change", "tensor", "says"), BROKEN_IN_FOUR_BITS.values(), ids=BROKEN_IN_FOUR_BITS)
def test_every_fault_in_four_bits_is_named(tmp_path, layout, change, tensor, says):
    tensors, config, _ = four_bits(layout)
    change(tensors, config)
    report = check_folder(write(tmp_path / "x", tensors, config))
    assert [error for error in report.errors if tensor in (None, error.tensor) and says in error.line], report
    assert all(fault.remedy and fault.line.endswith(fault.remedy) for fault in report.faults)


def test_global_scales_that_differ_where_engines_have_one_are_a_remark(tmp_path):
    tensors, config, _ = four_bits("NVFP4A16")
    tensors[UNIT] = tensors[UNIT] * 2
    (fault,) = check_folder(write(tmp_path / "x", tensors, config)).faults
    assert not fault.is_error and "weight_global_scale of q_proj, k_proj, v_proj differ" in fault.problem


def as_compressed_tensors(whole):
    scheme = {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int"}}
    return {"quant_method": "compressed-tensors", "format": whole, "config_groups": {"group_0": scheme}}


# Configurations of layouts that are not read, and what names them.
UNSUPPORTED = {
    "awq": {"quant_method": "awq", "bits": 4},
    "bitsandbytes": {"quant_method": "bitsandbytes", "load_in_4bit": True},
    "hqq": {"quant_method": "hqq"},
    "compressed-tensors pack-quantized": as_compressed_tensors("pack-quantized"),
    "modelopt W4A16_AWQ": {"quant_method": "modelopt", "quant_algo": "W4A16_AWQ"},
    "torchao Int4WeightOnlyConfig": {
        "quant_method": "torchao",
        "quant_type": {"default": {"_type": "Int4WeightOnlyConfig"}},
    },
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_layouts_that_are_not_supported(tmp_path, name):
    """Their name and a tool are said; nothing is half imported."""
    tensors, config = packed(checkpoint(None)[1] | {"quantization_config": UNSUPPORTED[name]})
    folder = write(tmp_path / "x", tensors, config)
    report = check_folder(folder)
    assert report.verdict == "not supported here" and not report.is_sound and not report.faults, report
    assert report.layout.startswith(name) and report.converter and report.converter in " ".join(str(report).split())
    shown = " ".join(str(headers(folder)).split())
    assert report.layout in shown and report.converter in shown and "in integers 14" in shown
    with pytest.raises(NotSupported, match=re.escape(report.converter)):
        convert_folder(folder, tmp_path / "new", "BF16")
    with pytest.raises(NotSupported, match=re.escape(report.converter)):
        tensors_in(TensorFolder.open(folder))


@pytest.mark.parametrize(
    ("tensor", "change"),
    [
        ("model.norm.weight", put("model.norm.weight", lambda w: at_first(w, np.nan))),
        ("lm_head.weight", put("lm_head.weight", lambda w: w[:, 1:])),
        ("num_hidden_layers", lambda t, c: c.update(num_hidden_layers=3)),
    ],
)
def test_what_does_not_depend_on_the_layout_is_checked(tmp_path, tensor, change):
    tensors, config = packed(checkpoint(None)[1] | {"quantization_config": UNSUPPORTED["awq"]})
    change(tensors, config)
    report = check_folder(write(tmp_path / "x", tensors, config))
    assert report.verdict == "broken" and report.layout == "awq" and [f.tensor for f in report.errors] == [tensor]


def test_headers_alone_tell_what_is_wrong_with_the_configuration(tmp_path):
    tensors, config = checkpoint("FP8_DYNAMIC")
    tensors["model.norm.weight"][0] = np.nan
    folder = write(tmp_path / "x", tensors, config)
    assert check_folder(folder).verdict == "broken"
    report = headers(folder)
    assert (report.verdict, report.is_sound, report.faults) == ("values not read", False, ())
    assert report.contents == check_folder(folder).contents and "E4M3 by E4M3" in str(report)
    (folder / CONFIG).write_text(json.dumps(config | {"num_hidden_layers": LAYERS + 1}))
    report = headers(folder)
    assert report.verdict == "broken" and [fault.tensor for fault in report.errors] == ["num_hidden_layers"]


def test_files_that_cannot_be_read_are_faults(tmp_path):
    path = write(tmp_path / "x", *checkpoint("FP8"))
    (path / "model.safetensors").write_bytes(b"")
    (fault,) = check_folder(path).errors
    assert fault.file == "model.safetensors" and "truncated" in fault.problem
    (path / "config.json").unlink()
    assert [fault.file for fault in check_folder(path).errors] == [CONFIG]


def test_tensors_of_unknown_types_are_faults_by_their_names(tmp_path):
    """Weights, scales and anything else; what else is wrong is said too."""
    tensors, config = checkpoint("FP8")
    layer = "model.layers.0.mlp.up_proj"
    tensors[f"{layer}.k_scale"] = np.ones(1, np.float32)
    header, names = header_of(tensors), (WEIGHT, f"{layer}.weight_scale", f"{layer}.input_scale", f"{layer}.k_scale")
    for name in (*names, "model.norm.weight"):
        header[name]["dtype"] = "F4"
    header["lm_head.weight"] |= {"dtype": "I16"}
    path = write(tmp_path / "x", tensors, config)
    (path / "model.safetensors").write_bytes(file_of(tensors, header))
    faults = check_folder(path).errors
    unknown = {fault.tensor for fault in faults if fault.problem.startswith("its dtype 'F4' is unknown")}
    assert unknown == {*names, "model.norm.weight"}
    assert any(f"it is a scale, and {WEIGHT} is in F4, which has none" == fault.problem for fault in faults)
    assert not any("void" in fault.problem or "V1" in fault.problem for fault in faults)
    with pytest.raises(BrokenCheckpoint, match="input_scale: it is in F4; scales of inputs are"):
        convert_folder(path, tmp_path / "new", "BF16")


def test_fused_partners_with_other_scales_are_remarks(tmp_path):
    report = check_folder(write(tmp_path / "x", *checkpoint("FP8_TENSOR")))
    assert report.is_sound
    assert {fault.tensor for fault in report.faults} == {
        f"model.layers.{i}.{first}.weight" for i in range(LAYERS) for first in ("self_attn.q_proj", "mlp.gate_proj")
    }


def test_names_of_layouts_are_those_of_their_configurations():
    for layout in LAYOUTS:
        parsed = layout_of({"quantization_config": quantization(layout)})
        assert parsed is not None and parsed.name == layout
    assert layout_of({}) is None


def test_scales_of_keys_and_values(tmp_path):
    """One of each, numbers, and named in the configuration; by the names of each layout."""
    # Whole weights of different scales, which engines fuse, are another matter.
    faults = lambda folder: [f for f in check_folder(folder).faults if "quantize again" not in f.problem]
    for layout, (key, value) in {
        "FP8_DYNAMIC": ("k_scale", "v_scale"),
        "modelopt": ("k_proj.k_scale", "v_proj.v_scale"),
    }.items():
        tensors, config = checkpoint(layout)
        scheme = config["quantization_config"]
        scheme["kv_cache_scheme"] = {"num_bits": 8, "type": "float", "dynamic": False, "strategy": "tensor"}
        attention = "model.layers.0.self_attn"
        both = {f"{attention}.{name}": np.array([0.5], np.float32) for name in (key, value)}
        assert not faults(write(tmp_path / f"{layout}-good", {**tensors, **both}, config))
        (absent,) = faults(write(tmp_path / f"{layout}-absent", tensors, config))
        assert not absent.is_error and "engines take 1" in absent.problem
        one = {f"{attention}.{key}": np.array([0.5], np.float32)}
        (fault,) = faults(write(tmp_path / f"{layout}-one", {**tensors, **one}, config))
        assert (
            fault.is_error
            and fault.tensor == f"{attention}.{key}"
            and f"{attention}.{value} is missing" in fault.problem
        )
        wide = {name: np.ones(4, np.float32) for name in both}
        assert len(check_folder(write(tmp_path / f"{layout}-wide", {**tensors, **wide}, config)).errors) == 2
        scheme["kv_cache_scheme"] = None
        remarks = faults(write(tmp_path / f"{layout}-unsaid", {**tensors, **both}, config))
        assert len(remarks) == 2 and not any(remark.is_error for remark in remarks)
