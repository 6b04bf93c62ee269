"""What an input or an output of a joint graph is, told by AOTAutograd's descriptors."""

from __future__ import annotations

import torch
from one_pass import run_pass
from torch import nn

from fxprec.passes.analysis import descriptors


def test_a_training_graphs_border() -> None:
    model = nn.Linear(4, 3)
    joint = run_pass("group-tensors", model, torch.randn(5, 4)).work.joint
    inputs = {n: n.meta["desc"] for n in joint.placeholders}
    assert {descriptors.captured_index(d) for d in inputs.values()} >= {0, 1, 2}
    outputs = joint.output.meta["desc"]
    assert descriptors.is_forward_output(outputs[0])
    of = [descriptors.gradient_of(d) for d in outputs]
    keys = {descriptors.key(d) for d in inputs.values()}
    assert of[0] is None, "the model's result"
    assert {k for k in of if k is not None} <= keys
    assert not any(descriptors.is_forward_output(d) for d, k in zip(outputs, of, strict=True) if k is not None)


class PlainAOTInput:
    idx = 3


class Part:
    """An inner tensor of a subclass."""

    def __init__(self, base: object, attr: str) -> None:
        self.base, self.attr = base, attr


class SyntheticBaseAOTInput:
    def __init__(self, base_of: object) -> None:
        self.base_of = base_of


class GradAOTOutput:
    def __init__(self, grad_of: object) -> None:
        self.grad_of = grad_of


def test_an_inner_tensor_belongs_to_the_whole_by_its_path() -> None:
    whole = PlainAOTInput()
    inner = Part(Part(whole, "outer"), "inner")
    assert descriptors.key(inner) == (whole, ("outer", "inner"))
    assert descriptors.kind(inner) == "PlainAOTInput"
    assert descriptors.captured_index(inner) == 3
    assert descriptors.gradient_of(Part(GradAOTOutput(whole), "inner")) == (whole, ("inner",))


def test_a_base_that_inputs_share_is_the_first_of_them_and_a_token_is_none() -> None:
    assert descriptors.captured_index(SyntheticBaseAOTInput(PlainAOTInput())) == 3
    assert descriptors.captured_index(object()) is None
    assert not descriptors.is_forward_output(None)
    assert not descriptors.is_forward_output(GradAOTOutput(PlainAOTInput()))
