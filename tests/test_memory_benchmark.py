"""The memory benchmark's own parts: what it offloads comes back, and its picture is one."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import torch
from torch import Tensor, nn

from benchmarks.memory.networks import NAMES, Checkpointed, network
from benchmarks.memory.picture import draw
from benchmarks.memory.sides import SIDES, Offload, offloading


def test_what_is_offloaded_comes_back(tmp_path: Path) -> None:
    offload = Offload(frozenset(), tmp_path)
    for x in (torch.randn(3, 4).t(), torch.randn(5).bfloat16(), torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)):  # fmt: skip
        found = offload.unpack(offload.pack(x))
        assert torch.equal(found, x)
        assert found.stride() == x.stride()
    assert not list(tmp_path.iterdir())


def test_gradients_of_offloaded_tensors_are_the_same_and_parameters_stay() -> None:
    model, x = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)), torch.randn(3, 4)

    def gradients() -> tuple[Tensor, ...]:
        return torch.autograd.grad(model(x).square().sum(), list(model.parameters()))

    wanted = gradients()
    with offloading(frozenset(p.untyped_storage().data_ptr() for p in model.parameters())):
        found = gradients()
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_each_network_has_blocks_to_checkpoint() -> None:
    blocks = {
        name: sum(isinstance(m, Checkpointed) for m in network(name).model(checkpointed=True).modules())
        for name in NAMES
    }
    assert blocks == {"transformer": 6, "resnet18": 8, "unet": 7}


def test_the_picture_has_a_panel_a_network_and_a_point_a_side() -> None:
    rows = [
        {"network": name, "shape": "a & b", "side": side, "peak_mb": 10.0 + i, "step_ms": 5.0 * (i + 1)}
        for name in ("transformer", "unet")
        for i, side in enumerate(SIDES)
    ]
    failed = {"network": "unet", "side": "autocast", "failed": "RuntimeError: no"}
    picture = ElementTree.fromstring(draw([*rows, failed]))
    assert len(picture.findall(".//{*}circle")) == 2 * len(SIDES)
    texts = [text.text for text in picture.findall(".//{*}text")]
    assert texts.count("fxprec fp8, checkpointed") == 2
    assert "unet: a & b" in texts
