"""A default device that is not the model's changes nothing: each tensor that fxprec makes names its device."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils import _device

import fxprec

ROOT = Path(__file__).parents[1]
ROOMS = ("fxprec", "passes", "runtime")
USERS = ("fxprec/demo/", "fxprec/gpu_check/", "fxprec/passes/", "fxprec/runtime/")
"""A demo's model follows the default device, as a user's does; gpu-check's processes have none; the others are links."""
CONSTRUCTORS = {f.__name__ for f in _device._device_constructors()}


def without_device(text: str) -> Iterator[tuple[int, str]]:
    """Yield line and name of calls of torch's constructors that follow the default device."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("torch."):
            name = ast.unparse(node.func).removeprefix("torch.")
            if name in CONSTRUCTORS and not any(word.arg in ("device", None) for word in node.keywords):
                yield node.lineno, name


def test_every_tensor_names_its_device() -> None:
    found = list[str]()
    for path in sorted(p for room in ROOMS for p in (ROOT / room).rglob("*.py")):
        place = path.relative_to(ROOT).as_posix()
        if not place.startswith(USERS):
            found += [
                f"{place}:{line}: torch.{name}" for line, name in without_device(path.read_text(encoding="utf-8"))
            ]
    assert not found


def test_a_call_without_a_device_is_seen() -> None:
    text = "torch.zeros(3)\ntorch.zeros(3, device=x.device)\ntorch.tensor([1], **how)\ny.new_zeros(3)\ntorch.arange(2)"
    assert list(without_device(text)) == [(1, "zeros"), (5, "arange")]


def trained(steps: int, **options: object) -> tuple[list[torch.Tensor], fxprec.Backend]:
    """Return the gradients of some steps. In the third a tensor is promoted: it overflows without a scale, too."""
    torch.compiler.reset()
    generator = torch.Generator("cpu").manual_seed(0)
    layers = nn.Linear(32, 64, device="cpu"), nn.Linear(64, 8, device="cpu")
    model = nn.Sequential(layers[0], nn.GELU(), layers[1])
    for p in model.parameters():
        nn.init.normal_(p, 0, 0.1, generator=generator)
    backend = fxprec.Backend(fxprec.Config.from_options({"recipe": "fp8", "lowering": "eager", **options}))
    compiled = torch.compile(model, backend=backend)
    for i in range(steps):
        x = torch.randn(16, 32, generator=generator, device="cpu") * (1e6 if i else 1)
        compiled(x).square().mean().backward()
    found = [p.grad for p in model.parameters() if p.grad is not None]
    with torch.no_grad():
        found.append(compiled(torch.randn(16, 32, generator=generator, device="cpu")))
    return found, backend


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"storage": "packed", "recipe": "hfp8"},
        {"storage": "simulate"},
        {"peak_budget": "100%", "allocator": "system"},
        {"policy": "exact"},
    ],
    ids=str,
)
@pytest.mark.parametrize("how", ["default", "context"])
@pytest.mark.filterwarnings("ignore::fxprec.FxprecWarning")
def test_training_beside_another_default_device(options: dict[str, object], how: str) -> None:
    wanted, _ = trained(4, **options)
    if how == "default":
        torch.set_default_device("meta")
        try:
            found, backend = trained(4, **options)
        finally:
            torch.set_default_device(None)
    else:
        with torch.device("meta"):
            found, backend = trained(4, **options)
    assert backend.stats()
    assert {x.device.type for x in found} == {"cpu"}
    for a, b in zip(found, wanted, strict=True):
        assert torch.equal(a, b)


@pytest.mark.filterwarnings("ignore::fxprec.FxprecWarning")
def test_a_saved_state_is_taken_up_beside_another_default_device() -> None:
    _, backend = trained(3)
    with torch.device("meta"):
        _, again = trained(1)
        again.load_state_dict(backend.state_dict())
    assert [plan.promoted for plan in again.plans] == [plan.promoted for plan in backend.plans] != [()]
    assert [c.step for c in again.controllers] == [c.step for c in backend.controllers]


@pytest.mark.parametrize(("name", "options"), [("SGD", {"momentum": 0.9}), ("AdamW", {"betas": (0.9, 0.997)})])
def test_optimizers_beside_another_default_device(name: str, options: dict[str, object]) -> None:
    def stepped() -> torch.Tensor:
        weight = nn.Parameter(torch.ones(64, 64, dtype=torch.bfloat16, device="cpu"))
        optimizer = getattr(fxprec.optim, name)([weight], lr=0.1, **options)
        for _ in range(2):
            weight.grad = torch.full_like(weight, 0.5)
            optimizer.step()
        return weight.detach()

    wanted = stepped()
    with torch.device("meta"):
        found = stepped()
    assert torch.equal(found, wanted)
