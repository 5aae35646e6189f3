"""Claim: a small language model ends within one percent of its loss in bf16, by the mean over seeds, in 8-bit recipes.

    uv run benchmarks/recipes_train_like_bf16.py [--suite recipes] [--task topics source] [--seeds 16] [--markdown]

Every variant trains from the weights and on the batches of the bf16 run of the same seed; gaps are those of such pairs,
with the standard error of their mean and its 95 % interval. `bf16 + 1 ulp` is bf16 again, from weights moved by one ulp
of float32: what two runs differ by that ought to be the same. The losses are those of text and images that are held
back; "as bf16" is the loss of the trained weights without FP8.

`--suite` says what is compared: `recipes` all of them; `delayed` what delayed scaling starts with and remembers;
`parts` the products and layers of current scaling one by one; `attention` recipes with attention's projections in bf16;
`nvfp4` parts of NVFP4's recipe; `four_bits` and `mxfp4` what lowers the gap of recipes in four bits; `over_steps`
recipes and phases beside bf16 with fewer steps; `phases` a recipe in a part of the steps, with bf16 before and after;
`middle` 8-bit recipes that start in bf16; `memory` moments in FP8 and weights without float32 masters, with
`--hidden 128`; `stress` what breaks which. `--against` also compares with another variant than bf16.

Runs are kept in `--out`, one file for each variant, task and setting, and not run again: interrupt it and go on, or ask
for more seeds. `--curves` writes all curves, thinned.
On a GPU, give `--layers 12 --hidden 768 --length 1024 --batch 64 --steps 5000`, and a text of your own with `--task`.
"""

import argparse
import dataclasses
import functools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lib import output
from lib.paired_gaps import Gap, RunFile, final, paired_change, paired_gap, thinned
from lib.training_runs import Schedule, train
from lib.training_tasks import AbstractTask, LanguageTask, VisionTask
from lib.training_variants import BASELINE, SUITES
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


@dataclasses.dataclass(frozen=True)
class Case:
    """A task, a schedule and a name for the pair."""

    name: str
    task: AbstractTask
    schedule: Schedule


def cases(options: argparse.Namespace) -> list[Case]:
    """What is trained, without variants."""
    unstressed = [_case(name, options) for name in options.task]
    if options.suite != "stress":
        return unstressed
    stressed = []
    for case in unstressed:
        task = lambda case=case, **changes: dataclasses.replace(case, task=dataclasses.replace(case.task, **changes))
        schedule = lambda case=case, **changes: dataclasses.replace(
            case, schedule=dataclasses.replace(case.schedule, **changes)
        )
        changed = {
            "nothing": case,
            "a channel x 1e2": task(outlier=1e2),
            "a channel x 1e4": task(outlier=1e4),
            "growing gradients": schedule(loss_scales="growing"),
            "spikes of gradients": schedule(loss_scales="spikes"),
            "learning rate x 10": schedule(learning_rate=10 * case.schedule.learning_rate),
            "float16": task(dtype="float16"),
            "16 blocks, 32 wide": task(layers=16, hidden=32, stacked=True),
        }
        stressed += [dataclasses.replace(of, name=f"{case.name}: {name}") for name, of in changed.items()]
    return [case for case in stressed if re.search(options.case, case.name)]


def _case(name: str, options: argparse.Namespace) -> Case:
    specified = lambda *names: {n: value for n in names if (value := getattr(options, n)) is not None}
    task = VisionTask() if name == "digits" else LanguageTask(text=name)
    of_language = specified("length", "experts", "stacked", "embedding_scale")
    sizes = specified("layers", "hidden", "batch") | ({} if name == "digits" else of_language)
    schedule = Schedule(options.steps, options.every, options.learning_rate, options.decay)
    shown = [name, *(f"{value} {_SHOWN[of]}" for of, value in sizes.items() if of in _SHOWN)]
    if schedule.decay != Schedule.decay:
        shown.append(f"{schedule.decay} rate")
    return Case(", ".join(shown), dataclasses.replace(task, **sizes), schedule)


_SHOWN = {"layers": "blocks", "hidden": "wide", "experts": "experts", "embedding_scale": "x the embedding"}


def rows(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """For each case and variant its gap; runs what is missing."""
    chosen = {name: variant for name, variant in SUITES[options.suite].items() if re.search(options.variant, name)}
    variants = {"bf16": BASELINE} | chosen
    seeds, all_cases = range(options.seeds), cases(options)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    records: dict[tuple[str, str], Any] = {}
    with Progress(*columns, TimeRemainingColumn(), disable=options.quiet) as progress:
        bar = progress.add_task("", total=len(all_cases) * len(variants) * len(seeds) * options.steps)
        # Cases that differ in data share compiled programs, so they are next to each other.
        for name, variant in variants.items():
            for case in all_cases:
                progress.update(bar, description=f"{case.name}, {name}")
                file = RunFile(options.out, f"{_slug(case.name)}.{_slug(name)}", (case.task, case.schedule, variant))
                advance = functools.partial(progress.advance, bar)
                run = functools.partial(train, case.task, case.schedule, variant, advance=advance)
                records[case.name, name] = file.complete(
                    seeds, lambda seed, run=run: run(seed=seed), lambda _: progress.advance(bar, options.steps)
                )
    groups = [(case, {name: records[case.name, name] for name in variants}) for case in all_cases]
    for case, by_name in groups:
        for name, of in by_name.items():
            yield row(case, name, of, by_name["bf16"], by_name.get(options.against))
    if len(all_cases) > 1 and options.suite in ("memory", "four_bits", "mxfp4"):
        both = dataclasses.replace(all_cases[0], name=", ".join(["all together", *all_cases[0].name.split(", ")[1:]]))
        of_all = lambda name: {f"{case.name} {seed}": x for case, by in groups for seed, x in by[name].items()}
        against = of_all(options.against) if options.against in variants else None
        for name in variants:
            yield row(both, name, of_all(name), of_all("bf16"), against) | {"curves": {}, "validation": {}}


def row(
    case: Case, name: str, records: dict[Any, Any], baseline: dict[Any, Any], against: dict[Any, Any] | None
) -> dict[str, Any]:
    """What a variant's runs say beside those in bf16, and beside those of another variant."""
    gap = paired_gap(final(records), final(baseline))
    in_bf16 = paired_gap(final(records, "validation_bf16"), final(baseline))
    curves = {seed: thinned(record["losses"], max(1, case.schedule.steps // 20)) for seed, record in records.items()}
    validation = {seed: record["validation"] for seed, record in records.items()}
    change = None if against is None else paired_change(final(records), final(against), final(baseline))
    return {
        "case": case.name,
        "variant": name,
        "steps": case.schedule.steps,
        **dataclasses.asdict(gap),
        "gap": str(gap),
        "interval": shown_interval(gap),
        "change": "" if change is None else str(change),
        "change_interval": "" if change is None else shown_interval(change),
        "gap_in_bf16": str(in_bf16),
        "mean_in_bf16": in_bf16.mean,
        "final": final(records),
        "curves": curves,
        "validation": validation,
    }


def shown_interval(gap: Gap) -> str:
    """Its 95 % interval."""
    return "{:+.2f} to {:+.2f} %".format(*gap.interval)


def _slug(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9]+", "_", name).strip("_")


COLUMNS = {
    "task": lambda row: row["case"],
    "variant": lambda row: row["variant"],
    "steps": lambda row: str(row["steps"]),
    "seeds": lambda row: str(row["seeds"]),
    "gap to bf16": lambda row: row["gap"] if row["variant"] != "bf16" else f"(loss {_mean_loss(row):.4f})",
    "95 %": lambda row: row["interval"] if row["variant"] != "bf16" else "",
    "change": lambda row: row["change"],
    "its 95 %": lambda row: row["change_interval"],
    "of one run": lambda row: f"{row['deviation']:.2f} %" if row["variant"] != "bf16" else "",
    "as bf16": lambda row: row["gap_in_bf16"] if row["variant"] != "bf16" else "",
}


def _mean_loss(row: dict[str, Any]) -> float:
    return sum(row["final"].values()) / len(row["final"])


def main(argv: list[str] | None = None) -> None:
    """Runs what is missing, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", choices=SUITES, default="recipes", help="which variants are compared")
    parser.add_argument("--task", nargs="+", default=["topics"], help="topics, source, digits, or a text file")
    parser.add_argument("--seeds", type=int, default=16, help="how many; those from 0 on")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--every", type=int, default=100, help="steps between two validations")
    parser.add_argument("--learning-rate", type=float, default=3e-3, help="at its peak")
    parser.add_argument("--decay", choices=("cosine", "constant"), default="cosine", help="of the learning rate")
    parser.add_argument("--variant", default="", help="a regular expression: only variants where it is found, and bf16")
    parser.add_argument("--against", default="", help="also show the change against this variant")
    parser.add_argument("--case", default="", help="of --suite stress, likewise")
    for name in ("layers", "hidden", "length", "batch"):
        parser.add_argument(f"--{name}", type=int, help="of the model or of a batch")
    parser.add_argument(
        "--stacked", action="store_true", default=None, help="blocks of a language model compile as one"
    )
    parser.add_argument("--embedding-scale", type=float, help="factor of a language model's initial embedding")
    parser.add_argument("--experts", type=int, help="of each block of a language model; none by default")
    parser.add_argument("--out", type=Path, default=Path("runs/convergence"), help="where runs are kept")
    parser.add_argument("--curves", type=Path, help="write final losses and thinned curves here")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    output.add_arguments(parser)
    options = parser.parse_args(argv)
    table = list(rows(options))
    columns = {name: text for name, text in COLUMNS.items() if options.against or name not in ("change", "its 95 %")}
    output.finish(f"Gap of the validation loss to bf16, suite {options.suite}", columns, table, options)
    if options.curves:
        write_curves(options.curves, [{"suite": options.suite} | row for row in table])


def write_curves(path: Path, table: list[dict[str, Any]]) -> None:
    """Writes the rows into a file that keeps those of other suites, with hardware and date for each."""
    earlier = json.loads(path.read_text())["rows"] if path.exists() else []
    key = lambda row: (row["suite"], row["case"], row["variant"], row["steps"])
    new = {key(row): row | {"environment": output.described(output.environment())} for row in table}
    merged = {key(row): row for row in earlier} | new
    lines = ",\n".join(json.dumps(row, separators=(",", ":")) for row in merged.values())
    path.write_text(f'{{"rows":[\n{lines}\n]}}\n')


if __name__ == "__main__":
    main()
