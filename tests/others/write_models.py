"""Writes small models of each architecture with Transformers alone, and the logits that it computes.

    python tests/others/write_models.py FOLDER

For each architecture there is a folder for its usual configuration, and one for each key of `config.json` with another
value; and one for each of `published.py`, whose `config.json` is as published. The interpreter is Python 3.11 with the
packages of `requirements.txt`.
"""

import json
import pathlib
import shutil
import sys

import torch
from published import PUBLISHED, published
from transformers import AutoConfig, AutoModelForCausalLM


SIZES = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
}
FAMILIES = {
    "llama": {},
    "mistral": {"sliding_window": None},
    "qwen2": {},
    "qwen3": {},
    "mixtral": {"num_local_experts": 4},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48},
}
LLAMA_3 = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
# Values that another rule than `other` gives.
SPECIAL = {
    "hidden_act": ["gelu"],
    "rope_parameters": [
        {"rope_type": "default", "rope_theta": 500.0},
        {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0},
        LLAMA_3,
        {"rope_type": "yarn", "rope_theta": 500.0, "factor": 2.0, "original_max_position_embeddings": 32},
    ],
    "sliding_window": [8],
    "mlp_only_layers": [[0]],
    "layer_types": [["sliding_attention", "full_attention"]],
    "num_attention_heads": [8],
}
OF_PUBLISHED = {
    "layer_types": [["full_attention", "sliding_attention"] * 2],
    "no_rope_layers": [[0, 1, 1, 1]],
    "hidden_act": ["gelu"],
    "hidden_activation": ["gelu"],
    "sliding_window": [5],
    "head_dim": [24],
    # Without an effect in Transformers, whatever their values.
    **dict.fromkeys(("attention_dropout", "pretraining_tp", "max_sequence_length", "attention_head_dim"), []),
}
TOKENS = torch.arange(48).reshape(2, 24) * 7 % 64


def other(value: object) -> list[object]:
    """Another value for a key; none for what is not a number or a truth value."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int | float):
        return [type(value)(2 * value) if value else type(value)(1) / 4 if isinstance(value, float) else 1]
    return []


def write(folder: pathlib.Path, settings: dict[str, object], as_they_are: bool = False) -> bool:
    """Writes a model and its logits; whether Transformers takes the settings.

    Args:
        folder: Where.
        settings: What `config.json` says.
        as_they_are: Whether it says nothing else, as a published one; otherwise it is what Transformers writes.
    """
    torch.manual_seed(0)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(settings))
    try:
        config = AutoConfig.from_pretrained(folder) if as_they_are else AutoConfig.for_model(**settings)
        model = AutoModelForCausalLM.from_config(config).to(torch.float32).eval()
        for parameter in model.parameters():
            # Norms and biases that do something.
            if parameter.ndim == 1:
                torch.nn.init.uniform_(parameter, 0.5, 1.5)
        with torch.no_grad():
            logits = model(TOKENS).logits
    except Exception as error:
        print(f"{folder.name}: Transformers does not take it: {type(error).__name__} {error}")
        shutil.rmtree(folder)
        return False
    model.save_pretrained(folder)
    if as_they_are:
        (folder / "config.json").write_text(json.dumps(settings))
    (folder / "logits.json").write_text(json.dumps({"tokens": TOKENS.tolist(), "logits": logits.tolist()}))
    return True


if __name__ == "__main__":
    root = pathlib.Path(sys.argv[1])
    for name, settings in published().items():
        write(root / f"{name}--", settings, as_they_are=True)
        for key in PUBLISHED[name].keys() & settings.keys() - {"model_type"}:
            for index, changed in enumerate(OF_PUBLISHED.get(key, other(settings[key]))):
                write(root / f"{name}--{key}--{index}", settings | {key: changed}, as_they_are=True)
    for family, options in FAMILIES.items():
        base = {"model_type": family, **SIZES, **options}
        write(root / f"{family}--", base)
        known = json.loads((root / f"{family}--" / "config.json").read_text())
        for key, value in known.items():
            for index, changed in enumerate(SPECIAL.get(key, other(value))):
                folder = root / f"{family}--{key}--{index}"
                extra = {"use_sliding_window": True} if key in ("sliding_window", "layer_types") else {}
                write(folder, {**base, **({} if "sliding_window" in base or not extra else extra), key: changed})
