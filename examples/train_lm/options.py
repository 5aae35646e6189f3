"""The command line: every option of the model, the optimizer, the recipe and the run."""

import argparse
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from haliax_fp8 import DelayedScaling, Recipe
from haliax_fp8.models import MixtureOfExperts, SwiGlu, TransformerConfig
from haliax_fp8.recipes import E4M3, E5M2, StaticScaling, named as named_recipes


FORMATS = {"E4M3": E4M3, "E5M2": E5M2}

_WITH_OPTIONS = ("delayed", "static")

# The choices of `--recipe`. Each entry makes a recipe from the parsed flags; add an entry to add a recipe.
RECIPES: dict[str, Callable[[argparse.Namespace], Recipe]] = {
    "delayed": lambda options: Recipe.of(
        DelayedScaling(options.amax_history_length, options.margin),
        forward=FORMATS[options.forward_format],
        backward=FORMATS[options.backward_format],
    ),
    # Scales of the first batch, with headroom for growth in training.
    "static": lambda options: Recipe.of(StaticScaling(margin=options.margin or 3)),
    **{name: (lambda options, name=name: named_recipes[name]) for name in named_recipes if name not in _WITH_OPTIONS},
}

# With 4 bits not every layer can be converted: as in NVIDIA's runs of NVFP4 in MaxText, the MLPs are, attention is not.
LEFT_ALONE = {"nvfp4": ("*.attention.*",)}

# Flags that may differ between a run and its continuation: they do not change a single loss. `--data` is compared by
# the text itself.
_FREE = {"data", "out", "resume", "checkpoint_every", "eval_every", "eval_batches", "sample_bytes", "prompt"}
_FREE |= {"temperature", "verbose", "mesh"}


class _Formatter(argparse.ArgumentDefaultsHelpFormatter):
    """Adds defaults, except where they say nothing."""

    def __init__(self, prog: str, **kwargs: Any):
        super().__init__(prog, max_help_position=34, **kwargs)

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default is None or action.default is False or action.default == []:
            return action.help
        return super()._get_help_string(action)


def make_parser() -> argparse.ArgumentParser:
    """The parser, with its flags in groups."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.train_lm",
        usage="%(prog)s [options]",
        formatter_class=_Formatter,
        description="Trains a byte-level Llama in bf16 and in FP8, side by side, from the same initialization on the "
        "same batches; shows how far apart they end; writes a sample of text. Ctrl-C keeps a checkpoint.",
    )
    run = parser.add_argument_group("run")
    run.add_argument("--steps", type=_positive_int, default=900, metavar="N", help="training steps")
    run.add_argument(
        "--seed", type=_natural_int, default=0, metavar="N", help="seed of the initialization and of the batches"
    )
    run.add_argument("--data", metavar="FILE", help="text to train on (default: the documentation inside Python)")
    run.add_argument("--validation-fraction", type=float, default=0.1, metavar="X", help="share of the text held back")
    run.add_argument("--out", metavar="DIR", default="runs/train_lm", help="where checkpoint, figure and results go")
    run.add_argument("--resume", action="store_true", help="continue from the checkpoint in --out, with its flags")
    run.add_argument("--checkpoint-every", type=_natural_int, default=100, metavar="N", help="steps; 0: at the end")
    run.add_argument("--eval-every", type=_natural_int, default=100, metavar="N", help="steps; 0: at the end")
    run.add_argument(
        "--eval-batches", type=_positive_int, metavar="N", help="at most so many (default: the whole text)"
    )
    run.add_argument("--sample-bytes", type=_natural_int, default=300, metavar="N", help="length of the sample")
    run.add_argument("--prompt", default="The ", metavar="TEXT", help="what the sample continues")
    run.add_argument(
        "--temperature", type=_natural_float, default=0.7, metavar="X", help="of the sample; 0: the likeliest byte"
    )
    run.add_argument(
        "--mesh",
        type=_mesh,
        metavar="AXES",
        help="divide over devices, as data=4,model=2: data is fully sharded, model is tensor parallelism. On a CPU the "
        "devices are virtual. May differ when a run is resumed",
    )
    run.add_argument("--verbose", action="store_true", help="list every layer: converted, or why not")

    recipe = parser.add_argument_group("recipe")
    recipe.add_argument(
        "--recipe",
        choices=[*RECIPES, "all", "none"],
        metavar="NAME",
        default="delayed",
        help=f"one of {', '.join(RECIPES)}, or all; none trains the baseline alone; nvfp4 converts the MLPs only",
    )
    recipe.add_argument("--no-baseline", action="store_true", help="train in FP8 only")
    recipe.add_argument("--amax-history-length", type=_positive_int, default=1024, metavar="N", help="steps remembered")
    recipe.add_argument("--margin", type=int, default=0, metavar="N", help="headroom of the scales, as a power of two")
    recipe.add_argument("--forward-format", choices=FORMATS, default="E4M3", help="of inputs and kernels")
    recipe.add_argument("--backward-format", choices=FORMATS, default="E5M2", help="of the outputs' gradients")
    recipe.add_argument("--convert-head", action="store_true", help="convert the output head too")
    recipe.add_argument("--exclude", action="append", default=[], metavar="PATH", help="leave layers out; repeatable")
    recipe.add_argument(
        "--compress-activations", action="store_true", help="FP8 models keep the inputs of SwiGLU in FP8 too"
    )
    recipe.add_argument("--fp8-after", type=_natural_int, default=0, metavar="N", help="convert after N steps")
    recipe.add_argument("--fp8-until", type=_positive_int, metavar="N", help="convert back after N steps")

    model = parser.add_argument_group("model")
    default = TransformerConfig()
    model.add_argument("--layers", type=_positive_int, default=default.layers, metavar="N", help="blocks")
    model.add_argument(
        "--hidden", type=_positive_int, default=default.hidden, metavar="N", help="width of the residual stream"
    )
    model.add_argument("--heads", type=_positive_int, default=default.heads, metavar="N", help="query heads")
    model.add_argument(
        "--kv-heads", type=_positive_int, default=default.kv_heads, metavar="N", help="key and value heads"
    )
    model.add_argument("--head-dim", type=_positive_int, default=default.head_dim, metavar="N", help="width of a head")
    model.add_argument("--mlp", type=_positive_int, default=default.mlp, metavar="N", help="width of the SwiGLU layer")
    model.add_argument(
        "--experts", type=_natural_int, default=0, metavar="N", help="SwiGLU layers, two for each byte; 0: one for all"
    )
    model.add_argument(
        "--rope-theta", type=_positive_float, default=default.rope_theta, metavar="X", help="base of RoPE"
    )
    model.add_argument(
        "--norm-eps", type=_positive_float, default=default.norm_eps, metavar="X", help="epsilon of RMSNorm"
    )
    model.add_argument(
        "--seq-len", type=_positive_int, default=default.max_length, metavar="N", help="bytes per window"
    )
    model.add_argument("--gradient-checkpointing", action="store_true", help="recompute blocks in the backward pass")
    model.add_argument(
        "--unroll", type=_positive_int, default=default.unroll, metavar="N", help="blocks per scan iteration"
    )
    model.add_argument("--compute-dtype", choices=["bfloat16", "float32"], default="bfloat16", help="of the baseline")

    optimizer = parser.add_argument_group("optimizer (AdamW; warm-up, then cosine)")
    optimizer.add_argument("--batch-size", type=_positive_int, default=8, metavar="N", help="windows per step")
    optimizer.add_argument("--microbatches", type=_positive_int, default=1, metavar="N", help="gradient accumulation")
    optimizer.add_argument("--learning-rate", type=_positive_float, default=3e-3, metavar="X", help="at its peak")
    optimizer.add_argument(
        "--final-fraction", type=_natural_float, default=0.0, metavar="X", help="of the rate, at the end"
    )
    optimizer.add_argument("--warmup", type=_natural_int, metavar="N", help="steps (default: a tenth of --steps)")
    optimizer.add_argument("--beta1", type=float, default=0.9, metavar="X", help="decay of the gradient's mean")
    optimizer.add_argument("--beta2", type=float, default=0.95, metavar="X", help="decay of the gradient's square")
    optimizer.add_argument("--adam-eps", type=_positive_float, default=1e-8, metavar="X", help="epsilon of Adam")
    optimizer.add_argument(
        "--weight-decay", type=_natural_float, default=0.1, metavar="X", help="of matrices, not of norms"
    )
    optimizer.add_argument(
        "--clip-norm", type=_positive_float, default=1.0, metavar="X", help="largest global norm of the gradient"
    )
    return parser


def resumed_folder(argv: Sequence[str] | None) -> str | None:
    """The folder whose checkpoint the flags ask to continue; None without `--resume`."""
    options = make_parser().parse_args(argv)
    return options.out if options.resume else None


def parse_options(argv: Sequence[str] | None, defaults: Mapping[str, Any] | None = None) -> argparse.Namespace:
    """Parses the flags and checks those that depend on one another.

    Args:
        argv: The flags; None takes those of the process.
        defaults: Values of flags that are not given: of a checkpoint.

    Raises:
        SystemExit: With status 2 and a message that names the flag, its value and the remedy.
    """
    parser = make_parser()
    known = vars(parser.parse_args([]))
    parser.set_defaults(**{name: value for name, value in (defaults or {}).items() if name in known})
    options = parser.parse_args(argv)
    # Those of a checkpoint and those given again are the same.
    options.exclude = list(dict.fromkeys(options.exclude))
    if options.recipe == "none" and options.no_baseline:
        parser.error("--recipe none --no-baseline leaves nothing to train; drop one of the two")
    if options.batch_size % options.microbatches:
        parser.error(f"--batch-size {options.batch_size} is not a multiple of --microbatches {options.microbatches}")
    if options.warmup is not None and options.warmup >= options.steps:
        parser.error(f"--warmup {options.warmup} must be below --steps {options.steps}")
    if options.fp8_after >= options.steps:
        parser.error(f"--fp8-after {options.fp8_after} must be below --steps {options.steps}, or FP8 never trains")
    if options.fp8_until is not None and options.fp8_until <= options.fp8_after:
        parser.error(f"--fp8-until {options.fp8_until} must be above --fp8-after {options.fp8_after}")
    if options.sample_bytes and len(options.prompt.encode()) not in range(1, options.seq_len + 1):
        parser.error(f"--prompt {options.prompt!r} must have 1 to {options.seq_len} bytes (--seq-len)")
    return options


def model_config(options: argparse.Namespace) -> TransformerConfig:
    """The model's sizes from the flags.

    Raises:
        ValueError: If the sizes do not fit together.
    """
    return TransformerConfig(
        layers=options.layers,
        hidden=options.hidden,
        heads=options.heads,
        kv_heads=options.kv_heads,
        head_dim=options.head_dim,
        mlp=options.mlp,
        feed_forward=_feed_forward(options.experts),
        max_length=options.seq_len,
        rope_theta=options.rope_theta,
        norm_eps=options.norm_eps,
        checkpointing=options.gradient_checkpointing,
        unroll=options.unroll,
    )


@functools.cache
def _feed_forward(experts: int) -> Callable[..., Any]:
    """The same function for the same number: configurations are compared."""
    if not experts:
        return SwiGlu.init
    return functools.partial(MixtureOfExperts.init, experts=experts, chosen=min(2, experts))


def recipes(options: argparse.Namespace) -> dict[str, Recipe]:
    """The recipes to train with, by name."""
    names = {"none": (), "all": tuple(RECIPES)}.get(options.recipe, (options.recipe,))
    return {name: RECIPES[name](options) for name in names}


def binding_flags(options: argparse.Namespace) -> dict[str, Any]:
    """The flags that a resumed run has to share with the original run."""
    return {name: value for name, value in vars(options).items() if name not in _FREE}


def flag_name(name: str) -> str:
    """`learning_rate` -> `--learning-rate`."""
    return "--" + name.replace("_", "-")


def _number(kind: type, lowest: float, inclusive: bool, words: str) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        # NaN is neither.
        if not (value >= lowest if inclusive else value > lowest):
            raise argparse.ArgumentTypeError(f"{text!r} is not {words}")
        return value

    return parse


def _mesh(text: str) -> dict[str, int]:
    """`data=4,model=2` as sizes of mesh axes."""
    sizes: dict[str, int] = {}
    for part in text.split(","):
        name, _, size = part.partition("=")
        if name not in ("data", "model") or name in sizes or not size.isdecimal() or int(size) < 1:
            raise argparse.ArgumentTypeError(f"{text} is not a mesh of data and model, such as data=4,model=2")
        sizes[name] = int(size)
    return sizes


_positive_int = _number(int, 1, True, "an integer of at least 1")
_natural_int = _number(int, 0, True, "an integer of at least 0")
_positive_float = _number(float, 0, False, "a number above 0")
_natural_float = _number(float, 0, True, "a number of at least 0")
