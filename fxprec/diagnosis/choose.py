"""`choose`: train the same small run at several low ratios, and take the largest that costs little enough.

Source: Lee et al. 2023, section 5.5.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch

from fxprec.config import Config
from fxprec.config.checks import above_zero, integer, options_of, ratio
from fxprec.driver.backend import Backend
from fxprec.errors import ConfigError, writing
from fxprec.report.result import plain

RATIOS = tuple(i / 10 for i in range(11))
"""The paper's deciles."""
Train = Callable[[Any, int], float]
Tell = Callable[[str], None]


@dataclass(frozen=True)
class Trial:
    """The result of training with one low ratio, over seeds."""

    low_ratio: float | None
    """The requested ratio; None: the model's own precision."""
    scores: tuple[float, ...]
    """The results of the user's function, by seed."""
    mean_demoted_ratio: float = 0.0
    """Share of elements that were low, averaged over steps and seeds."""
    promoted: float = 0.0
    """Number of promoted tensors, averaged over seeds."""
    saved_bytes: float = 0.0
    """Bytes saved for backward by all graphs, averaged over seeds; 0 if unknown."""

    @property
    def diverged(self) -> int:
        """Number of runs whose score is not finite."""
        return sum(not math.isfinite(score) for score in self.scores)

    @property
    def score(self) -> float:
        """The mean score; NaN if a run diverged."""
        return math.nan if self.diverged else fmean(self.scores)

    @property
    def deviation(self) -> float:
        """Standard deviation over seeds; 0 for one seed."""
        return stdev(self.scores) if len(self.scores) > 1 and not self.diverged else 0.0


@dataclass(frozen=True)
class Choice:
    """The trials of `choose`, and the ratio that follows from them."""

    options: Mapping[str, Any]
    """The options as given."""
    tolerance: float
    higher_is_better: bool
    reference: Trial
    trials: tuple[Trial, ...]
    """Trials by ratio, ascending."""

    def drop(self, trial: Trial) -> float:
        """How much worse than the reference a trial is, in the score's own units; NaN if one of them diverged."""
        worse = trial.score - self.reference.score
        return -worse if self.higher_is_better else worse

    def accepts(self, trial: Trial) -> bool:
        """Return whether a trial is worse by at most the tolerance, and none of its runs diverged."""
        return self.drop(trial) <= self.tolerance

    @property
    def chosen(self) -> Trial | None:
        """The accepted trial with most elements low over its training; None if no trial is accepted."""
        accepted = [trial for trial in self.trials if self.accepts(trial)]
        return max(accepted, key=lambda t: (t.mean_demoted_ratio, t.low_ratio), default=None)

    @property
    def recommended(self) -> dict[str, Any]:
        """Options to train with. Raises `ConfigError` if no ratio is accepted."""
        if self.chosen is None:
            raise ConfigError(self._why_none())
        return {**self.options, "low_ratio": self.chosen.low_ratio}

    def _why_none(self) -> str:
        """Return why no trial is accepted."""
        if self.reference.diverged:
            return (
                f"without fxprec {self.reference.diverged} of {len(self.reference.scores)} runs diverged, so there is "
                "no score to compare with: mend train first"
            )
        return (
            f"no low ratio is within {self.tolerance:g} of {self.reference.score:.4g}: allow a larger tolerance, or "
            "choose another recipe"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the trials and the choice as plain data."""
        trials = [asdict(t) | {"drop": self.drop(t), "accepted": self.accepts(t)} for t in self.trials]
        return {
            "tolerance": self.tolerance,
            "higher_is_better": self.higher_is_better,
            "reference": asdict(self.reference),
            "trials": trials,
            "low_ratio": None if self.chosen is None else self.chosen.low_ratio,
        }

    def save(self, path: str | Path) -> None:
        """Write `to_dict`'s result as JSON, numbers that are not finite as text. Raises `ConfigError`."""
        text = json.dumps(plain(self.to_dict()), indent=1, allow_nan=False)
        with writing(path, "path"):
            Path(path).write_text(text + "\n", encoding="utf-8")

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield "low ratio  held low  promoted  saved       score                 worse by"
        for trial in (self.reference, *self.trials):
            asked = "none" if trial.low_ratio is None else f"{trial.low_ratio:g}"
            score = f"{trial.score:.5g} ± {trial.deviation:.2g}"
            if trial.diverged:
                score = f"{trial.diverged} of {len(trial.scores)} diverged"
            saved = f"{trial.saved_bytes / 2**20:.3g} MiB" if trial.saved_bytes else ""
            mark = "" if trial is self.reference else f"{self.drop(trial):+.3g}"
            yield (
                f"{asked:9}  {trial.mean_demoted_ratio:<8.4g}  {trial.promoted:<8.3g}  {saved:10}  {score:20}  {mark}"
                f"{'  <- chosen' if trial is self.chosen else ''}"
            ).rstrip()
        if self.chosen is None:
            yield self._why_none()
        elif any(not self.accepts(t) for t in self.trials if t.mean_demoted_ratio < self.chosen.mean_demoted_ratio):
            yield "A smaller ratio was not accepted: the seeds differ by more than the ratios; use more seeds."


def choose(
    train: Train,
    *,
    options: Mapping[str, object] | None = None,
    ratios: Sequence[float] = RATIOS,
    seeds: int = 3,
    tolerance: float = 0.01,
    higher_is_better: bool = False,
    tell: Tell | None = None,
) -> Choice:
    """Train without fxprec and at each low ratio, and return which ratio saves most at an acceptable cost.

    ``train(backend, seed)`` is a small version of your run (less data, fewer steps). It compiles its model with
    ``torch.compile(model, backend=backend)`` and trains from ``seed``. It returns one number on data that it did not
    train on: a loss or, with ``higher_is_better``, an accuracy. ``tolerance`` is how much worse than without fxprec
    that number may be, in its own units. ``options`` are `Config`'s, without ``low_ratio``. Raises `ConfigError`.
    """
    given = {"recipe": "fp8", **options_of(options)}
    ratios = _checked(train, given, ratios)
    seeds, tell = integer("seeds", seeds, least=1), tell or (lambda line: None)
    tolerance = above_zero("tolerance", tolerance, "how much worse the score may be, such as 0.01", or_zero=True)
    reference = Trial(None, tuple(_run(train, "eager", seed) for seed in range(seeds)))
    tell(f"without: {reference.score:.5g}")
    trials = []
    for asked in ratios:
        trials.append(_trial(train, given, asked, seeds))
        tell(f"low ratio {asked:g}: {trials[-1].score:.5g}, {trials[-1].mean_demoted_ratio:.4g} held low")
    return Choice(given, tolerance, higher_is_better, reference, tuple(trials))


def _checked(train: object, options: Mapping[str, object], ratios: Sequence[float]) -> list[float]:
    if not callable(train):
        raise ConfigError(f"train is {type(train).__name__}; give a function train(backend, seed) that returns a score")
    for name in ("low_ratio", "activation_budget", "plan"):
        if options.get(name) is not None:
            raise ConfigError(f"{name}={options[name]!r} decides what choose is to find; leave it out")
    Config.from_options(options)
    found = sorted({float(r) for r in ratios if ratio("ratios", r) is not None})
    if not found:
        raise ConfigError("ratios is empty; give low ratios to try, such as (0.5, 0.8, 1.0)")
    return found


def _trial(train: Train, options: Mapping[str, object], asked: float, seeds: int) -> Trial:
    scores, held, promoted, saved = [], [], [], []
    for seed in range(seeds):
        backend = Backend(Config.from_options({**options, "low_ratio": asked}))
        scores.append(_run(train, backend, seed))
        if not backend.plans and asked:
            raise ConfigError(
                "train compiled no training step with the backend it was given; let it call "
                "torch.compile(model, backend=backend) and train that"
            )
        held.append(backend.mean_demoted_ratio)
        promoted.append(sum(len(plan.promoted) for plan in backend.plans))
        saved.append(sum(plan.saved_bytes.planned for plan in backend.plans if plan.saved_bytes is not None))
    return Trial(asked, tuple(scores), fmean(held), fmean(promoted), fmean(saved))


def _run(train: Train, backend: object, seed: int) -> float:
    torch.compiler.reset()
    torch.manual_seed(seed)
    score = train(backend, seed)
    try:
        return float(score)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"train returned {type(score).__name__}; let it return one number, a loss or score"
        ) from error
