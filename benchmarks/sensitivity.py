"""Measure how far 8-bit copies of what backward reads put each operator's gradient off, and how fxprec stores them.

    pip install expecttest && python -m benchmarks.sensitivity      # torch's op_db: 20 minutes on one core
    python -m benchmarks.sensitivity --only cumprod rsqrt

An error is the largest over an operator's samples, in the Euclidean norm, against float64. Columns ``e4m3fn`` and
``bf16`` round every tensor that autograd saves. Column ``fp8`` compiles the operator with fxprec in that recipe, and
column ``float32`` rounds nothing. The kind is that of ``passes/analysis/sensitive.py``:

- harmless: fxprec stores what the backward reads in 8 bits;
- sensitive: a table, or the backward's graph, gives a reason not to;
- unknown: no table names the operator, and what its backward reads keeps its dtype;
- reads nothing: there is nothing that could be stored.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import signal
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

import fxprec
from benchmarks import machine
from fxprec.numerics.formats import parse
from fxprec.passes.analysis.sensitive import UNKNOWN
from fxprec.plan import Plan

SAMPLES, COMPILED = 12, 1
KINDS = ("reads nothing", "harmless", "sensitive", "unknown")
Step = Callable[..., Any]


@dataclass
class Row:
    """The errors of one operator's gradient, by what was rounded, and the kind that fxprec takes it for."""

    operator: str
    e4m3fn: float = 0.0
    bf16: float = 0.0
    fp8: float = 0.0
    float32: float = 0.0
    kind: str = KINDS[0]
    why: list[str] = field(default_factory=list)
    failed: str = ""

    def add(self, plan: Plan) -> None:
        """Take the most careful kind of any plan, and the reasons of all."""
        why = {site.why for site in plan.sites if site.why and not site.unread}
        low = any(parse(site.format).bits <= 8 for site in plan.sites)
        found = "unknown" if any(UNKNOWN.why in w for w in why) else "sensitive" if why else KINDS[low]
        self.kind = max(self.kind, found, key=KINDS.index)
        self.why = sorted({*self.why, *why})


def opened(op: Any, sample: Any, dtype: torch.dtype) -> tuple[Step, list[Tensor]]:
    """Return the operator as a function of what it is differentiated by, each times 1.5, and the arguments of that.

    The products are activations, which fxprec may store otherwise; a model's inputs belong to the caller.
    """
    given = tree_map_only(Tensor, lambda t: t.detach().to(dtype) if t.dtype == torch.float64 else t, sample_of(sample))
    flat, spec = tree_flatten(given)
    places = [i for i, t in enumerate(tree_leaves(sample_of(sample))) if isinstance(t, Tensor) and t.requires_grad]

    def step(*leaves: Tensor) -> Any:
        arguments = list(flat)
        for place, leaf in zip(places, leaves, strict=True):
            arguments[place] = leaf * 1.5
        first, rest, named = tree_unflatten(arguments, spec)
        return op(first, *rest, **named)

    return step, [(flat[i] / 1.5).requires_grad_() for i in places]


def sample_of(sample: Any) -> tuple[Any, Any, Any]:
    return sample.input, sample.args, sample.kwargs


def gradient(step: Step, leaves: list[Tensor]) -> Tensor:
    """Return all gradients as one float64 vector, for random gradients of all outputs."""
    torch.manual_seed(0)  # of operators that are random
    outputs = [t for t in tree_leaves(step(*leaves)) if isinstance(t, Tensor) and t.requires_grad]
    generator = torch.Generator().manual_seed(1)
    incoming = [torch.randn(t.shape, dtype=torch.float64, generator=generator).to(t.dtype) for t in outputs]
    found = torch.autograd.grad(outputs, leaves, incoming, allow_unused=True)
    return torch.cat([torch.zeros(0), *(g.double().flatten() for g in found if g is not None)])


def saved_in(dtype: torch.dtype, step: Step) -> Step:
    """Return ``step`` with what autograd saves rounded; a single number is a statistic."""
    limit = torch.finfo(dtype).max

    def rounded(t: Tensor) -> Tensor:
        return t.clamp(-limit, limit).to(dtype).double() if t.dtype == torch.float64 and t.numel() > 1 else t

    def run(*leaves: Tensor) -> Any:
        with torch.autograd.graph.saved_tensors_hooks(rounded, lambda t: t):
            return step(*leaves)

    return run


def off(found: Tensor, exact: Tensor) -> float:
    error = float((found - exact).norm() / exact.norm())
    return error if error == error else float("inf")


def measure(op: Any, row: Row) -> None:
    """Fill ``row`` in. Raises what the operator and its compilation raise."""
    torch.manual_seed(0)
    compiled = 0
    for sample in itertools.islice(op.sample_inputs("cpu", torch.float64, requires_grad=True), SAMPLES):
        step, leaves = opened(op, sample, torch.float64)
        exact = gradient(step, leaves)
        if not exact.numel() or not 0 < exact.norm() < torch.inf or off(gradient(step, leaves), exact):
            continue  # no gradient, or a random one
        row.e4m3fn = max(row.e4m3fn, off(gradient(saved_in(torch.float8_e4m3fn, step), leaves), exact))
        row.bf16 = max(row.bf16, off(gradient(saved_in(torch.bfloat16, step), leaves), exact))
        if compiled < COMPILED:
            compiled += 1
            torch._dynamo.reset()
            backend = fxprec.Backend(fxprec.Config(recipe="fp8", low_ratio=1.0, lowering="eager"))
            step, leaves = opened(op, sample, torch.float32)
            row.float32 = max(row.float32, off(gradient(step, leaves), exact))
            row.fp8 = max(row.fp8, off(gradient(torch.compile(step, backend=backend), leaves), exact))
            for plan in backend.plans:
                row.add(plan)


def measured(only: list[str], seconds: int) -> Iterator[Row]:
    """Yield a row an operator; one that takes longer than ``seconds`` or raises says so in ``failed``."""
    signal.signal(signal.SIGALRM, functools.partial(_late, seconds))
    for op in op_db:
        row = Row(f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name)
        if not op.supports_autograd or torch.float64 not in op.dtypes or (only and op.name not in only):
            continue
        signal.alarm(seconds)
        try:
            measure(op, row)
        except Exception as error:
            row.failed = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        finally:
            signal.alarm(0)
        yield row


def _late(seconds: int, *_: object) -> None:
    raise TimeoutError(f"longer than {seconds} s")


def main() -> None:
    """Measure, print, and save a run of all operators."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="these operators, as op_db names them")
    parser.add_argument("--seconds", type=int, default=60, help="an operator's time")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    print(f"{'operator':44} {'e4m3fn':>8} {'bf16':>8} {'fp8':>8} {'float32':>8}  kind")
    rows = []
    for row in measured(options.only, options.seconds):
        rows.append(row)
        print(f"{row.operator[:44]:44} {row.e4m3fn:8.2g} {row.bf16:8.2g} {row.fp8:8.2g} {row.float32:8.2g}  {row.kind} {row.failed}", flush=True)  # fmt: skip
    if not options.only:
        print(machine.save("sensitivity", [asdict(row) for row in rows]))


if __name__ == "__main__":
    main()
