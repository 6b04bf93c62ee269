"""Versions of torch and Triton: all that are known pass in silence, newer ones with a line."""

import tomllib
import warnings
from pathlib import Path

import pytest
import torch
import triton

import fxprec
from fxprec import FxprecWarning, compat

NEW_TORCH = (
    "torch 2.16.0+cu140 is newer than any this fxprec was tried with (2.11 to 2.15); where something fails, install a "
    "newer fxprec or torch<2.16"
)
NEW_TRITON = (
    "triton 3.10.1 is newer than any this fxprec was tried with (3.6 to 3.9); where something fails, install a newer "
    "fxprec or triton<3.10"
)


def losses_warned_of(strict: bool) -> tuple[fxprec.Backend, list[str]]:
    """Train a step, twice, and return the backend and what was said."""
    backend = fxprec.Backend(fxprec.Config(recipe="fp8", lowering="eager", strict=strict))
    model = torch.compile(torch.nn.Linear(8, 8), backend=backend)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for rows in (4, 6):
            model(torch.ones(rows, 8)).sum().backward()
    return backend, [str(w.message) for w in caught if issubclass(w.category, FxprecWarning)]


@pytest.mark.parametrize("strict", [False, True])
def test_newer_versions_are_told_once_and_used(strict: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.16.0+cu140")
    monkeypatch.setattr(triton, "__version__", "3.10.1")
    backend, said = losses_warned_of(strict)
    assert said == [NEW_TORCH, NEW_TRITON]
    told = [(e.kind, e.detail) for e in backend.events if e.kind != "scale"]
    assert told == [("untried", NEW_TORCH), ("untried", NEW_TRITON)]
    assert backend.plans


@pytest.mark.parametrize("torch_version", ["2.11.0", "2.13.0+cpu", "2.15.2", "2.15.0a0+git123"])
def test_known_versions_pass_in_silence(torch_version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", torch_version)
    assert compat.newer_than_tried() == []


def test_installing_fxprec_leaves_a_newer_torch_alone() -> None:
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = [d.partition(";")[0] for d in project["dependencies"] if d.startswith(("torch", "triton"))]
    assert wanted == ["torch>=2.11", "triton>=3.6"]
