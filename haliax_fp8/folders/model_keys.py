"""What `config.json` says of the model as a whole, beside its sizes: rotary embedding, and a head that is tied."""

from collections.abc import Iterator, Mapping

import numpy as np

from ..layouts import Layout
from .beside import EMBEDDING, HEAD, TIED
from .folder import CONFIG, TensorFolder
from .layout import FLOATS, KEY, as_float32
from .patterns import matcher


# What each kind of rotary embedding needs.
_ROPE = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "longrope": ("short_factor", "long_factor"),
}


def model_faults(folder: TensorFolder, layout: Layout | None) -> Iterator[tuple[str, str, str, str]]:
    """File, tensor or key, problem and remedy, for what engines would compute in another way, or not at all.

    Args:
        folder: The folder.
        layout: What its configuration says of its layers.
    """
    config = folder.config
    for key in ("rope_scaling", "rope_parameters"):
        settings = config.get(key)
        parts = [settings, *settings.values()] if isinstance(settings, Mapping) else []
        for part in filter(lambda part: isinstance(part, Mapping), parts):
            kind = part.get("rope_type", part.get("type"))
            needed = _ROPE.get(kind, ()) if isinstance(kind, str) else ()
            if missing := [name for name in needed if part.get(name) is None and config.get(name) is None]:
                problem = f"rope_type={kind!r} needs {', '.join(missing)}, without which positions have other angles"
                yield CONFIG, key, problem, "copy it from the original folder"
    if config.get(TIED) is not True:
        return
    head = folder.tensors.get(f"{HEAD}.weight")
    tables = [name for name in folder.tensors if name.endswith(EMBEDDING)]
    if head is not None and len(tables) == 1 and head.dtype in FLOATS:
        table = folder.tensors[tables[0]]
        if table.dtype in FLOATS and not _are_equal(head.array(), table.array()):
            problem = f"it is not {tables[0]}, and {TIED} is true: some engines use the embedding in its place"
            yield head.file.name, head.name, problem, f"remove it, or set {TIED} to false"
    is_causal = any("CausalLM" in str(name) for name in config.get("architectures") or [])
    if layout is not None and layout.method == "compressed-tensors" and head is None and tables and is_causal:
        means = lambda key, entries: any(matcher(key, entry, layout.method)(HEAD) for entry in entries)
        is_meant = "Linear" in layout.targets or means("targets", layout.targets)
        if is_meant and not means("ignore", layout.ignore):
            problem = f"{TIED} is true, and `ignore` does not list {HEAD}: Transformers quantizes it, and its scale"
            yield CONFIG, KEY, f"{problem} is whatever was in the memory", f"add {HEAD} to `ignore`"


def _are_equal(first: np.ndarray, second: np.ndarray) -> bool:
    """Whether two arrays have the same values, looked at some rows at a time."""
    parts = (slice(start, start + 1024) for start in range(0, first.shape[0] if first.ndim else 0, 1024))
    return first.shape == second.shape and all(
        np.array_equal(as_float32(first[part]), as_float32(second[part])) for part in parts
    )


def input_scales(scales: Mapping[str, float]) -> Iterator[tuple[str, float]]:
    """The scales of static inputs that are far from those of other layers, and how far.

    Args:
        scales: Positive finite scales by name.
    """
    middle = float(np.median([*scales.values()])) if len(scales) > 3 else 0.0
    for name, scale in scales.items() if middle else ():
        if not 1 / _FAR < scale / middle < _FAR:
            yield name, scale / middle


# The largest inputs of a model are some hundred times those of its usual layers.
_FAR = 300.0
