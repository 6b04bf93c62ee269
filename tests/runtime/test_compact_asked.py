"""Which allocator is in force: what the options of models in one process ask for, and what each is told."""

from __future__ import annotations

import sys
import warnings
from functools import cache

import pytest
import torch
from torch import nn

import fxprec
from fxprec.errors import ConfigError, FallbackError, FxprecWarning
from fxprec.runtime.cpu import compact

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="the compact allocator is written for Linux"),
    pytest.mark.usefixtures("region"),
]


def run(**options: object) -> tuple[torch.Tensor, fxprec.Backend]:
    """Return the gradients of one step, and the backend."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
    backend = fxprec.Backend(fxprec.Config.from_options({"recipe": "fp8", "lowering": "eager", **options}))
    torch.compile(model, backend=backend)(torch.randn(128, 64)).square().mean().backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]), backend


def trained(**options: object) -> torch.Tensor:
    return run(**options)[0]


def test_it_is_in_force_where_asked_for_and_changes_no_bit(region: int) -> None:
    compact.uninstall()
    plain = trained()
    assert compact.sizes().live == region
    assert torch.equal(trained(allocator="compact"), plain)
    held = torch.empty(64 * 1024, dtype=torch.uint8)
    assert compact.sizes().live >= region + held.nbytes


ASKED = [{"allocator": "compact"}, {"peak_budget": "100%"}]


def test_a_process_keeps_its_allocator_unasked(region: int) -> None:
    compact.uninstall()
    trained()
    held = torch.empty(64 * 1024, dtype=torch.uint8)
    assert compact.sizes().live == region
    trained(peak_budget="100%", allocator="system")
    assert not compact.is_installed()
    del held


@pytest.mark.parametrize("options", ASKED)
def test_a_model_that_asks_brings_it_and_says_so_once(region: int, options: dict[str, object]) -> None:
    compact.uninstall()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        said = events(**options)
        again = events(**options)
    held = torch.empty(64 * 1024, dtype=torch.uint8)
    assert compact.sizes().live >= region + held.nbytes
    (detail,) = said
    assert detail.startswith("allocates this process's new CPU tensors of 16 KiB or more")
    assert detail.endswith("(for peak_budget)") == ("peak_budget" in options)
    assert not again


def events(**options: object) -> list[str]:
    return [e.detail for e in run(**options)[1].events if e.kind == "allocator"]


@pytest.mark.parametrize("options", ASKED)
def test_a_model_that_comes_too_late_for_torchs_own_is_told(region: int, options: dict[str, object]) -> None:
    trained(**options)
    with pytest.warns(
        FxprecWarning, match=r"allocator='system': has no effect: an earlier model .* has already installed the compact"
    ):
        trained(allocator="system")
    with warnings.catch_warnings():
        warnings.simplefilter("error", FxprecWarning)
        trained()  # nobody asked for torch's own


def test_a_model_that_takes_torchs_own_from_another_says_so() -> None:
    compact.uninstall()
    trained(allocator="system")
    with pytest.warns(
        FxprecWarning,
        match=r"allocator='compact': from now on also allocates the tensors of a model with allocator='system'",
    ):
        trained(allocator="compact")


def test_strict_refuses_what_is_not_in_force() -> None:
    with pytest.raises(FallbackError, match=r"has no effect: an earlier model .* has already installed the compact"):
        trained(allocator="system", strict=True)


def test_why_not_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        raise RuntimeError("no compiler\nfound")

    compact.uninstall()
    monkeypatch.setattr(compact, "_library", cache(fails))
    for options in ASKED:
        with pytest.warns(
            FxprecWarning, match=r"allocator='compact'.*did not compile \(no compiler\); resident memory may"
        ):
            trained(**options)
    with warnings.catch_warnings():
        warnings.simplefilter("error", FxprecWarning)
        trained()  # nobody asked for it
    monkeypatch.undo()


def test_a_misspelt_allocator_teaches() -> None:
    with pytest.raises(ConfigError, match=r"unknown allocator 'compct'.*'compact', 'system', or None"):
        fxprec.Config(allocator="compct")  # type: ignore[arg-type]
