"""Pass keep-signs: a copy is on the side of a bound that its value is on, where backward compares the copy with it."""

from __future__ import annotations

import pytest
import torch
from models import Apply
from one_pass import run_pass
from torch import nn
from torch.nn import functional as F

from fxprec.ir.symbolic import Quantize, Rescale
from fxprec.kernels.host import Offload
from fxprec.numerics.formats import parse
from fxprec.passes.keep_signs import next_number
from tests.helpers import compiled, eager_backend

NAME = "keep-signs"
SMALLEST = 2.0**-9  # of e4m3fn
pytestmark = pytest.mark.filterwarnings("ignore::fxprec.FxprecWarning")


def between_linears(activation: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(16, 16), activation, nn.Linear(16, 16))


def guarded(activation: nn.Module, **options: object) -> list[object]:
    """What is stored in another way than by rounding alone: the bounds, those at a copy's scale last."""
    ran = run_pass(NAME, between_linears(activation), torch.randn(8, 16), recipe="fp8", low_ratio=1.0, **options)
    wheres = [node for node in ran.graph.nodes if node.target is torch.ops.aten.where.self]
    kept = [node.args[1] for node in wheres if node.name not in {old.name for old in ran.before.nodes}]
    constants = [node.args[1] for node in kept if node.target in CLAMPS]
    of_scales = [Rescale.of(node).g.args[1] for node in kept if Rescale.match(node) is not None]
    return constants + of_scales


CLAMPS = (torch.ops.aten.clamp_min.default, torch.ops.aten.clamp_max.default)


@pytest.mark.parametrize("activation", [nn.ReLU(), Apply(lambda x: F.leaky_relu(x) * x)], ids=["relu", "leaky relu"])
def test_what_is_compared_with_0_stays_above_it(activation):
    assert guarded(activation) == [SMALLEST]


def test_a_piece_of_what_is_stored_is_compared_like_the_whole():
    """Leaky ReLU's backward asks its operand, which is half of the stored result."""

    def gated(x):
        value, gate = x.chunk(2, -1)
        return torch.cat([F.leaky_relu(value) * gate, gate], -1)

    assert guarded(Apply(gated)) == [SMALLEST]


@pytest.mark.parametrize("activation", [nn.GELU(), nn.SiLU()], ids=["gelu", "silu"])
def test_other_copies_are_only_rounded(activation):
    assert guarded(activation) == []


def test_what_is_compared_with_another_bound_stays_beyond_it():
    assert guarded(nn.ReLU6()) == [5.5, SMALLEST], "below 6, and above 0 at the copy's scale"


def test_a_copy_that_waits_in_host_memory_keeps_its_signs(monkeypatch: pytest.MonkeyPatch):
    """Its decodes read what comes back, not the cast."""
    monkeypatch.setattr("fxprec.driver.graph.refuse_offload", lambda device, settings, given: None)  # a CPU will do
    model = nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.ReLU())))
    options = {"recipe": "fp8", "low_ratio": 1.0, "peak_budget": "70%", "ways": ("narrow", "offload")}
    ran = run_pass(NAME, model, torch.randn(512, 64), **options)
    casts = [(q, Quantize.of(q)) for q in Quantize.nodes(ran.graph)]
    moved = [cast for q, cast in casts if cast.format == "e4m3fn" and any(Offload.match(user) for user in q.users)]
    assert moved
    assert all(cast.x.target is torch.ops.aten.where.self for cast in moved)


BOUNDED = {
    "relu6": F.relu6,
    "hardtanh": lambda x: F.hardtanh(x, -0.3, 0.7),  # neither is a number of e4m3fn
    "clamp": lambda x: x.clamp(-2.0, 3.1),
    "threshold": lambda x: F.threshold(x, 1.9, 0.0),
    "hardshrink": lambda x: F.hardshrink(x, 0.9),
}


@pytest.mark.parametrize("recipe", ["fp8", "fp16", "bf16"])
@pytest.mark.parametrize("name", BOUNDED)
def test_no_gradient_is_masked_that_was_not_nor_the_other_way(name, recipe):
    """Numbers are far denser than those that are stored: most round, some across a bound if they may."""
    x = torch.linspace(-8, 8, 1 << 18).view(512, 512)
    stored, wanted = x.clone().requires_grad_(), x.clone().requires_grad_()

    def function(x):
        return BOUNDED[name](x * 1.01).square()

    for run, leaf in ((compiled(function, eager_backend(recipe, low_ratio=1.0)), stored), (function, wanted)):
        run(leaf).sum().backward()
    is_stored = x.abs() > 2**-8  # of less the square is 0 in e4m3fn
    assert torch.equal((stored.grad == 0)[is_stored], (wanted.grad == 0)[is_stored])
    assert (stored.grad - wanted.grad).norm() <= 2**-4 * wanted.grad.norm()


@pytest.mark.parametrize(("largest", "outliers", "exponent"), [(3.9, 3.9, 4), (7.9, 900.0, -3)])
@pytest.mark.parametrize("name", ["hardtanh", "threshold"])
def test_no_gradient_is_masked_at_other_scales(name, largest, outliers, exponent):
    """The copy that the square's backward reads is compared too."""
    x = torch.linspace(-largest, largest, 1 << 18).view(512, 512)
    x[-1] *= outliers / largest
    stored, wanted = x.clone().requires_grad_(), x.clone().requires_grad_()

    def function(x):
        x = x * 1.01
        return BOUNDED[name](x) + 1e-5 * x.square()

    ours = compiled(function, backend := eager_backend("fp8", low_ratio=1.0))
    for _ in range(4):
        stored.grad = None
        ours(stored).sum().backward()
    function(wanted).sum().backward()
    assert [row["scale_exponent"] for row in backend.stats() if row["format"] == "e4m3fn"] == [exponent]
    assert torch.equal(stored.grad > 0.5, wanted.grad > 0.5)


@pytest.mark.parametrize("name", ["e4m3fn", "e5m2"])
def test_the_number_beside_a_bound(name):
    fmt = parse(name)
    codes = torch.arange(256, dtype=torch.uint8).view(fmt.torch_dtype).double()
    numbers = sorted(set(codes[codes.isfinite()].tolist()))
    for bound in (*numbers[1:-1], 0.3, -0.3, 5.9, 1e-4, -2.6):
        assert next_number(fmt, bound, upwards=True) == min(n for n in numbers if n > bound)
        assert next_number(fmt, bound, upwards=False) == max(n for n in numbers if n < bound)


def test_bf16_has_exponents_enough_for_signs():
    ran = run_pass(NAME, between_linears(nn.ReLU()), torch.randn(8, 16), recipe="bf16")
    assert ran.is_unchanged()


def _distance(x):
    return (x - 0.5 * x.roll(1, 0)).abs()


@pytest.mark.parametrize("activation", [F.relu, F.leaky_relu, _distance], ids=["relu", "leaky relu", "l1"])
def test_small_activations_keep_their_gradients(activation):
    """Of rms 2^-8 a fifth is 0 in e4m3fn."""
    x, weight = torch.randn(64, 32) * 2.0**-9, torch.randn(32, 32)
    stored, wanted = x.clone().requires_grad_(), x.clone().requires_grad_()

    def function(x):
        return activation(2 * x) @ weight

    for run, leaf in ((compiled(function, eager_backend("fp8", low_ratio=1.0)), stored), (function, wanted)):
        run(leaf).sum().backward()
    assert F.cosine_similarity(stored.grad.flatten(), wanted.grad.flatten(), dim=0) > 0.999
