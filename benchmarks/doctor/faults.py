"""Faults to plant into a model or into the code that stores its tensors, one at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from benchmarks.doctor.networks import Network
from fxprec import Backend, Config, Plan
from fxprec.config.processor import PORTABLE
from fxprec.diagnosis.doctor import Request, recorded
from fxprec.diagnosis.examine import Examined
from fxprec.diagnosis.subject import Subject
from fxprec.driver.half_compilation import Halves
from fxprec.ir.symbolic import AS_STORED, Dequantize, Quantize
from fxprec.plan import Site
from fxprec.runtime.table import ScaleTable

OPTIONS: Mapping[str, Any] = {"recipe": "fp8", "storage": "packed"}
LOUD = 1e4
HOT = 40.0  # times the weights before a softmax: nearly every row of it is one-hot
EXPONENT = 6  # of a scale that is put on and never taken off
NARROW = "1-2-1"


class Loud(nn.Module):
    """A module that works at another scale: its input is 1e4 times as large, its result taken back."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x * LOUD) / LOUD


@dataclass(frozen=True)
class Fault:
    """One fault in one network, and who is guilty of it."""

    kind: str
    network: str
    where: str
    guilty: Callable[[Any], bool]
    """Of a row of the ranking."""
    change: Callable[[nn.Module], None] = lambda model: None
    patch: Callable[[], Any] = field(default=lambda: mock.patch.object(Quantize, "__doc__", ""))
    edit: tuple[int, str] | None = None
    """A site of the plan, and its format."""

    def options(self, plan: Plan, folder: Path) -> dict[str, Any]:
        """Return the options to examine with."""
        if self.edit is None:
            return dict(OPTIONS)
        site, fmt = self.edit
        sites = tuple(replace(s, format=fmt) if s.id == site else s for s in plan.sites)
        path = folder / "plan.json"
        replace(plan, sites=sites).save(path)
        return {"storage": "packed", "plan": str(path), "recipe": "fp8"}


def plan_of(network: Network) -> Plan:
    """Return the plan of a network without a fault."""
    model, x, loss = network.make()
    backend = Backend(Config(**OPTIONS, lowering="eager", promote_above=None, cpu=PORTABLE))
    torch.compiler.reset()
    loss(torch.compile(model, backend=backend)(x)).backward()
    return backend.plans[0]


def harmful(network: Network) -> list[Site]:
    """Return the sites stored in 8 bits whose errors reach a gradient: a re-run of the step says so of each."""
    (graph,) = examined(network, (NARROW,))
    rows = [row for row in graph.rows((NARROW,)) if row.format == "e4m3fn"]
    return [graph.plan.sites[row.site] for row in rows if graph.run_again("", [row], {row.site: NARROW}).measured]


def examined(network: Network, formats: tuple[str, ...], steps: int = 0) -> list[Examined]:
    """Record a step of a network without a fault, trained for some steps, and differentiate it."""
    model, x, loss = network.trained(steps)
    request = Request.of({**OPTIONS, "formats": formats})
    return [graph() for graph in recorded(Subject.of(model, x, loss), request, lambda line: None)[1]]


def scaled_layer(name: str, module: str) -> Fault:
    def change(model: nn.Module) -> None:
        parent, _, child = module.rpartition(".")
        setattr(model.get_submodule(parent), child, Loud(model.get_submodule(module)))

    return Fault("layer scaled by 1e4", name, module, lambda row: covers(row.module, module), change)


def scaled_weights(name: str, module: str) -> Fault:
    def change(model: nn.Module) -> None:
        with torch.no_grad():
            for parameter in model.get_submodule(module).parameters():
                parameter.mul_(LOUD)

    return Fault("layer scaled by 1e4", name, module, lambda row: covers(row.module, module), change)


def hot_softmax(name: str, linear: str, module: str) -> Fault:
    def change(model: nn.Module) -> None:
        with torch.no_grad():
            model.get_parameter(f"{linear}.weight").mul_(HOT)

    return Fault("saturating softmax", name, linear, lambda row: row.module in (linear, module), change)


def narrow(name: str, site: Site) -> Fault:
    return Fault("format too narrow", name, site.tensor, _is(site), edit=(site.id, NARROW))


def wrong_scale(name: str, site: Site) -> Fault:
    original, compiled = ScaleTable.of, Halves.compile

    def of(self: ScaleTable, state: Any) -> Tensor:
        table = original(self, state).clone()
        table[site.id, 0] = EXPONENT
        return table

    def compile_half(self: Halves, gm: GraphModule, examples: Any, options: Any, half: str) -> Any:
        for node, read in Dequantize.among(Dequantize.nodes(gm.graph)):
            if read.row == site.id:
                node.args = replace(read, row=AS_STORED).args
        return compiled(self, gm, examples, options, half)

    @contextmanager
    def patch() -> Iterator[None]:
        with mock.patch.object(ScaleTable, "of", of), mock.patch.object(Halves, "compile", compile_half):
            yield

    return Fault("wrong scale", name, site.tensor, _is(site), patch=patch)


def swapped_cast(name: str, site: Site) -> Fault:
    original = Halves.compile

    def compile_half(self: Halves, gm: GraphModule, examples: Any, options: Any, half: str) -> Any:
        for node, call in Quantize.among(Quantize.nodes(gm.graph)):
            if call.row == site.id:
                node.args = replace(call, format="e5m2").args
        return original(self, gm, examples, options, half)

    patch = lambda: mock.patch.object(Halves, "compile", compile_half)  # noqa: E731
    return Fault("swapped cast", name, site.tensor, _is(site), patch=patch)


def _is(site: Site) -> Callable[[Any], bool]:
    return lambda row: bool(row.site == site.id)


def covers(module: str, parent: str) -> bool:
    return module == parent or module.startswith(f"{parent}.")


@contextmanager
def planted(fault: Fault, network: Network) -> Iterator[tuple[nn.Module, Tensor, Any]]:
    """Give the network with the fault in it."""
    model, x, loss = network.make()
    fault.change(model)
    with fault.patch():
        yield model, x, loss
