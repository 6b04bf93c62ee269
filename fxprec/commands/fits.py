"""``fxprec fits``: report whether a training step fits a GPU's memory, what uses it, and the largest fitting batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fxprec.commands.output import AsJson, given, modules, names, print_json
from fxprec.errors import ConfigError, writing

if TYPE_CHECKING:
    from torch import nn

    from fxprec.driver.fits import Answer, TorchOptimizer
    from fxprec.runtime.optim.stepper import Stepper


def fits(
    target: Annotated[str, typer.Argument(help="path/file.py:factory or module:callable; returns (model, inputs).")],
    gpu: Annotated[str, typer.Option(help="Bytes that the whole step may hold, for instance 24GiB.")],
    optimizer: Annotated[
        str, typer.Option(help="adamw, lion, muon or sgd of fxprec.optim; torch.adamw or torch.sgd of torch.optim.")
    ] = "adamw",
    states: Annotated[str, typer.Option(help="How states are held: auto, float32, bf16, 8bit or 4bit.")] = "auto",
    momentum: Annotated[float, typer.Option(help="Momentum of sgd and torch.sgd; with 0 they have no states.")] = 0.0,
    max_norm: Annotated[float | None, typer.Option(help="Clip gradients by their global norm.")] = None,
    norm: Annotated[
        str, typer.Option(help="Norm that clips: last, or exact, which holds all gradients. Default: exact.")
    ] = "",
    gradients: Annotated[
        str | None, typer.Option(help="bf16: sum gradients over backward passes until step().")
    ] = None,
    batch: Annotated[int | None, typer.Option(help="Batch size in place of the inputs' own.")] = None,
    sequence: Annotated[int | None, typer.Option(help="Tokens in place of the inputs' second dimension.")] = None,
    largest: Annotated[bool, typer.Option("--largest", help="Search the largest batch that fits: 10 plans.")] = False,
    longest: Annotated[bool, typer.Option("--longest", help="Search the longest sequence that fits.")] = False,
    recipe: Annotated[str, typer.Option(help="Recipe, for instance fp8.")] = "fp8",
    peak_budget: Annotated[
        str, typer.Option(help="peak_budget to plan for, such as 60%. Default: what weights and states leave.")
    ] = "",
    ways: Annotated[str, typer.Option(help="How the budget may be met: narrow,recompute,offload (on GPUs).")] = "",
    keep_high: Annotated[str, typer.Option(help="Modules held high, for instance head,layers.0.")] = "",
    out: Annotated[Path | None, typer.Option(help="Folder for the plan and its page.")] = None,
    as_json: AsJson = False,
) -> None:
    """Report whether a training step fits, and by which plan, without allocating. Exit code 0 if it fits, 1 if not."""
    from fxprec.config.checks import byte_size
    from fxprec.driver.fits import Question, largest_batch, longest_sequence
    from fxprec.report.target import find_factory

    budget = byte_size("--gpu", gpu)
    assert budget is not None, "an option that is required"
    if gpu.strip().isdigit() and budget < 2**20:
        raise ConfigError(f"--gpu {gpu} is a number of bytes, and no step is as small; give it a unit, as in {gpu}GiB")
    for name, size in (("batch", batch), ("sequence", sequence)):
        if size is not None and size < 1:
            raise ConfigError(f"--{name} is {size}; give it 1 or more")
    if norm and max_norm is None:
        raise ConfigError(f"--norm {norm} says which norm clips, and --max-norm is not given; give --max-norm 1 too")
    own = {"states": states, "max_norm": max_norm, "norm": norm or "exact", "gradients": gradients}
    options = {"recipe": recipe, "keep_high": modules(keep_high)}
    options |= given(ways=ways and names(ways), peak_budget=peak_budget)
    question = Question(find_factory(target), target, budget, _maker(optimizer, momentum, own), options)
    first = question.answer(batch, sequence)
    tried: dict[str, list[Answer]] = {}
    if largest:
        tried["batch"] = list(largest_batch(first, lambda size: question.answer(size, sequence)))
    if longest:
        tried["sequence"] = list(longest_sequence(first, lambda size: question.answer(batch, size)))
    fitting = [answer for answers in tried.values() for answer in answers if answer.fits]
    shown = max(fitting, key=lambda a: a.batch * a.sequence, default=first)
    if as_json:
        print_json(_data(first, tried))
    else:
        print("\n".join(_lines(target, first, tried, shows_sequence=longest or sequence is not None)))
    if out is not None and shown.plan is not None:
        _write(shown, out, target)
        if not as_json:
            print(out / "report.html")
    raise typer.Exit(int(not first.fits))


_TORCHS = ("torch.adamw", "torch.sgd")


def _maker(
    name: str, momentum: float, own: Mapping[str, Any]
) -> Callable[[nn.Module], Sequence[Stepper]] | TorchOptimizer:
    from fxprec import optim

    if momentum and name not in ("sgd", "torch.sgd"):
        raise ConfigError(f"--momentum is of sgd, and --optimizer is {name}; leave --momentum out, or give sgd")
    if name in _TORCHS:
        return _of_torch(name, momentum, own)
    makers: dict[str, Callable[[Any], Stepper]] = {
        "adamw": lambda params: optim.AdamW(params, **own),
        "lion": lambda params: optim.Lion(params, **own),
        "sgd": lambda params: optim.SGD(params, momentum=momentum, **own),
    }
    if name == "muon":
        return lambda model: _muon_and_adamw(model, own)
    if name not in makers:
        raise ConfigError(f"--optimizer {name} is unknown; give adamw, lion, muon, sgd, {' or '.join(_TORCHS)}")
    return lambda model: [makers[name]([p for p in model.parameters() if p.requires_grad])]


def _of_torch(name: str, momentum: float, own: Mapping[str, Any]) -> TorchOptimizer:
    """Return what an optimizer of torch.optim holds. Raises `ConfigError` for an option of fxprec.optim."""
    from fxprec.driver.fits import TorchOptimizer

    defaults = {"states": "auto", "max_norm": None, "norm": "exact", "gradients": None}
    for option, default in defaults.items():
        if own[option] != default:
            flag = option.replace("_", "-")
            raise ConfigError(f"--{flag} is of fxprec.optim, and --optimizer is {name}; leave --{flag} out")
    is_adamw = name == "torch.adamw"
    return TorchOptimizer(name, states=2 if is_adamw else int(momentum > 0), copies=int(is_adamw))


def _muon_and_adamw(model: nn.Module, own: Mapping[str, Any]) -> Sequence[Stepper]:
    """Return a Muon for all matrices except embeddings, and an AdamW for the other parameters."""
    from torch.nn import Embedding

    from fxprec import optim

    tables = {id(p) for module in model.modules() if isinstance(module, Embedding) for p in module.parameters()}
    trained = [p for p in model.parameters() if p.requires_grad]
    matrices = [p for p in trained if p.dim() == 2 and id(p) not in tables]
    others = [p for p in trained if p.dim() != 2 or id(p) in tables]
    found: list[Stepper] = [optim.Muon(matrices, **own)] if matrices else []
    return [*found, optim.AdamW(others, **own)] if others else found


def _lines(
    target: str, first: Answer, tried: Mapping[str, Sequence[Answer]], *, shows_sequence: bool = False
) -> list[str]:
    """Return the text output: yes or no, the memory at the peak by use, the step as a picture, the largest sizes."""
    from fxprec.passes.notice import readable

    sizes = f"batch {first.batch}" + (f", sequence {first.sequence}" if shows_sequence else "")
    head = f"{target}, {sizes}, in {readable(first.budget)}"
    lines = [f"{head}: {'it fits' if first.fits else f'no: {first.why}'}"]
    lines += [f"it would fit in --gpu {readable(first.enough)}"] if first.enough else []
    lines += _shown(first) if first.fits else []
    lines += [f"not done: {line}" for line in first.told]
    for name, answers in tried.items():
        fitting, others = (sorted(getattr(a, name) for a in answers if a.fits == fits) for fits in (True, False))
        beyond = f"; {others[0]} does not fit" if others else ""
        best = fitting[-1] if fitting else "none"
        lines.append(f"{_BEST[name]} {name} found: {best}{beyond} ({len(answers)} plans made)")
    return lines


_BEST = {"batch": "largest", "sequence": "longest"}


def _shown(answer: Answer) -> list[str]:
    from fxprec.passes.notice import readable
    from fxprec.plan.explain import peak_lines
    from fxprec.report.whole_step import at_the_peak, picture

    plan, whole = answer.plan, answer.whole
    assert plan is not None
    assert whole is not None
    held = at_the_peak(whole, answer.peak)
    form = f" in {whole.chosen}" if whole.chosen and whole.states else ""
    rows = [f"  {name:17} {_gib(size)}{form if name == 'optimizer states' else ''}" for name, size in held.items()]
    free = f", of which {readable(answer.reserved)} stay free for libraries" if answer.reserved else ""
    where = f"planned on {answer.device}"
    if answer.device == "cpu":
        where += ": with a CPU's kernels in place of a GPU's, whose workspaces are not known"
    return [
        "at the peak of the step:",
        *rows,
        f"  {'left':17} {_gib(answer.budget - sum(held.values()))}{free}",
        peak_lines(plan, answer.peak)[-1],
        *([f"train with peak_budget={answer.peak_budget}"] if answer.peak_budget else []),
        *picture(whole, answer.peak, answer.budget),
        where,
    ]


def _gib(size: int) -> str:
    unit, name = (2**30, "GiB") if size >= 2**30 else (2**20, "MiB")
    return f"{size / unit:8.2f} {name}"


def _data(first: Answer, tried: Mapping[str, Sequence[Answer]]) -> dict[str, Any]:
    """Return the JSON output; sizes are bytes."""
    found: dict[str, Any] = {"fits": first.fits, "batch": first.batch, "sequence": first.sequence}
    found |= {"budget": first.budget, "why": first.why, "enough": first.enough}
    found |= {"reserved": first.reserved, "device": first.device, "not_done": list(first.told)}
    found |= {"peak": None, "states": None, "peak_budget": first.peak_budget or None}
    if first.whole is not None:
        from fxprec.report.whole_step import at_the_peak

        held = at_the_peak(first.whole, first.peak)
        found["peak"] = {name.replace(" ", "_"): size for name, size in held.items()}
        found["states"] = first.whole.chosen or None
    for name, answers in tried.items():
        found[f"{_BEST[name]}_{name}"] = max((getattr(a, name) for a in answers if a.fits), default=0)
        found[f"tried_{name}"] = [{name: getattr(a, name), "fits": a.fits} for a in answers]
    return found


def _write(answer: Answer, out: Path, target: str) -> None:
    """Write the plan and its page. Raises `ConfigError` for a folder that cannot be written."""
    from fxprec.report.html import write_report

    assert answer.plan is not None
    with writing(f"--out {out}"):
        out.mkdir(parents=True, exist_ok=True)
        answer.plan.save(out / "plan.json")
        write_report(answer.plan, out, title=f"{target}, batch {answer.batch}")
