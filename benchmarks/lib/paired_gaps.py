"""Runs on disk, and what pairs of them say: the gap of each seed, its mean, and the mean's standard error."""

import dataclasses
import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy.special import stdtrit


@dataclasses.dataclass(frozen=True)
class Gap:
    """How far one kind of run ends above another, in percent, over seeds that both have.

    Args:
        mean: The mean of `100 * (loss / baseline - 1)`.
        error: Its standard error, the gaps' standard deviation (with n - 1) over the root of n; NaN for one seed.
        deviation: That standard deviation.
        seeds: n, the number of pairs with finite losses.
        broken: The number of seeds whose loss is not finite, and its baseline's is.
    """

    mean: float
    error: float
    deviation: float
    seeds: int
    broken: int

    def __str__(self) -> str:
        if self.seeds == 0:
            return "not finite"
        gap = f"{self.mean:+.2f} ± {self.error:.2f} %"
        return gap if not self.broken else f"{gap}; {self.broken} of {self.seeds + self.broken} not finite"

    @property
    def interval(self) -> tuple[float, float]:
        """What holds the mean that more seeds would have, in 95 % of cases, if gaps are normally distributed."""
        reach = float(stdtrit(max(1, self.seeds - 1), 0.975)) * self.error
        return self.mean - reach, self.mean + reach


def paired_gap[Seed](losses: Mapping[Seed, float], baseline: Mapping[Seed, float]) -> Gap:
    """The gap over the seeds that both have.

    Args:
        losses: The loss of each seed; NaN where it diverged.
        baseline: Likewise.
    """
    seeds = [seed for seed in losses if seed in baseline and math.isfinite(baseline[seed])]
    finite = [seed for seed in seeds if math.isfinite(losses[seed])]
    gaps = np.array([100.0 * (losses[seed] / baseline[seed] - 1.0) for seed in finite])
    return _gap_of(gaps, broken=len(seeds) - len(finite))


def paired_change[Seed](
    losses: Mapping[Seed, float], others: Mapping[Seed, float], baseline: Mapping[Seed, float]
) -> Gap:
    """How the gap of one kind of run differs from another's, `100 * (loss - other) / baseline`, over common seeds.

    Args:
        losses: The loss of each seed.
        others: Those of the other kind.
        baseline: Those of which both gaps are percentages.
    """
    seeds = [seed for seed in losses if seed in others and seed in baseline]
    changes = np.array([100.0 * (losses[seed] - others[seed]) / baseline[seed] for seed in seeds])
    finite = changes[np.isfinite(changes)]
    return _gap_of(finite, broken=len(changes) - len(finite))


def _gap_of(gaps: np.ndarray, *, broken: int) -> Gap:
    deviation = float(gaps.std(ddof=1)) if len(gaps) > 1 else math.nan
    mean = float(gaps.mean()) if len(gaps) else math.nan
    return Gap(mean, deviation / math.sqrt(max(1, len(gaps))), deviation, len(gaps), broken)


def final[Seed](records: Mapping[Seed, Mapping[str, Any]], curve: str = "validation") -> dict[Seed, float]:
    """The last loss of each seed; NaN if a loss on the way was not finite."""
    last = lambda record: record[curve][-1][1] if np.isfinite(record["losses"]).all() else math.nan
    return {seed: last(record) for seed, record in records.items()}


@dataclasses.dataclass(frozen=True)
class RunFile:
    """The records of one kind of run by seed, in a file that is rewritten after each.

    Args:
        folder: Where the files are.
        name: The run's name, for people.
        settings: All that determines the records but the seed. Its `repr` is part of the file's name and content: other
            settings are another file.
    """

    folder: Path
    name: str
    settings: Any

    @property
    def path(self) -> Path:
        """The file."""
        digest = hashlib.sha256(repr(self.settings).encode()).hexdigest()[:8]
        return self.folder / f"{self.name.replace(' ', '_')}-{digest}.json"

    def read(self) -> dict[int, dict[str, Any]]:
        """The records by seed; empty if the file does not exist."""
        if not self.path.exists():
            return {}
        return {int(seed): record for seed, record in json.loads(self.path.read_text())["records"].items()}

    def complete(
        self, seeds: Sequence[int], run: Callable[[int], dict[str, Any]], cached: Callable[[int], None]
    ) -> dict[int, dict[str, Any]]:
        """The records of these seeds; those that are missing are run and written, one after the other.

        Args:
            seeds: The seeds.
            run: The record of a seed.
            cached: Called with each seed that the file has already.
        """
        records = self.read()
        for seed in seeds:
            if seed in records:
                cached(seed)
                continue
            records[seed] = run(seed)
            self._write(records)
        return {seed: records[seed] for seed in seeds}

    def _write(self, records: Mapping[int, Any]) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        draft = self.path.with_name(f"{self.path.name}.part")
        content = {"name": self.name, "settings": repr(self.settings), "records": records}
        draft.write_text(json.dumps(content))
        draft.replace(self.path)


def thinned(losses: Sequence[float], width: int) -> list[float]:
    """The means of `width` losses each, with four decimals, for a curve in a small file; the last may be of fewer."""
    return [round(float(np.mean(losses[start : start + width])), 4) for start in range(0, len(losses), width)]
