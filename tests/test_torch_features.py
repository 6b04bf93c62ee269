"""torch's features that meet a compiled model from outside: gradients are those of the uncompiled model."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from backend_helpers import FINE_TOLERANCE, eager_backend, relative_error
from models import Apply
from torch import Tensor, nn
from torch._dynamo.exc import Unsupported
from torch.autograd.graph import save_on_cpu
from torch.nn.utils import parametrizations

Trained = Callable[[nn.Module], Tensor]


def block() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))


def batch() -> Tensor:
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(1))


def saved_on_the_host(net: nn.Module) -> Tensor:
    with save_on_cpu():
        loss = net(batch()).square().mean()
    loss.backward()
    return loss


def through_compiled_autograd(net: nn.Module) -> Tensor:
    loss = net(batch()).square().mean()
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager")):
        loss.backward()
    return loss


def batched_gradients(net: nn.Module) -> Tensor:
    x = batch()[:2].requires_grad_()
    (found,) = torch.autograd.grad(net(x), x, torch.eye(32).view(32, 2, 16), is_grads_batched=True)
    return found


def of_some_parameters(net: nn.Module) -> Tensor:
    loss = net(batch()).square().mean()
    loss.backward(inputs=[next(net.parameters())])
    return loss


def hook_on_the_result(net: nn.Module) -> Tensor:
    y = net(batch())
    y.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3) + 1e-4)
    y.square().mean().backward()
    return y


def in_turns_with_inference(net: nn.Module) -> Tensor:
    with torch.inference_mode():
        before = net(batch()).clone()
    loss = net(batch()).square().mean()
    net(batch() * 100)
    loss.backward()
    return before


def written_result(net: nn.Module) -> Tensor:
    y = net(batch())
    y.add_(1)
    y.square().mean().backward()
    return y


def in_micro_batches_backwards(net: nn.Module) -> Tensor:
    losses = [net(batch() * k).square().mean() for k in (1, 2, 3)]
    for loss in reversed(losses):
        loss.backward()
    return losses[-1]


def weights_of_another_scale(net: nn.Module) -> Tensor:
    state = {name: 2 * value for name, value in net.state_dict().items()}
    net(batch()).sum().backward()
    net.zero_grad()
    net.load_state_dict(state, assign=True)
    return in_micro_batches_backwards(net)


FEATURES: list[Trained] = [
    saved_on_the_host,
    batched_gradients,
    of_some_parameters,
    hook_on_the_result,
    in_turns_with_inference,
    written_result,
    in_micro_batches_backwards,
    weights_of_another_scale,
]


@pytest.fixture(autouse=True)
def afresh() -> None:
    torch.compiler.reset()
    torch.manual_seed(0)


def found(model: nn.Module, net: nn.Module, use: Trained) -> dict[str, Tensor | None]:
    result = use(net).detach()
    return {"result": result, **{name: p.grad for name, p in model.named_parameters()}}


def agree(model: nn.Module, use: Trained) -> None:
    reference, backend = copy.deepcopy(model), eager_backend("packed")
    own = found(model, torch.compile(model, backend=backend), use)
    for name, wanted in found(reference, reference, use).items():
        given = own[name]
        assert (given is None) == (wanted is None), name
        if given is not None and wanted is not None:
            assert relative_error(given, wanted) < FINE_TOLERANCE, name
    assert backend.plans


@pytest.mark.parametrize("use", FEATURES)
def test_a_feature_beside_a_compiled_model(use: Trained) -> None:
    agree(block(), use)


def test_compiled_autograd() -> None:
    agree(block(), through_compiled_autograd)


def test_compiled_autograd_of_one_graph_is_refused_in_words() -> None:
    """fxprec's checks of a backward pass break its graph. Dynamo called them "a hook of fxprec" and said no remedy."""
    loss = torch.compile(block(), backend=eager_backend("packed"))(batch()).square().mean()
    whole = torch.compile(backend="aot_eager", fullgraph=True)
    with torch._dynamo.compiled_autograd._enable(whole), pytest.raises(Unsupported, match="without fullgraph=True"):
        loss.backward()


@pytest.mark.parametrize(
    "made", [parametrizations.weight_norm, parametrizations.spectral_norm, parametrizations.orthogonal]
)
def test_parametrized_weights(made: Callable[[nn.Module], nn.Module]) -> None:
    agree(nn.Sequential(made(nn.Linear(16, 16)), nn.GELU(), nn.Linear(16, 16)), in_micro_batches_backwards)


@pytest.mark.inductor
def test_what_inputs_make_comes_behind_them_although_a_token_of_effects_comes_before() -> None:
    """A table of scales stood before the placeholder that it is made from.

    An operator that checks its input: AOTAutograd orders such effects by tokens, made before the graph's inputs.
    """
    plain = nn.Sequential(nn.Linear(3, 3), Apply(lambda x: torch.linalg.inv(x.tanh() + 2 * torch.eye(3))))
    model = copy.deepcopy(plain)
    x = torch.randn(2, 3, 3)
    for net in (plain, torch.compile(model, backend="fxprec", options={"recipe": "fp8"})):
        net(x).square().sum().backward()
    for exact, found in zip(plain.parameters(), model.parameters(), strict=True):
        assert exact.grad is not None
        assert found.grad is not None
        assert relative_error(found.grad, exact.grad) < 0.1
