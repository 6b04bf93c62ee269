"""Random training programs against float64, and those that were wrong once (``python -m benchmarks.graphs``)."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # benchmarks/ is not installed

from benchmarks.graphs import shrink
from benchmarks.graphs.__main__ import Result, run, text_of
from benchmarks.graphs.check import Finding, check
from benchmarks.graphs.generate import program_of
from benchmarks.graphs.program import Program, Shape, Statement
from benchmarks.graphs.values import Noise

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # eager PyTorch's while programs are tried, and what is left unplanned
]
SHARDS, EACH, GATE = 8, 25, 2
"""Parts of the random programs, how many programs each has, and how many parts the gate runs: 0.3 s a program."""


def program(text: str, values: dict[str, Shape], outputs: str, **options: Any) -> Program:
    """Return a program of plain statements, or of one region where the text ends with its kind behind ``#``."""
    text, _, region = text.partition("#")
    statements = tuple(Statement(line.strip()) for line in text.split(";"))
    if region:
        statements = (Statement(region.strip(), statements),)
    defaults = {"storage": "packed", "low_ratio": 1.0, "dynamic": False, "promotes": False, "batches": 1}
    return Program(values, statements, tuple(outputs.split()), defaults | options)


FREE = {"needs_gradient": False}
KEPT = {
    "numbers of backward under a peak budget": program(
        "v0, v1 = torch.var_mean(x0, -1, keepdim=True)", {"x0": Shape((6, 6))}, "v0",
        dynamic=True, peak_budget="1MiB", low_ratio=None,
    ),
    "a stored view of a stored tensor": program(
        "v0 = torch.cat([x0, x0], -1); v1 = v0 * v0.mean(); v2 = F.softplus(x0)", {"x0": Shape((3, 4))}, "v1 v2", dynamic=True
    ),
    "zeros added to an input": program(
        "v0 = (x0 * 0).detach() + x0; v1 = F.conv1d(v0, w0, padding=1); v2 = torch.log(v0.abs() + 0.5)",
        {"x0": Shape((2, 1, 4), **FREE), "w0": Shape((6, 1, 3))}, "v1 v2",
    ),
    "zeros added to an input of a checkpoint": program(
        "v0 = torch.zeros_like(x0) + p0; v2 = torch.outer(x1[:6], v0.flatten()[:5]); v3 = v2 + p1 # checkpoint",
        {"x0": Shape((8,), **FREE), "x1": Shape((8,), **FREE), "p0": Shape((8,), "zero"), "p1": Shape((6, 5), "zero")}, "v3",
        storage="native",
    ),
    "an input that forward writes into": program(
        "v0 = torch.outer(x0.flatten()[:6], x0.flatten()[:5]); v1, v2 = torch.var_mean(v0.pow(3), -1, keepdim=True); "
        "F.silu(x0, inplace=True); v3 = F.batch_norm(v1, None, None, w0, w1, training=True)",
        {"x0": Shape((3, 4), **FREE), "w0": Shape((1,)), "w1": Shape((1,))}, "v2 v3", promotes=True, batches=2,
    ),
    "an input that AOTAutograd writes into behind forward": program(
        "v0 = x0.roll(1, -1); v1 = v0 + p0; x0.add_(v1); v2 = x0 / (1 + x0.square()); v3 = v1.swapaxes(0, -1).contiguous()",
        {"x0": Shape((2, 4, 4, 4), **FREE), "p0": Shape((2, 4, 4, 4), "zero")}, "v3 v2 x0", low_ratio=0.5,
    ),
    "a slice held over a graph break": program(
        "rows = slice(0, 2); v0 = torch.tanh(x0 @ w0); torch._dynamo.graph_break(); v1 = v0[rows] @ w0",
        {"x0": Shape((4, 4), **FREE), "w0": Shape((4, 4))}, "v1",
    ),
    "a result written into behind a graph break, in the graph a view of a copy": program(
        "v1 = (w0 @ x0.mT).mT; v2 = torch.cat([v1, v1], -1); torch._dynamo.graph_break(); v2.mul_(x0); v3 = v1[x2]",
        {"x0": Shape((6, 6), **FREE), "x2": Shape((4,), "int"), "w0": Shape((3, 6))}, "v3",
    ),
    "groups by dataflow where all is empty": program(
        "v0 = torch.einsum('...i,ij->...j', x0, w0)", {"x0": Shape((0, 6)), "w0": Shape((6, 1))}, "v0", grouping="dataflow",
    ),
    "an empty tensor under a peak budget": program(
        "v0 = x0[:0]; v1 = F.log_softmax(v0, -1)", {"x0": Shape((2, 4, 4, 4))}, "v1", peak_budget="70%",
    ),
    "a stride of a stored tensor under a peak budget": program(
        "v0 = x0.as_strided((2, 2), (2, 1)); v1 = torch.stack([v0, v0])", {"x0": Shape((2, 3, 6))}, "v1",
        dynamic=True, peak_budget="70%",
    ),
    "a view made again behind a graph under a peak budget": Program(
        {"x0": Shape((3, 4))},
        (
            Statement("checkpoint", (Statement("v0 = torch.mv(x0, x0.flatten()[:x0.shape[1]])"),)),
            Statement("v1 = v0.unsqueeze(0)"), Statement("v2 = v1[..., 0]"), Statement("v3 = v2.repeat_interleave(2, 0)"),
            Statement("checkpoint", (
                Statement("v4 = v3 + len(str(v3.detach().sum().item() > 1e9)) * 0.1"), Statement("v5 = v0.clone()"),
                Statement("v6 = F.elu(v4)"), Statement("v7 = -v0"),
            )),
            Statement("v8 = torch.cat([v2, v2], 0)"),
        ),
        ("v8",),
        {"storage": "packed", "low_ratio": None, "dynamic": False, "promotes": True, "batches": 2, "peak_budget": "70%"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", KEPT)
def test_what_was_wrong_once(name: str) -> None:
    assert check(KEPT[name]) is None


@pytest.mark.parametrize(
    "shard", [*range(GATE), *(pytest.param(s, marks=pytest.mark.full) for s in range(GATE, SHARDS))]
)
def test_random_programs_agree_with_float64(shard: int) -> None:
    for seed in range(shard * EACH, (shard + 1) * EACH):
        found = program_of(seed, statements=5)
        finding = check(found)
        assert finding is None or finding.by_torch, f"case {seed}: {finding}\n{text_of(found)}"


def test_a_wrong_gradient_is_found_and_its_program_made_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.graphs.check.OTHERS", ())
    monkeypatch.setattr("benchmarks.graphs.check._compiled_runs", wrong_where(lambda text: "tanh" in text))
    wrong = program(
        "v0 = x0 @ w0; v1 = torch.tanh(v0); v2 = torch.sigmoid(x0); v3 = v1 * v2; v4 = v3 + 1",
        {"x0": Shape((4, 4)), "w0": Shape((4, 4))}, "v2 v4", storage="simulate", batches=2,
    )  # fmt: skip
    finding = check(wrong)
    assert finding is not None
    assert finding.kind == "values"
    small = shrink.shrunk(wrong, finding, seconds=30)
    assert [s.text.partition("(")[0] for s in small.statements] == ["v1 = torch.tanh"]
    assert (small.outputs, small.options["batches"], small.options["storage"]) == (("v1",), 1, "packed")


def wrong_where(is_wrong: Any) -> Any:
    """Return eager PyTorch, with gradients that are 1% too large for programs of a kind."""
    from benchmarks.graphs.program import module_of
    from benchmarks.graphs.values import run as run_module

    def runs(program: Program, backend: object) -> list[dict[str, torch.Tensor]]:
        module, factor = module_of(program, torch.float32), 1.01 if is_wrong(program.source) else 1.0
        batches = [run_module(program, module, module, torch.float32, b) for b in range(program.options["batches"])]
        return [{n: x * factor if "gradient" in n else x for n, x in found.items()} for found in batches]

    return runs


def test_noise_explains_what_rounding_does() -> None:
    x = torch.full((1000,), 3.0, dtype=torch.float64)
    with Noise(2.0**-10, seed=0):
        y = x * 2
    assert 0.8 < float((y / 6 - 1).std()) * 2**10 < 1.2
    assert torch.equal(x, torch.full_like(x, 3.0)), "inputs stay"


def test_cases_are_counted_and_failures_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    findings = {3: Finding("error", "RuntimeError: no"), 4: Finding("values", "off", by_torch=True)}
    monkeypatch.setattr("benchmarks.graphs.__main__.machine.save", lambda *args: None)
    monkeypatch.setattr("benchmarks.graphs.__main__.program_of", lambda *_: KEPT["zeros added to an input"])
    monkeypatch.setattr("benchmarks.graphs.__main__.check", lambda p: findings.get(found.first + found.cases))
    monkeypatch.setattr("benchmarks.graphs.__main__.shrunk", lambda p, finding, seconds: p)
    found = Result(first=2)
    run(found, 4, 0.0)
    assert ([f["seed"] for f in found.failed], [f["seed"] for f in found.torchs_own]) == ([3], [4])
    assert found.storages == {"packed": 4}
    assert "v1 = F.conv1d(v0, w0, padding=1)" in found.failed[0]["program"]


def test_a_seed_is_one_program() -> None:
    assert text_of(program_of(11)) == text_of(program_of(11)) != text_of(program_of(12))
