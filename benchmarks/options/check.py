"""Judge a case: errors by their kind, numbers by float32's, effects by the plan, a resumed run by its bits."""

from __future__ import annotations

import re
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch._inductor.config
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

import fxprec
from benchmarks.graphs.check import in_a_line, promote_all, quick
from benchmarks.graphs.values import Noise, distance
from benchmarks.options.cases import OBSERVERS, Case, options_of, setting, unit
from benchmarks.options.memory import over_budget
from benchmarks.options.training import Training
from fxprec.errors import FallbackError, FxprecError, FxprecWarning, GradientError
from fxprec.passes.analysis.selection import covers

BEFORE, SAVED, STEPS = 2, 3, 5
"""Steps before tensors are promoted, before a checkpoint is saved, and in all."""
SAMPLES, TIMES = 2, 10.0
"""A difference is explained where it is below ``TIMES`` the largest of ``SAMPLES`` runs with noise of the formats' size."""
KERNELS = ("mm", "addmm", "bmm", "baddbmm", "convolution", "_scaled_dot_product", "var_mean", "sum", "mean", "amax")
NUMBERS = dict[str, Tensor]
SECOND_GRADIENTS = ("parts", "uneven", "retain", "penalty", "every", "zero", "second")
"""Habits by which a parameter gets a gradient when backward has stepped it."""


@dataclass
class Verdict:
    """What a case gave: what is wrong, an error of fxprec's own about the options, and its warnings."""

    failures: list[str] = field(default_factory=list)
    error: str | None = None
    warned: list[str] = field(default_factory=list)


def check(case: Case) -> Verdict:
    """Run a case and all that it is compared with."""
    verdict = Verdict()
    with (
        tempfile.TemporaryDirectory() as folder,
        warnings.catch_warnings(record=True, action="always") as caught,
        torch._inductor.config.patch(fallback_random=True),
        quick(),
    ):
        try:
            verdict.failures += _judged(case, options_of(case, folder), folder)
        except Exception as error:
            said = in_a_line(error, 2000)
            if is_allowed(case, error):
                verdict.error = said
                verdict.failures += _beyond(case, said, folder)
            else:
                verdict.failures.append(said)
    verdict.warned = sorted({str(w.message) for w in caught if issubclass(w.category, FxprecWarning)})
    return verdict


def is_allowed(case: Case, error: Exception) -> bool:
    """Return whether an error is one that the case's options ask for."""
    if isinstance(error, FallbackError):
        return bool(setting(case, "strict"))
    if isinstance(error, GradientError):
        return bool(setting(case, "in_backward") and any(name in case for name in SECOND_GRADIENTS))
    return isinstance(error, fxprec.ConfigError | fxprec.BudgetError)


def _beyond(case: Case, said: str, folder: str) -> Iterator[str]:
    """Yield the error of the budget that an error names as enough."""
    found = re.search(r"(\w+_budget) is .*(?:raise it to|at least) [^(]*\((\d+) bytes\)", said)
    if found is not None and not setting(case, "uneven"):  # of which micro-batch it is, the error does not say
        try:
            # Larger batches need more, and an evaluation takes a whole one.
            case = {**case, "sizes": setting(case, "sizes")[:1], "evaluate": None, "between": False}
            case = {**case, "frozen": bool(setting(case, "frozen"))}  # layers that train later need more, too
            case = {**case, "flight": None}  # and so do two batches of which both wait for backward
            if "of a step together" not in said:  # of the first graph, when the second model was not known
                case = {**case, "second": None}
            Training(case, options_of(case, folder) | {"strict": False, found[1]: int(found[2])}).run(0, BEFORE)
        except FxprecError as error:
            if isinstance(error, GradientError) and is_allowed(case, error):
                return
            yield f"{found[1]} of {found[2]} bytes, which an error named as enough: {error}"


def _judged(case: Case, options: dict[str, Any], folder: str) -> Iterator[str]:
    """Yield what is wrong."""
    training = Training(case, options := _with_budgets(case, options))
    found = training.run(0, BEFORE)
    backend, promoted = training.backend, 0
    yield from effects(options, backend)
    plans = backend.plans if setting(case, "policy") != "exact" else ()  # which measures in its first step
    if setting(case, "promote"):
        promoted = promote_all(backend)
    found |= training.run(BEFORE, SAVED)
    # The first run of verified code has the reference's bits, which are not those of a GPU's kernels.
    resumes = setting(case, "resume") and not (setting(case, "verify") and setting(case, "device") != "cpu")
    state = training.state() if resumes else b""
    later = training.run(SAVED, STEPS)
    found |= later
    # A GPU's statistics wait for those of later steps, and copies in bfloat16 have none.
    acts = setting(case, "promote_above") is not None and (
        setting(case, "device") == "cpu" or setting(case, "recipe") != "bf16 copies"
    )
    if promoted and acts and not any(plan.promoted for plan in backend.plans):
        yield f"{promoted} tensors overflowed, and none was promoted"
    if not training.has_skipped:
        yield from differences(case, found)
    if state:
        resumed = Training(case, options)
        resumed.load(state)
        yield from _other_bits("resumed", later, resumed.run(SAVED, STEPS))
    if setting(case, "lowering") != "eager":
        yield from over_budget(case, training, STEPS)
    if promoted or setting(case, "lowering") != "eager":  # Inductor fuses otherwise where more is counted
        return
    holds = setting(case, "in_backward") and (setting(case, "verify") or "dump_tensors" in case)  # all gradients
    if any(name in case for name in OBSERVERS) and not holds:
        plain, without = ({name: value for name, value in x.items() if name not in OBSERVERS} for x in (case, options))
        yield from _other_bits("unobserved", found, Training(plain, without).run(0, STEPS))
    if setting(case, "replan") and len(plans) == 1:
        plans[0].save(f"{folder}/plan.json")
        solved = ("low_ratio", "activation_budget", "peak_budget", "step_budget", "ways", "policy", "keep_high", "seed")
        given = {name: value for name, value in options.items() if name not in solved}
        yield from _other_bits(
            "replanned", found, Training(case, {**given, "plan": f"{folder}/plan.json"}).run(0, STEPS)
        )


def _other_bits(what: str, wanted: NUMBERS, found: NUMBERS) -> Iterator[str]:
    """Yield the first number with other bits; evaluations may be in one run alone."""
    for name in (name for name in wanted if name in found or "evaluation" not in name):
        if not torch.equal(wanted[name], found[name]):
            yield f"{what}: {name} has other bits, off by {distance(found[name], wanted[name]):.3g} of {float(wanted[name].norm()):.3g}"
            return


def _with_budgets(case: Case, options: dict[str, Any]) -> dict[str, Any]:
    """Return options whose budgets are bytes: shares of what an uncompiled float32 step saves or holds."""
    if not options.keys() & {"activation_budget", "step_budget"}:
        return options
    training, saved = Training({**case, "outer": None}), dict[int, int]()
    known = {p.untyped_storage().data_ptr() for p in training.model.parameters()}

    def pack(x: Tensor) -> Tensor:
        if (at := x.untyped_storage().data_ptr()) not in known:
            saved[at] = x.untyped_storage().nbytes()
        return x

    with saved_tensors_hooks(pack, lambda x: x), warnings.catch_warnings(action="ignore"):
        training.run(0, 1)
    held = 4 * sum(p.nbytes for p in training.model.parameters()) + 2 * sum(saved.values())
    whole = {"activation_budget": sum(saved.values()), "step_budget": held}
    return options | {name: int(options[name] * size) for name, size in whole.items() if name in options}


def effects(options: dict[str, Any], backend: fxprec.Backend) -> Iterator[str]:
    """Yield which options had no effect on the plans, without a word."""
    told = any(event.kind == "fallback" for event in backend.events)
    for plan in backend.latest_plans:
        low = {str(fmt) for fmt in (plan.recipe.lo_forward, plan.recipe.lo_backward) if fmt != plan.recipe.hi}
        saved = plan.saved_bytes.planned if plan.saved_bytes and plan.storage != "simulate" else 0  # it saves carriers
        peak, whole = plan.peak_bytes, plan.whole_step
        if low and plan.achieved_low_ratio < (options.get("low_ratio") or 0) and not told:
            yield f"low_ratio {options['low_ratio']} is {plan.achieved_low_ratio}"
        if saved > options.get("activation_budget", saved) and not told:
            yield f"activation_budget is exceeded: {saved} bytes are saved"
        if (peak is None) == ("peak_budget" in options or "step_budget" in options):
            yield "a budget was given, and the plan has no peak, or the other way round"
        if peak is not None and peak.planned > peak.room and not told:
            yield f"peak_budget is exceeded: {peak.planned} bytes in {peak.room}"
        if whole and peak and whole.weights + whole.states + whole.gradients + peak.planned > whole.budget:
            yield f"step_budget {whole.budget} is exceeded"
        patterns = options.get("keep_high", ())
        for site in plan.sites:
            if patterns != "ends" and any(covers(p, site.module) for p in patterns) and site.format in low:
                yield f"keep_high {patterns}: {site.tensor} of {site.module} is in {site.format}"
            ways = ("", "keep", *options.get("ways", ("narrow", "recompute")))
            is_pointwise = not site.tensor.startswith(KERNELS)
            ways = (*ways, "recompute") if is_pointwise else ways  # Inductor repeats it by itself
            if site.way not in ways and not (site.way == "narrow" and site.saved_as):
                yield f"ways {options.get('ways')}: {site.tensor} has the way {site.way}"


def differences(case: Case, found: NUMBERS) -> Iterator[str]:
    """Yield the first number that differs from the uncompiled run's by more than noise explains."""
    wanted = _reference(case, None)
    for name in wanted.keys() ^ found.keys():
        if "gradient" not in name or not setting(case, "in_backward"):
            yield f"only one run has {name}"
            return
    scale: dict[str, float] = {}  # of all tensors of a kind: what is small beside them may be off by their rounding
    for name, x in wanted.items():
        kind = name.partition(" of ")[0]
        scale[kind] = max(float(x.norm()), scale.get(kind, 0.0))
    floors = {name: 1e-6 * scale[name.partition(" of ")[0]] + 1e-7 for name in found.keys() & wanted.keys()}
    errors = {name: error for name in floors if (error := distance(found[name], wanted[name])) > floors[name]}
    noisy = [_reference(case, Noise(unit(case), seed)) for seed in range(SAMPLES)] if errors else []
    for name in (name for name in wanted if name in errors):
        explained = max(distance(values[name], wanted[name]) for values in noisy)
        if not errors[name] <= TIMES * explained + floors[name]:
            yield f"{name} is off by {errors[name]:.3g} of {float(wanted[name].norm()):.3g}; noise explains {explained:.2g}"
            return


def _reference(case: Case, noise: Noise | None) -> NUMBERS:
    with warnings.catch_warnings(action="ignore"):
        return Training(case, noise=noise).run(0, STEPS)
