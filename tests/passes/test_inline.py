"""Which casts of a CPU graph become part of Inductor's loops, and what is counted of them all the same."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))

from op_by_op import run_op_by_op

import fxprec
import fxprec.driver.compilation
from fxprec.ir.symbolic import TABLE_COLUMNS, Quantize
from fxprec.kernels import casts
from fxprec.passes.lowering.in_loops import casts_in_loops

KERNELS = (casts.STORE, casts.STORE_, casts.ROUND, casts.ROUND_, casts.LOAD)


class Step:
    """One training step of a small network, lowered as for Inductor and run op by op."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, factor: float = 1.0, **options: object) -> None:
        self.seen: list[torch.fx.GraphModule] = []
        monkeypatch.setattr(fxprec.driver.compilation.compat, "compile_fx_inner", run_op_by_op(self.seen))
        torch.manual_seed(0)
        torch.compiler.reset()
        self.backend = fxprec.Backend(fxprec.Config(low_ratio=1.0, **options))
        self.model = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))
        self.compiled = torch.compile(self.model, backend=self.backend)
        self.x = torch.randn(64, 16) * factor
        self.run()

    def run(self) -> None:
        self.out = self.compiled(self.x)
        self.out.square().mean().backward()

    @property
    def kernels(self) -> int:
        return sum(node.target in KERNELS for gm in self.seen for node in gm.graph.nodes)

    @property
    def rows(self) -> dict[str, dict]:
        return {row["tensor"]: row for row in self.backend.stats() if row["amax"] is not None}


@pytest.mark.parametrize(("recipe", "storage"), [("fp8", "native"), ("hfp8", "packed")])
def test_casts_for_backward_need_no_kernel_and_are_counted(monkeypatch, recipe, storage):
    found = Step(monkeypatch, recipe=recipe, storage=storage)
    assert found.kernels == 0
    wanted = Step(monkeypatch, recipe=recipe, storage=storage, lowering="eager")
    assert torch.equal(found.out, wanted.out)
    for p, q in zip(found.model.parameters(), wanted.model.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad), "the bits of the reference"
    assert found.rows.keys() == wanted.rows.keys()
    for name, row in found.rows.items():
        assert row["underflow_ratio"] is None, "codes do not tell"
        assert row["amax"] == pytest.approx(wanted.rows[name]["amax"], rel=1 / 15), "rounded to 3 bits"
        assert row["overflow_ratio"] == wanted.rows[name]["overflow_ratio"] == 0


def test_what_every_reader_gets_rounded_is_counted_by_the_kernel_that_rounds(monkeypatch):
    found = Step(monkeypatch, recipe="fp8", storage="simulate")
    assert found.kernels > 0
    assert all(row["underflow_ratio"] is not None for row in found.rows.values())


def test_overflow_counted_from_codes_promotes(monkeypatch):
    step = Step(monkeypatch, factor=1e4, recipe="fp8")
    over = [name for name, row in step.rows.items() if row["overflow_ratio"] > 0.01]
    assert over
    step.run()
    assert {event.kind for event in step.backend.events} >= {"promotion", "relowering"}
    formats = {site.tensor: site.format for site in step.backend.plans[0].sites if site.kind == "output"}
    assert all(formats[name] == "bf16" for name in over)


def test_equal_graphs_are_lowered_to_equal_text_whatever_the_order_of_the_casts() -> None:
    """Inductor's code cache goes by the text, names included, and a set of nodes has another order in each process."""

    def lowered(step: int) -> str:
        graph = torch.fx.Graph()
        table = graph.placeholder("table")
        table.meta["val"] = torch.zeros(4, TABLE_COLUMNS, dtype=torch.int32)
        found = []
        for row in range(4):
            x = graph.placeholder(f"x{row}")
            x.meta["val"] = torch.ones(8, 4)
            found.append(Quantize(x, table, row, "e4m3fn", "native").insert(graph))
            found[-1].meta["val"] = torch.empty(8, 4, dtype=torch.float8_e4m3fn)
        graph.output(tuple(found))
        casts_in_loops(graph, found[::step], scaled=range(4))
        return str(graph)

    assert lowered(1) == lowered(-1)
