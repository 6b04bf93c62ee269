"""One architecture as a trainer runs it: under autocast, with dropout, a loss that is scaled, an evaluation between steps.

Random numbers are eager torch's (``fallback_random``), so that every side draws the same masks. ``torch.seed``, with which
Reformer draws a seed for each layer, gives the same seed: two runs of torch alone are 0.9 apart without that. The reference
is torch's own AOTAutograd: without autocast its gradients count as exact, and under autocast it says what autocast's error
is. Inductor's own passes over the joint graph run in the reference too. They round otherwise: attention written by hand is
fused in graphs without gradients (BigBird's loss moves by 1.6e-5), and a softmax of a product is computed from its factors
(XCiT's gradients move by 5.6e-3).

**near** stores copies that keep 22 of float32's 23 mantissa bits. Forward reads values and not copies, so losses must be
autocast's. Gradients may differ by ``NEAR_BOUND``: half of float32's last bit, in a copy, moves one number of backward in
thousands to the neighbouring bfloat16. Copies of 18 bits move more: Llama's gradients differ by 1.6e-3 with 18 bits, by
4.9e-3 with 10, and by nothing with 22. Under gradient checkpointing what is high stays float32, since forward too reads the
high copy where a checkpointed region starts. **bf16** may be ``TIMES`` as far from exact gradients as autocast. **fp8** may
be off by that, and by twice what fp8 is off without autocast. Every cast must be in the format of its row of the plan.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import torch
import torch._inductor.config
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes.joint_graph import joint_graph_passes
from torch.fx import GraphModule

import fxprec
import fxprec.runtime.cpu.wide_gemms
from benchmarks.architectures.registry import Buildable
from benchmarks.architectures.training import PLAIN, Row, _dense, built
from benchmarks.graphs.check import in_a_line
from benchmarks.planned import misfits, recorded_works, said_by
from benchmarks.yardsticks.whole import Numbers, errors
from fxprec.config.processor import Processor
from fxprec.passes.lowering.wide_gemms import widen_gemms

DROPOUT, SCALE, STEPS = 0.1, 2.0**8, 2
TIMES, LEAST, NEAR_BOUND, SAME_LOSS = 3.0, 2.0**-8, 5e-4, 1e-6
NEAREST = fxprec.Recipe(hi="1-8-22", lo_forward="1-8-22", lo_backward="1-8-22", name="but for one bit exact")
EXACT_HIGH = replace(NEAREST, hi="fp32")
SIDES: dict[str, dict[str, Any]] = {
    "near": {"recipe": NEAREST, "storage": "packed"},
    "bf16": {"recipe": "bf16"},
    "fp8": {"recipe": "fp8", "low_ratio": 1.0},
}
ALONE = "fp8 without autocast"


def _in_our_products(graph: GraphModule, _: object) -> Callable[..., Any]:
    widen_gemms(graph.graph, Processor.here())
    graph.recompile()
    run: Callable[..., Any] = make_boxed_func(graph.forward)
    return run


def _in_evaluation(graph: GraphModule, inputs: object) -> Callable[..., Any]:
    joint_graph_passes(graph)
    return _in_our_products(graph, inputs)


def _halves(joint: GraphModule, inputs: object, **options: Any) -> tuple[GraphModule, GraphModule]:
    joint_graph_passes(joint)
    halves: tuple[GraphModule, GraphModule] = min_cut_rematerialization_partition(joint, inputs, **options)
    return halves


PLAIN_TORCH = aot_autograd(
    fw_compiler=_in_our_products,
    inference_compiler=_in_evaluation,
    decompositions=select_decomp_table,
    partition_fn=_halves,
)
"""AOTAutograd with Inductor's decompositions and joint passes and torch's partitioner, run op by op, with fxprec's kernels of
16-bit products.

ATen's round partial sums to bfloat16 on a CPU without its instructions, so that they are further from float32.
"""


def turn_dropout_on(model: nn.Module) -> int:
    """Give every dropout of a model's modules and configurations its probability; return how many there are."""
    found = 0
    for part in model.modules():
        for owner in (part, getattr(part, "config", None)):
            for name, value in list(getattr(owner, "__dict__", {}).items()):
                is_dropout = ("drop" in name and "layer" not in name) or (isinstance(part, nn.Dropout) and name == "p")
                if is_dropout and isinstance(value, float) and value == 0.0:
                    setattr(owner, name, DROPOUT)
                    found += 1
    return found


@dataclass(frozen=True)
class Stepped:
    """Of each step the loss and the gradients, float64, and the loss of the evaluation after the first step."""

    steps: list[Numbers]
    evaluated: float
    casts: list[str] = field(default_factory=list)
    """Casts in another format than their row's."""


def trained(architecture: Buildable, backend: Any, autocast: bool, checkpoint: bool) -> Stepped:
    """Take ``STEPS`` steps of a compiled model, each from the same weights. Raises what the model raises."""
    torch._dynamo.reset()
    model, loss_of = built(architecture)
    turn_dropout_on(model)
    if checkpoint:
        model.gradient_checkpointing_enable()
    compiled = torch.compile(model, backend=backend)
    steps, evaluated = [], 0.0
    with recorded_works() as works, mock.patch.object(torch, "seed", _seed):
        for step in range(STEPS):
            steps.append(_step(model, lambda: loss_of(compiled), autocast))
            if step == 0:
                evaluated = _evaluation(model, lambda: loss_of(compiled), autocast)
    return Stepped(steps, evaluated, [said for work in works for said in misfits(work)])


def _seed() -> int:
    torch.manual_seed(1)
    return 1


def _step(model: nn.Module, loss_of: Callable[[], Tensor], autocast: bool) -> Numbers:
    torch.manual_seed(1)
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
        loss = loss_of()
    (loss * SCALE).backward()
    gradients = {n: _dense(p.grad) / SCALE for n, p in model.named_parameters() if p.grad is not None}
    return Numbers([loss.detach().double()], gradients)


def _evaluation(model: nn.Module, loss_of: Callable[[], Tensor], autocast: bool) -> float:
    model.eval()
    torch.manual_seed(1)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
        loss = float(loss_of())
    model.train()
    return loss


def measure(name: str, architecture: Buildable, sides: list[str], checkpoint: bool = False) -> list[Row]:
    """Return a row a side, or one of the backend of torch's that fails as well. ``near`` alone asks for no exact gradients."""
    with warnings.catch_warnings(), torch._inductor.config.patch(fallback_random=True):
        warnings.simplefilter("ignore")
        try:
            autocast = trained(architecture, PLAIN_TORCH, True, checkpoint)
            if sides == ["near"]:
                exact, rows = autocast, []
            else:
                exact = trained(architecture, PLAIN_TORCH, False, checkpoint)
                rows = [Row(name, "autocast", "eager", gradient_errors=_gradients(autocast, exact))]
        except Exception as error:
            return [Row(name, PLAIN, "eager", error=in_a_line(error))]
        alone = None
        for side in sides:
            row, start = Row(name, side, "eager"), time.perf_counter()
            try:
                options = {"lowering": "eager", **SIDES[side]}
                if checkpoint and side == "near":
                    options |= {"recipe": EXACT_HIGH, "low_ratio": 1.0}
                if side == "fp8":
                    alone = trained(architecture, _backend(options), False, checkpoint)
                backend = _backend(options)
                found = trained(architecture, backend, True, checkpoint)
                row.graphs, row.notes = len(backend.plans), said_by(backend)
                row.error = _missed(row, found, exact, autocast, alone)
            except Exception as error:
                row.error = in_a_line(error)
            row.seconds = round(time.perf_counter() - start, 2)
            rows.append(row)
    return rows


def _backend(options: dict[str, Any]) -> fxprec.Backend:
    return fxprec.Backend(fxprec.Config.from_options(options))


def _gradients(found: Stepped, exact: Stepped) -> list[float]:
    return [errors(f, e)[1] for f, e in zip(found.steps, exact.steps, strict=True)]


def _losses(found: Stepped, exact: Stepped) -> float:
    pairs = [(found.evaluated, exact.evaluated)]
    pairs += [(float(f.outputs[0]), float(e.outputs[0])) for f, e in zip(found.steps, exact.steps, strict=True)]
    return max(abs(a - b) / max(abs(b), 1e-3) for a, b in pairs)


def _missed(row: Row, found: Stepped, exact: Stepped, autocast: Stepped, alone: Stepped | None) -> str | None:
    row.losses = [float(step.outputs[0]) for step in found.steps]
    wanted = autocast if row.side == "near" else exact
    row.gradient_errors = _gradients(found, wanted)
    losses, gradients = _losses(found, wanted), row.gradient_errors[-1]
    bound, of_losses = NEAR_BOUND, SAME_LOSS
    if row.side != "near":
        bound = TIMES * max(LEAST, *_gradients(autocast, exact))
        of_losses = TIMES * max(LEAST, _losses(autocast, exact))
    if alone is not None and row.side == "fp8":
        bound += 2 * _gradients(alone, exact)[-1]
        found.casts.extend(f"without autocast {said}" for said in alone.casts)
    if found.casts:
        return f"{len(found.casts)} casts: {found.casts[0]}"
    if not gradients <= bound:
        return f"a gradient is off by {gradients:.3g}, at most {bound:.3g}"
    return None if losses <= of_losses else f"a loss is off by {losses:.3g}, at most {of_losses:.3g}"
