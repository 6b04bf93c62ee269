"""A weight changed between forward and backward is an error, as in autograd.

What a model returned may be changed where backward reads a copy of it. Autograd keeps no copy and raises an error.
"""

from __future__ import annotations

import pytest
import torch
from backend_helpers import Cnn, eager_backend, mlp
from models import Parts
from torch import Tensor, nn

import fxprec
from fxprec.errors import ModifiedInPlaceError

pytestmark = pytest.mark.filterwarnings("ignore::fxprec.FxprecWarning")


def compiled(model: nn.Module, storage: str = "native") -> nn.Module:
    recipe = "hfp8" if storage == "simulate" else "fp8"
    return torch.compile(model, backend=eager_backend(storage, recipe=recipe, low_ratio=1.0))


def loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().sum()


OURS = r"^parameter 2\.weight was modified in place after the forward pass \(version 1, now 2\).*call backward\(\) "
AUTOGRADS = r"modified by an inplace operation: \[torch\.FloatTensor \[\d+, \d+\]\] is at version 2; expected version 1"


@pytest.mark.parametrize(
    ("storage", "words"),
    [
        ("simulate", OURS),
        ("native", AUTOGRADS),  # backward reads the parameter itself, which autograd looks after
        ("packed", AUTOGRADS),
    ],
)
def test_an_optimizer_step_before_backward_is_an_error(storage: str, words: str) -> None:
    model, x = mlp(), torch.randn(8, 16)
    network, optimizer = compiled(model, storage), torch.optim.SGD(model.parameters(), lr=0.1)
    loss(network, x).backward()
    late = loss(network, x)
    optimizer.step()
    with pytest.raises(RuntimeError, match=words) as caught:
        late.backward()
    assert isinstance(caught.value, ModifiedInPlaceError) is (words == OURS)
    assert "\n" not in str(caught.value)
    loss(network, x).backward()  # the next step is none the worse


def test_an_input_written_before_backward_is_an_error() -> None:
    model, x = mlp(), torch.randn(8, 16)
    late = loss(compiled(model), x)
    x.zero_()
    with pytest.raises(ModifiedInPlaceError, match=r"input .* was modified in place"):
        late.backward()


@pytest.mark.parametrize("storage", ["simulate", "native", "packed"])
def test_what_the_model_copied_may_be_written(storage: str) -> None:
    """Found by ParityBench (MemoryMoCo): the copy was taken out as one of nothing, and backward read what is written."""
    model = Parts(lambda m, x: (x @ m.memory.clone().t()).sigmoid(), memory=nn.Buffer(torch.rand(8, 16)))
    x = torch.rand(4, 16, requires_grad=True)
    network = compiled(model, storage)
    (wanted,) = torch.autograd.grad(loss(network, x), x)
    late = loss(network, x)
    model.memory.zero_()
    (found,) = torch.autograd.grad(late, x)
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-6)


def test_a_training_loop_raises_no_alarm() -> None:
    """Batch norm writes its statistics, two micro-batches are in flight, the optimizer steps, an average follows."""
    model, x = Cnn(), torch.randn(4, 3, 6, 6)
    network, average = compiled(model), torch.optim.swa_utils.AveragedModel(model)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        losses = [loss(network, x), loss(network, x)]
        for value in losses:
            value.backward(retain_graph=True)
        for value in losses:
            value.backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(model)
        with torch.no_grad():
            for p, q in zip(model.parameters(), average.parameters(), strict=False):
                p.lerp_(q, 0.1)


def test_a_weight_that_backward_does_not_read_may_change() -> None:
    """The first layer's weight: no gradient goes to the input."""
    model, x = mlp(), torch.randn(8, 16)
    late = loss(compiled(model), x)
    with torch.no_grad():
        model[0].weight.zero_()
        model[4].bias.zero_()
    late.backward()
    assert fxprec.ModifiedInPlaceError is ModifiedInPlaceError


@pytest.mark.parametrize("storage", ["native", "packed"])  # "simulate" stores no copies
def test_returned_indices_may_be_overwritten_since_backward_reads_a_copy(storage: str) -> None:
    """PyTorch's test of pooling expects an error here; Inductor's kernel finds the index 4 out of bounds."""
    x = torch.arange(1.0, 17.0).view(2, 2, 4).requires_grad_()
    out, indices = compiled(nn.MaxPool1d(2, return_indices=True), storage)(x)
    indices.add_(1)
    out.sum().backward()
    assert x.grad is not None
    assert x.grad.flatten().tolist() == [0.0, 1.0] * 8
