"""Recipe ``bf16-pure``: weights, activations, gradients and optimizer state in 16 bits, and nothing wider beside."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from helpers import compiled, eager_backend
from models import Apply, Residual
from torch import Tensor, nn

import fxprec
from examples.models.char_transformer import CharTransformer
from fxprec import ConfigError, Recipe

pytestmark = [
    pytest.mark.cpu_dependent,
]
VOCAB, CONTEXT = 32, 24
NEW_ENOUGH = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 12)


def batch(step: int) -> Tensor:
    """Sequences that count upwards from random starts: learnable, and never the same twice."""
    starts = torch.randint(VOCAB, (8, 1), generator=torch.Generator().manual_seed(step))
    return (starts + torch.arange(CONTEXT + 1)) % VOCAB


def train(dtype: torch.dtype, recipe: str, steps: int) -> tuple[list[float], dict[torch.dtype, int], object]:
    """Losses, bytes saved for backward by dtype in the last step, and the optimizer."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = CharTransformer(vocab=VOCAB, context=CONTEXT, layers=1, width=32, heads=2).to(dtype)
    function = compiled(model, eager_backend(recipe))
    update = "kahan" if dtype == torch.bfloat16 else "nearest"
    optimizer = fxprec.optim.AdamW(model.parameters(), 1e-3, betas=(0.9, 0.99), update=update)
    losses = []
    for step in range(steps):
        saved: dict[int, Tensor] = {}

        def keep(t: Tensor, saved: dict[int, Tensor] = saved) -> Tensor:
            saved[t.untyped_storage().data_ptr()] = t
            return t

        codes = batch(step)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            logits = function(codes[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), codes[:, 1:].flatten())
        loss.backward()
        assert {p.grad.dtype for p in model.parameters()} == {dtype}
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    found: dict[torch.dtype, int] = {}
    for t in saved.values():
        found[t.dtype] = found.get(t.dtype, 0) + t.untyped_storage().nbytes()
    return losses, found, optimizer


def test_a_run_in_16_bits_learns_as_fp32_does_and_holds_nothing_wider() -> None:
    pure, saved, optimizer = train(torch.bfloat16, "bf16-pure", 40)
    full, _, _ = train(torch.float32, "fp32", 40)
    assert sum(pure[-5:]) / sum(full[-5:]) == pytest.approx(1, abs=0.03)
    assert sum(full[-5:]) < 0.6 * sum(full[:5]), "there was something to learn"
    rows_only = saved.pop(torch.float32, 0)
    if not NEW_ENOUGH:
        pytest.xfail("where a CPU has no bf16 GEMM, torch 2.11 also keeps attention's float32 result")
    of_norms, of_softmax = 3 * 2, 2  # mean and scale of three norms; the sums of two heads
    rows = 8 * CONTEXT * 4 * (of_norms + of_softmax)
    assert 0 < rows_only <= rows, "float32 is for row statistics of norms and softmax"
    state = [t for s in optimizer.state.values() for t in s.values() if isinstance(t, Tensor) and t.dim()]
    assert {t.dtype for t in state} == {torch.bfloat16}


def test_float32_weights_are_refused_by_name() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)).bfloat16()
    model[1].float()
    words = r"recipe 'bf16-pure' keeps weights in torch.bfloat16, and 1.weight is torch.float32; call model.to\("
    with pytest.raises(ConfigError, match=words):
        compiled(model, eager_backend("bf16-pure"))(torch.randn(2, 4, dtype=torch.bfloat16))


def test_a_pure_recipe_of_ones_own_needs_16_bits() -> None:
    assert Recipe(hi="fp16", lo_forward="fp16", lo_backward="fp16", pure=True).pure
    with pytest.raises(
        ConfigError, match=r"recipe\.pure needs a 16-bit hi format that torch has a dtype for, not 1-6-9"
    ):
        Recipe(hi="1-6-9", lo_forward="1-4-3", lo_backward="1-5-2", pure=True)


@pytest.mark.inductor
def test_every_operators_result_is_rounded_in_the_middle_of_a_kernel_too() -> None:
    layers = (Residual(nn.Linear(16, 16), nn.GELU()), Apply(lambda x: x * torch.sigmoid(x) + x))
    model, x = nn.Sequential(*layers).bfloat16(), torch.randn(64, 16).bfloat16()
    wanted = model(x)
    wanted.float().square().mean().backward()
    gradient = model[0][0].weight.grad.clone()
    model.zero_grad()
    found = torch.compile(model, backend="fxprec", options={"recipe": "bf16-pure"})(x)
    found.float().square().mean().backward()
    assert torch.equal(found, wanted)
    error = (model[0][0].weight.grad - gradient).float().norm() / gradient.float().norm()
    assert error < 2e-3, "backward's operators are Inductor's own decompositions"
