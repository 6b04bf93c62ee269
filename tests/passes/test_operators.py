"""Operators recovered from the decomposed joint graph: one for each thing the model called."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))

from helpers import compiled, eager_backend, recorded_works
from models import Parts

from fxprec.passes.analysis.inputs import module_path


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.GELU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.layers(self.norm(x))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4)
        self.block = Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.bn(self.conv(x)))
        x = self.block(x.flatten(2).transpose(1, 2)[..., :8].reshape(-1, 8))
        q = x.view(2, 2, -1, 4)
        x = F.scaled_dot_product_attention(q, q * 2, q).reshape(-1, 8)
        return F.softmax(x, dim=-1)


def operators(*, training: bool = True):
    torch.manual_seed(0)
    model = Model().train(training)
    images = torch.randn(2, 1, 6, 10)
    with recorded_works() as works:
        function = compiled(model, eager_backend(low_ratio=0.5))
        if training:
            function(images).sum().backward()
        else:
            with torch.no_grad():
                function(images)
    (work,) = works
    return work.operators


def counted(found) -> list[tuple[str, str]]:
    return [(op.aten.removeprefix("aten."), op.module) for op in found.all if not op.is_view and op.outputs]


# Four channels are narrowed to 8 columns before the block by a slice and a copy, which are views and not counted.
CALLED = [
    ("convolution", "conv"),
    ("NORM", "bn"),
    ("relu", ""),
    ("native_layer_norm", "block.norm"),
    ("addmm", "block.layers.0"),
    ("gelu", "block.layers.1"),
    ("add", "block"),
    ("mul", ""),
    ("ATTENTION", ""),
    ("_softmax", ""),
]


def normalised(rows: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Give one name to what torch versions call differently."""

    def name(aten: str) -> str:
        return "NORM" if "batch_norm" in aten else "ATTENTION" if "scaled_dot_product" in aten else aten

    return [(name(aten), module) for aten, module in rows]


def test_every_call_is_one_operator_with_its_module_in_training():
    assert normalised(counted(operators())) == CALLED


def test_inference_graphs_give_the_same_operators():
    found = operators(training=False)
    assert normalised(counted(found)) == CALLED
    assert not any(op.backward for op in found.all)


def test_an_operator_that_begins_with_a_view_is_no_view():
    images = torch.randn(2, 2, 4, 4, requires_grad=True)
    layers = {"conv": nn.Conv2d(2, 4, 1), "norm": nn.GroupNorm(2, 4)}
    model = Parts(lambda m, x: F.log_softmax(m.norm(m.conv(x)).relu(), dim=1), **layers)
    with recorded_works() as works:
        compiled(model.to(memory_format=torch.channels_last), eager_backend())(images).sum().backward()
    (work,) = works
    names = [aten.removeprefix("native_") for aten, _ in counted(work.operators)]
    assert names == ["convolution", "group_norm", "relu", "_log_softmax"]
    kinds = [(s.kind, s.module) for s in work.plan.sites if s.shape == "2 x 4 x 4 x 4"]
    assert kinds.count(("grad_output", "conv")) == kinds.count(("output", "norm")) == 1


def test_source_lines_point_into_the_model():
    lines, start = inspect.getsourcelines(Model)
    here = Path(__file__).name
    by_name = {name: op.source for op, (name, _) in zip(_counted_ops(), normalised(counted(operators())), strict=True)}
    relu = start + next(i for i, line in enumerate(lines) if "F.relu" in line)
    softmax = start + next(i for i, line in enumerate(lines) if "F.softmax" in line)
    assert by_name["relu"] == f"{here}:{relu}"
    assert by_name["_softmax"] == f"{here}:{softmax}"


def _counted_ops():
    return [op for op in operators().all if not op.is_view and op.outputs]


def test_gemms_and_backward_nodes_are_paired():
    found = operators()
    gemms = [op for op in found.all if op.is_gemm]
    assert [op.module for op in gemms] == ["conv", "block.layers.0", ""]
    for op in gemms:
        targets = {str(n.target) for n in op.backward}
        assert targets & {"aten.convolution_backward.default", "aten.mm.default"} or any(
            "scaled_dot_product" in t and "backward" in t for t in targets
        ), targets


def test_accumulations_are_the_engines_and_not_the_models():
    found = operators()
    # x of Block has two readers, q of the attention three: one and two sums.
    assert len(found.accumulations) == 3
    assert all("add" in str(n.target) for n in found.accumulations)
    assert not found.accumulations & {n for op in found.all for n in op.nodes}


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("L['self']._modules['layer1']._modules['0']", "layer1.0"),
        ("L['self'].layer1[0]", "layer1.0"),
        ("L['args'][0]._modules['layer1']", "layer1"),  # a wrapper around forward, as Accelerate's mixed precision
        ("L['args'][0]", ""),
        ("L['models'][1]._modules['head']", "1.head"),
        ("L['copy'].__dict__['_modules']['layer1']._modules['0']", "layer1.0"),  # copied in a compiled function
    ],
)
def test_modules_are_named_as_the_user_writes_them(path: str, name: str) -> None:
    assert module_path(path) == name
