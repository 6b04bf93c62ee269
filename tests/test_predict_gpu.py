"""``fxprec predict PLAN --gpu``: what a plan says of a GPU before anything runs there."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from typer.testing import CliRunner

from fxprec.cli import app
from fxprec.passes.analysis.gemm_costs import costs_of, known_gpus
from fxprec.plan import Plan
from fxprec.report.gpu_step import layers_of, predict
from tests.helpers import compiled, eager_backend

ROWS, WIDTH, HIDDEN = 64, 32, 128


class Block(nn.Module):
    """(2, 32, 32) to the same: attention with one head, and an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, HIDDEN, bias=False), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x):
        q, k, v = (part.unsqueeze(1) for part in self.qkv(x).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).squeeze(1))
        return x + self.down(F.relu(self.up(x)))


@pytest.fixture(scope="module")
def plan(tmp_path_factory) -> tuple[Plan, Path]:
    torch.compiler.reset()
    model, x = Block(), torch.randn(2, 32, WIDTH, requires_grad=True)
    compiled(model, backend := eager_backend("fp8", low_ratio=1.0))(x).sum().backward()
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    backend.plans[0].save(path)
    return backend.plans[0], path


def enlarged(plan: Plan, times: int) -> Plan:
    """The plan of so many rows more."""
    sites = [s if s.kind == "param" else replace(s, elements=s.elements * times) for s in plan.sites]
    return replace(plan, sites=tuple(replace(s, shape=s.shape.replace("2 x 32", f"{2 * times} x 32")) for s in sites))


def test_sizes_of_gemms_are_read_from_the_plan(plan) -> None:
    found = {layer.module: layer for layer in layers_of(plan[0])}
    sizes = {name: (layer.rows, layer.columns, layer.inner) for name, layer in found.items() if layer.weight}
    assert sizes == {
        "qkv": (ROWS, 3 * WIDTH, WIDTH),
        "out": (ROWS, WIDTH, WIDTH),
        "up": (ROWS, HIDDEN, WIDTH),
        "down": (ROWS, WIDTH, HIDDEN),
    }
    (attention,) = (layer for layer in found.values() if not layer.weight)
    assert attention.flops == 2 * 2 * 2 * 32 * 32 * WIDTH / 2, "two products, the causal half"


def test_small_layers_do_not_pay_and_the_step_is_autocasts(plan) -> None:
    found = predict(plan[0], known_gpus()["h100"])
    assert not any(pays for _, pays in found.layers)
    autocast, low, half = found.steps
    assert low.seconds == pytest.approx(autocast.seconds)
    assert low.peak_bytes < half.peak_bytes < autocast.peak_bytes, "what is stored low is so in any case"


def test_large_layers_pay_where_there_is_fp8(plan) -> None:
    wide = enlarged(plan[0], 1 << 14)
    gpus = known_gpus()
    autocast, low, half = predict(wide, gpus["h100"]).steps
    assert set(low.low) >= {"up", "down"}
    assert low.seconds < half.seconds < 1.001 * autocast.seconds
    assert set(half.low) < set(low.low)
    rate = costs_of(gpus["h100"]).bytes_per_s
    assert low.seconds > 2 * (1 << 14) * ROWS * WIDTH / rate, "no faster than memory"
    without = predict(wide, gpus["a100"])
    assert not any(pays for _, pays in without.layers)
    assert without.steps[1].low == ()


def test_the_command_prints_it(plan) -> None:
    shown = CliRunner().invoke(app, ["predict", str(plan[1]), "--gpu", "H100"])
    assert shown.exit_code == 0, shown.output
    assert all(word in shown.output for word in ("bf16 autocast", "this plan", "low_ratio=0.5", "up", "does not pay"))
    data = json.loads(CliRunner().invoke(app, ["predict", str(plan[1]), "--gpu", "b200", "--json"]).output)
    assert [step["name"] for step in data["steps"]] == ["bf16 autocast", "this plan", "low_ratio=0.5"]
    assert data["left_out"] == 0


def test_names_of_modules_are_printed_as_they_are(plan, tmp_path: Path) -> None:
    """A module's name may look like markup of the terminal."""
    made = plan[0]
    sites = tuple(replace(s, module="[/b]" if s.module == made.gemms[0].module else s.module) for s in made.sites)
    renamed = replace(made, sites=sites, gemms=(replace(made.gemms[0], module="[/b]"), *made.gemms[1:]))
    renamed.save(tmp_path / "plan.json")
    result = CliRunner().invoke(app, ["predict", str(tmp_path / "plan.json"), "--gpu", "h100"])
    assert result.exit_code == 0, result.output
    assert "[/b]" in result.stdout


def test_an_unknown_gpu_is_refused(plan) -> None:
    refused = CliRunner().invoke(app, ["predict", str(plan[1]), "--gpu", "h10"])
    assert refused.exit_code
    assert "no figures; did you mean 'h100'?; there are h200, h100" in str(refused.exception) + refused.output


def test_a_dump_folder_is_taken(plan, tmp_path: Path) -> None:
    for graph in ("graph-0", "graph-1"):
        (tmp_path / graph).mkdir()
        plan[0].save(tmp_path / graph / "plan.json")
    wanted = CliRunner().invoke(app, ["predict", str(plan[1]), "--gpu", "h100", "--json"]).output
    assert CliRunner().invoke(app, ["predict", str(tmp_path / "graph-0"), "--gpu", "h100", "--json"]).output == wanted
    refused = CliRunner().invoke(app, ["predict", str(tmp_path)])
    assert "holds 2 graphs; give the folder of one, such as" in str(refused.exception)
    (tmp_path / "graph-1" / "plan.json").unlink()
    (tmp_path / "graph-1").rmdir()
    assert CliRunner().invoke(app, ["predict", str(tmp_path), "--gpu", "h100", "--json"]).output == wanted


@pytest.mark.parametrize("beside", [("--gpu", "h100"), ("--paper",)])
def test_options_of_a_link_are_refused_where_no_link_is_predicted(plan, beside) -> None:
    refused = CliRunner().invoke(app, ["predict", str(plan[1]), *beside, "--group-size", "2"])
    words = f"--group-size is about gradients on a link, which {beside[0]} does not predict; leave one of them out"
    assert words in str(refused.exception)
