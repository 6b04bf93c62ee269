"""AOTAutograd's cache keeps code and plan: what they follow is in the key, and who takes them has a state of its own."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from models import TanhLayer
from torch import Tensor, nn

import fxprec
from fxprec.config import Settings
from fxprec.driver import compilation, compiled, memory
from fxprec.driver.capture import Captured
from fxprec.driver.compiled import CodePeak
from fxprec.numerics import cpp, kept_text


class Renamed(TanhLayer):
    def __init__(self) -> None:
        super().__init__()
        self.other = self.linear
        del self.linear

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.other(x))


def batch(size: int = 4) -> Tensor:
    return torch.randn(size, 8, generator=torch.Generator().manual_seed(1)).requires_grad_()


def captured(layer: nn.Module, **options: Any) -> tuple[Captured, fxprec.Plan]:
    """Return what Dynamo handed over for a layer, and its plan."""
    torch.compiler.reset()
    backend = fxprec.Backend(fxprec.Config(recipe="hfp8", lowering="eager"))
    torch.compile(layer, backend=backend, **options)(batch())
    return backend._graphs[0].captured, backend.plans[0]


def key(capture: Captured, given: Any = None, trained: Any = (), more: Any = (), **options: Any) -> str:
    settings = Settings.of(fxprec.Config(**{"recipe": "hfp8", **options}))
    return compiled.plan_key(settings, capture, given, trained, more)


OTHER: list[dict[str, Any]] = [
    {"recipe": "fp8"},
    {"storage": "packed"},
    {"policy": "uniform"},
    {"low_ratio": 0.5},
    {"activation_budget": 1000},
    {"peak_budget": "60%", "storage": "packed"},
    {"keep_high": ("linear",)},
    {"promote_above": 0.5},
    {"grad_scaling": fxprec.GradScaling(interval=7)},
    {"accumulator": "1-6-9", "storage": "simulate"},
    {"mode": "max-autotune"},
    {"grouping": "dataflow"},
    {"policy": "random"},
    {"policy": "random", "seed": 1},
    {"on_nonfinite": "raise"},
    {"strict": True},
]


def test_the_key_has_all_that_a_plan_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    capture, plan = captured(TanhLayer())
    same, _ = captured(TanhLayer())
    assert key(capture) == key(same), "another layer, traced anew"
    demoted = replace(plan, notes=("another",))
    others = [partial(key, capture, **options) for options in OTHER]
    others += [partial(key, capture, plan), partial(key, capture, demoted), partial(key, capture, trained=[plan])]
    others += [partial(key, capture, more=[True]), partial(key, captured(Renamed())[0])]
    others += [partial(key, captured(TanhLayer(), dynamic=True)[0])]
    found = Counter(other() for other in others)
    assert set(found.values()) == {1}
    assert key(capture) not in found
    before = key(capture)
    for name in ("sources", "machine"):
        monkeypatch.setattr(compiled, name, lambda *args: "another")
        assert key(capture) != before


def test_every_source_file_is_in_the_key(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    looked_at: list[str] = []
    monkeypatch.setattr(compiled, "_hash_of", lambda paths: looked_at.extend(map(str, paths)))
    compiled.sources.__wrapped__()
    for name in ("driver/compilation.py", "compat/tiling.py", "codec.py", "low_gemms.py", "kernels.cpp", "costs.json"):
        assert any(path.endswith(name) for path in looked_at), name


def test_a_changed_file_changes_the_hash(tmp_path: Any) -> None:
    (tmp_path / "a.py").write_text("x = 1")
    before = compiled._hash_of(compiled._files(tmp_path))
    (tmp_path / "a.py").write_text("x = 2")
    changed = compiled._hash_of(compiled._files(tmp_path))
    (tmp_path / "a.py").rename(tmp_path / "b.py")
    assert len({before, changed, compiled._hash_of(compiled._files(tmp_path))}) == 3


def test_bytecode_that_another_process_is_writing_is_not_read(tmp_path: Any) -> None:
    (tmp_path / "a.py").write_text("x = 1")
    cache = tmp_path / "__pycache__"
    cache.mkdir()
    (cache / "a.cpython-311.pyc").touch()
    (cache / "a.cpython-311.pyc.140004625793072").touch()
    assert [*compiled._files(tmp_path)] == [tmp_path / "a.py"]


def test_a_start_imports_no_pass_and_no_page() -> None:
    code = "import sys, fxprec.driver.named; print(*(m for m in sys.modules if m.startswith('fxprec.')))"
    modules = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "fxprec.driver.compilation" in modules
    for late in (
        "passes.pipeline",
        "passes.lowering.lower",
        "report.folder",
        "driver.joint_compilation",
        "driver.verify",
    ):
        assert f"fxprec.{late}" not in modules


def test_printed_text_is_kept_and_never_trusted_blindly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    assert kept_text.kept("text", lambda: "int x;\n\nint é;") == "int x;\n\nint é;"
    assert kept_text.kept("text", lambda: "never") == "int x;\n\nint é;"
    (file,) = (tmp_path / "fxprec").iterdir()
    for damaged in (file.read_bytes()[1:], file.read_bytes()[:-1], b"\xff", b""):
        file.write_bytes(damaged)
        assert kept_text.kept("text", lambda: "anew") == "anew"
        assert kept_text.kept("text", lambda: "never") == "anew"
    monkeypatch.setattr(kept_text, "_sources", lambda: "others")
    assert kept_text.kept("text", lambda: "of other sources") == "of other sources"
    assert kept_text.kept("codec", cpp.printed) == kept_text.kept("codec", lambda: "never") == cpp.printed()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(file / "no folder"))
    assert kept_text.kept("text", lambda: "nowhere to keep it") == "nowhere to keep it"


def step(layer: nn.Module) -> list[Tensor]:
    layer.zero_grad()
    loss = layer(batch()).square().mean()
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in layer.parameters())]


def hits_and_misses() -> tuple[int, int]:
    """Return what AOTAutograd's cache counted."""
    counts = torch._dynamo.utils.counters["aot_autograd"]
    return counts["autograd_cache_hit"], counts["autograd_cache_miss"]


def check_equal_layers() -> None:
    """Run in a process of its own: what tests before it leave in this one is no part of the statement."""
    keys: list[str] = []
    asked, options = compilation.plan_key, {"recipe": "hfp8"}
    compilation.plan_key = lambda *facts: (keys.append(asked(*facts)), keys[-1])[1]
    first = TanhLayer()
    layers = [first, *(copy.deepcopy(first) for _ in range(3))]
    for layer in layers[:2]:
        layer.compile(backend="fxprec", options=options)
    for layer in layers[2:]:
        layer.compile(backend="fxprec", options={**options, "promote_above": 0.5})
    results = [step(layer) for layer in layers[:2]]
    assert keys[0] == keys[1]
    assert hits_and_misses() == (1, 1), dict(torch._dynamo.utils.counters)
    results.append(step(layers[2]))
    assert hits_and_misses() == (1, 2), "another option"
    compiled.sources = lambda: "changed"
    results.append(step(layers[3]))
    assert hits_and_misses() == (1, 3), "another source file"
    for result in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(result, results[0], strict=True))
    backends = [fxprec.backend_of(layer) for layer in layers]
    assert backends[0].plans == backends[1].plans
    assert [len(backend.compile_reports[0].passes) > 0 for backend in backends] == [True, False, True, True]
    step(layers[1])
    assert [backend.controllers[0].step for backend in backends] == [1, 2, 1, 1]
    assert all(backend.stats() for backend in backends)


def check_layers_within_a_budget() -> None:
    """The first plan holds more than its budget once it is compiled: the cache has its code too, and it is refused."""
    seen: list[memory.CompiledPeak] = []
    of_code = memory.CompiledPeak.of_code

    def too_much_at_first(self: memory.CompiledPeak) -> CodePeak:
        seen.append(self)
        found = of_code(self)
        assert found.bytes is not None
        return replace(found, bytes=found.bytes + 64_000) if self is seen[0] else found

    memory.CompiledPeak.of_code = too_much_at_first  # type: ignore[method-assign]
    first = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
    layers = [first, *(copy.deepcopy(first) for _ in range(2))]
    results, x = list[list[Tensor]](), torch.randn(256, 32)
    for layer, budget in zip(layers, ("100%", "100%", "95%"), strict=True):
        layer.compile(backend="fxprec", options={"recipe": "fp8", "peak_budget": budget})
        layer(x).square().mean().backward()
        results.append([p.grad for p in layer.parameters() if p.grad is not None])
    backends = [fxprec.backend_of(layer) for layer in layers]
    attempts = [backend._graphs[0].compiler.peak.tried for backend in backends]
    assert len(attempts[0]) == 2
    assert attempts[0] == attempts[1]
    assert hits_and_misses() == (2, 2 + len(attempts[2])), "each attempt has its key, and so has each budget"
    assert backends[0].plans == backends[1].plans
    replanned = [[event for event in backend.events if event.kind == "replanned"] for backend in backends]
    assert len(replanned[0]) == 1
    assert replanned[0] == replanned[1]
    assert [len(backend.compile_reports[0].passes) > 0 for backend in backends] == [True, False, True]
    assert all(torch.equal(a, b) for a, b in zip(results[0], results[1], strict=True))


class InTwo(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = TanhLayer(), TanhLayer()

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        torch._dynamo.graph_break()
        return self.last(y)


def check_graphs_that_share_a_budget() -> None:
    """Both plans of each graph are in the cache: that of the first step, and that for its share of the budget."""
    one = InTwo()
    models, counts, results = [one, copy.deepcopy(one)], [(0, 0)], list[list[Tensor]]()
    for model in models:
        model.compile(backend="fxprec", options={"recipe": "fp8", "peak_budget": "100%"})
        step(model)
        results.append(step(model))
        counts.append(hits_and_misses())
    (hits, misses), found = counts[1], fxprec.backend_of(models[1])
    assert misses > 2, "each graph is compiled for its share"
    assert counts[2] == (hits + hits + misses, misses)
    assert all(report.passes == () for report in found.compile_reports)
    assert found.plans == fxprec.backend_of(models[0]).plans
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.inductor
@pytest.mark.parametrize(
    "check",
    [check_equal_layers, check_layers_within_a_budget, check_graphs_that_share_a_budget],
    ids=lambda check: check.__name__,
)
def test_the_next_layer_takes_the_code_and_counts_for_itself(check: Callable[[], None], tmp_path: Path) -> None:
    code = f"import test_warm_start; test_warm_start.{check.__name__}(); print('checked')"
    folders = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-W", "ignore", "-c", code]
    run = subprocess.run(command, cwd=Path(__file__).parent, env=os.environ | folders, capture_output=True, text=True)
    assert run.stdout.split() == ["checked"], run.stderr[-3000:]


def test_equal_gpus_share_an_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's text of a GPU has its serial number: no other GPU of the node met the same key."""

    class Properties(SimpleNamespace):
        def __str__(self) -> str:
            return repr(self)

    def key(**other: Any) -> str:
        known = {"name": "NVIDIA H100", "major": 9, "minor": 0, "total_memory": 80 << 30, "multi_processor_count": 132}
        found = Properties(**known | {"uuid": "GPU-1", "pci_bus_id": 1} | other)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)
        return compiled.machine(torch.device("cuda"))

    assert key() == key(uuid="GPU-2", pci_bus_id=2)
    assert len({key(), key(total_memory=40 << 30), key(multi_processor_count=114), key(name="NVIDIA H200")}) == 4
