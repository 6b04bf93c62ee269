"""`fxprec.optim.Muon` beside torch.optim.Muon, and beside an AdamW inside of backward."""

from __future__ import annotations

import copy
import itertools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import one_rank
from optim.weights import same, through_file, values, weights
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.profiler import ProfilerActivity, profile

import fxprec
from benchmarks.memory.measure import peak_bytes
from fxprec import compat
from fxprec.demo.models import CharTransformer
from fxprec.errors import ConfigError, FxprecWarning, GradientError
from fxprec.passes.crossings.best_of import BestOf
from fxprec.runtime.optim.applied import AppliedGradient
from fxprec.runtime.optim.orthogonal import QUINTIC, orthogonalised

SHAPES = ((33, 17), (16, 64), (40, 40), (5, 1), (0, 3))
OPTIONS: list[dict[str, Any]] = [
    {},
    {"nesterov": False, "weight_decay": 0.0},
    {"momentum": 0.3, "ns_steps": 3},
    {"momentum": 0.5, "adjust_lr_fn": "match_rms_adamw", "lr": torch.tensor(0.013)},
    {"adjust_lr_fn": "original", "ns_coefficients": (15 / 8, -5 / 4, 3 / 8), "eps": 1e-3},
]


def train(opt: Any, first: int, steps: int) -> None:
    params = opt.param_groups[0]["params"]
    for step in range(first, first + steps):
        g = torch.Generator().manual_seed(step)
        for p in params:
            p.grad = torch.randn(p.shape, generator=g).to(p.dtype)
        opt.step()


@pytest.mark.parametrize("foreach", [None, False])
@pytest.mark.parametrize("options", OPTIONS)
def test_muon_is_torchs_bit_for_bit_over_20_steps(options: dict[str, Any], foreach: bool | None) -> None:
    opt = fxprec.optim.Muon(weights(shapes=SHAPES), update="nearest", foreach=foreach, **({"lr": 0.02} | options))
    theirs = torch.optim.Muon(weights(shapes=SHAPES), **({"lr": 0.02} | options))
    for each in (opt, theirs):
        train(each, 0, 20)
    assert same(values(opt), values(theirs))
    assert not same(values(opt), [p.detach() for p in weights(shapes=SHAPES)])


def test_states_load_into_torchs_and_back_and_training_goes_on_bit_for_bit() -> None:
    opt, theirs = (
        fxprec.optim.Muon(weights(shapes=SHAPES), lr=0.02, update="nearest"),
        torch.optim.Muon(weights(shapes=SHAPES), lr=0.02),
    )
    train(opt, 0, 3)
    theirs = torch.optim.Muon([nn.Parameter(p) for p in values(opt)], lr=1.0)
    theirs.load_state_dict(copy.deepcopy(opt.state_dict()))
    back = fxprec.optim.Muon([nn.Parameter(p) for p in values(opt)], lr=1.0, update="nearest")
    back.load_state_dict(copy.deepcopy(theirs.state_dict()))
    for each in (opt, theirs, back):
        train(each, 3, 3)
    assert same(values(theirs), values(opt))
    assert same(values(back), values(opt))


@pytest.mark.parametrize("held", [None, "float32", "bf16", "8bit", "4bit"])
@pytest.mark.parametrize("update", ["stochastic", "kahan"])
def test_the_kernel_and_the_reference_train_alike_and_resume(held: Any, update: Any) -> None:
    options = {"lr": 0.02, "update": update, "states": held, "max_norm": 3.0}
    fast, slow = (fxprec.optim.Muon(weights(torch.bfloat16, SHAPES), foreach=f, **options) for f in (None, False))
    for opt in (fast, slow):
        train(opt, 0, 6)
    assert same(values(fast), values(slow))
    resumed = fxprec.optim.Muon([nn.Parameter(p) for p in values(fast)], update=update)
    resumed.load_state_dict(through_file(fast.state_dict()))
    for opt in (fast, resumed):
        train(opt, 6, 4)
    assert same(values(fast), values(resumed))


@pytest.mark.parametrize("held", ["bf16", "8bit", "4bit"])
def test_bytes_of_states_in_few_bits_and_how_far_they_lead(held: Any) -> None:
    """Singular values near 0 are lifted to 1, so noise in the momentum shows. Exact steps lead 45 learning rates far."""
    params = [nn.Parameter(torch.zeros(64, 96)) for _ in range(2)]
    opts = [fxprec.optim.Muon([p], lr=0.02, update="nearest", states=f) for p, f in zip(params, ("float32", held), strict=True)]  # type: ignore[arg-type]  # fmt: skip
    for step in range(50):
        grad = torch.randn(64, 96, generator=torch.Generator().manual_seed(step)) + 0.3
        for p, opt in zip(params, opts, strict=True):
            p.grad = grad.clone()
            opt.step()
    exact, ours = (p.detach() for p in params)
    assert (ours - exact).norm() < {"bf16": 0.01, "8bit": 0.06, "4bit": 0.6}[held] * exact.norm()
    tensors = [t for t in opts[1].state[params[1]].values() if isinstance(t, Tensor) and t.dim()]
    assert sum(t.nbytes for t in tensors) == opts[1].state_bytes()
    assert opts[1].state_bytes() == {"bf16": 2, "8bit": 1 + 1 / 64, "4bit": 0.5 + 1 / 64}[held] * exact.numel()


WORKSPACE = """
import torch
from torch.profiler import ProfilerActivity, profile
import fxprec
from benchmarks.memory.measure import peak_bytes

torch.set_num_threads(1)
for shape in ((512, 512), (1024, 256), (256, 1024)):
    opt = fxprec.optim.Muon([torch.nn.Parameter(torch.zeros(shape))], lr=0.02)
    param = opt.param_groups[0]["params"][0]
    param.grad = torch.randn(shape)
    opt.step()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiled:
        opt.step()
    print(peak_bytes(profiled) / opt.workspace_of(param))
"""


def test_a_step_takes_the_workspace_that_a_plan_counts() -> None:
    """In a process of its own: beside other tests' threads and settings oneDNN holds a copy of an operand more."""
    done = subprocess.run(
        [sys.executable, "-c", WORKSPACE], capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2]
    )
    shares = [float(line) for line in done.stdout.split()]
    assert len(shares) == 3
    assert all(1 <= share < 1.1 for share in shares), "of oneDNN, 130 kB a thread"


def test_singular_values_come_near_1() -> None:
    x = torch.randn(48, 80, generator=torch.Generator().manual_seed(0)).bfloat16()
    found = torch.linalg.svdvals(orthogonalised(x.clone(), QUINTIC, 5, 1e-7).float())
    assert float(torch.linalg.svdvals(x.float()).max()) > 10
    assert 0.6 < float(found.min()) < float(found.max()) < 1.3


def test_a_rate_that_moves_nothing_is_told() -> None:
    p = nn.Parameter(torch.full((4, 4), 100.0).bfloat16())
    opt = fxprec.optim.Muon([p], lr=0.01, update="nearest")
    p.grad = torch.eye(4).bfloat16()
    with pytest.warns(FxprecWarning, match=r"lr=0\.01 can never move the largest weight of group 0: 100\.0"):
        opt.step()


def test_what_is_refused() -> None:
    words = r"parameter 'b' of group 0 has 1 dimensions, and Muon steps matrices; give it to an AdamW, and both .*'opt"
    with pytest.raises(ConfigError, match=words):
        fxprec.optim.Muon([("w", nn.Parameter(torch.ones(2, 2))), ("b", nn.Parameter(torch.ones(2)))])
    with one_rank():
        whole = DTensor.from_local(torch.zeros(6, 4), DeviceMesh("cpu", [0]), [Shard(0)])
        with pytest.raises(ConfigError, match="parameter 0 of group 0 is sharded, and Muon needs whole matrices"):
            fxprec.optim.Muon([nn.Parameter(whole)])
    with pytest.raises(ValueError, match="Adjust learning rate function unknown is not supported"):
        fxprec.optim.Muon(weights(shapes=SHAPES), adjust_lr_fn="unknown")  # type: ignore[arg-type]
    with pytest.raises(
        ConfigError,
        match=r"^optimizer is torch.optim.Muon, and backward can only run steps of fxprec.optim; give it fxprec.optim.Muon, or",
    ):
        fxprec.Backend(optimizer=[fxprec.optim.SGD(weights(shapes=SHAPES)), torch.optim.Muon(weights(shapes=SHAPES))])
    with pytest.raises(
        ConfigError, match=r"^optimizer is torch.optim.Adam, .*; give it an AdamW, Lion, Muon or SGD of fx"
    ):
        fxprec.Backend(optimizer=torch.optim.Adam(weights(shapes=SHAPES)))
    with pytest.raises(ConfigError, match="optimizer is list, and backward"):
        fxprec.Backend(optimizer=[])


# Beside an AdamW, inside of backward.


def network(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise((16, 32, 8)):
        layers += [nn.Linear(a, b), nn.LayerNorm(b), nn.GELU()]
    return nn.Sequential(*layers).to(dtype)


def pair(model: nn.Module, **own: Any) -> tuple[Any, Any]:
    """Return a Muon for matrices, and an AdamW for the rest."""
    named = list(model.named_parameters())
    muon = fxprec.optim.Muon([(n, p) for n, p in named if p.dim() == 2], lr=0.02, **own)
    return muon, fxprec.optim.AdamW([(n, p) for n, p in named if p.dim() != 2], lr=1e-2, betas=(0.9, 0.95), **own)


def compiled(model: nn.Module, optimizers: object, **options: Any) -> Any:
    given = {"recipe": "fp8", "lowering": "eager", **options}
    return torch.compile(model, backend="fxprec", options=given | ({"optimizer": optimizers} if optimizers else {}))


def trained(dtype: torch.dtype, *, in_backward: bool, lowering: str = "eager", **own: Any) -> Iterator[Tensor]:
    model = network(dtype)
    optimizers = pair(model, **own)
    run = compiled(model, optimizers if in_backward else None, lowering=lowering)
    torch.manual_seed(1)
    for step in range(5):
        run(torch.randn(8, 16, dtype=dtype)).float().square().mean().backward()
        assert {isinstance(p.grad, AppliedGradient) for p in model.parameters()} == {in_backward}
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
            if step == 2:
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    yield from (p.detach() for p in model.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("own", [{"update": "nearest"}, {"states": "8bit"}, {"max_norm": 0.1, "norm": "last"}])
def test_two_optimizers_step_in_backward_as_in_their_steps(dtype: torch.dtype, own: dict[str, Any]) -> None:
    ours = list(trained(dtype, in_backward=True, **own))
    torch._dynamo.reset()
    assert same(ours, list(trained(dtype, in_backward=False, **own)))


@pytest.mark.inductor
def test_two_optimizers_step_in_inductors_backward() -> None:
    ours = list(trained(torch.float32, in_backward=True, lowering="inductor"))
    torch._dynamo.reset()
    assert same(ours, list(trained(torch.float32, in_backward=False, lowering="inductor")))


def test_each_optimizers_step_frees_its_own_parameters() -> None:
    model = network()
    muon, adamw = pair(model)
    run = compiled(model, [muon, adamw])
    run(torch.ones(8, 16)).sum().backward()
    muon.step()
    for optimizer in (muon, adamw):
        optimizer.zero_grad()
    with pytest.raises(GradientError, match=r"a second backward before optimizer\.step\(\): the first has stepped"):
        run(torch.ones(8, 16)).sum().backward()
    adamw.step()
    run(torch.ones(8, 16)).sum().backward()


def test_an_exact_norm_of_one_optimizer_holds_its_gradients_alone() -> None:
    model = network()
    matrices = [p for p in model.parameters() if p.dim() == 2]
    muon = fxprec.optim.Muon(matrices, lr=0.02, max_norm=1.0)
    adamw = fxprec.optim.AdamW([p for p in model.parameters() if p.dim() != 2])
    compiled(model, [muon, adamw])(torch.ones(8, 16)).sum().backward()
    held = {p.dim() for p in model.parameters() if not isinstance(p.grad, AppliedGradient)}
    assert held == {2}


def test_a_parameter_of_two_optimizers_is_held_and_told() -> None:
    model = nn.Linear(8, 8, bias=False)
    optimizers = [fxprec.optim.Muon(model.parameters()), fxprec.optim.AdamW(model.parameters())]
    with pytest.warns(FxprecWarning, match="two optimizers hold it, and each applies its gradient"):
        compiled(model, optimizers)(torch.ones(4, 8)).sum().backward()
    assert isinstance(model.weight.grad, Tensor)
    assert not isinstance(model.weight.grad, AppliedGradient)


def test_a_step_budget_counts_the_states_of_both_and_what_a_step_of_muon_takes() -> None:
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(8)))
    optimizers = pair(model, states="auto")
    weight, bias = 512 * 512 * 4, 512 * 4
    whole = 8 * (2 * weight + 3 * bias)  # one average of each matrix, two of each bias
    beside = (
        3.5 if compat.emulates_bf16() else 2.5
    ) * weight  # a gradient, three matrices of 16 bits; a product's copy
    options = {"recipe": "bf16", "step_budget": int(whole + beside + 50 * bias)}
    run = compiled(model, optimizers, **options)
    run(torch.ones(8, 512)).sum().backward()
    (plan,) = (c.plan for c in fxprec.backend_of(run).controllers)
    assert plan.whole_step is not None
    assert plan.peak_bytes is not None
    assert (plan.whole_step.weights + plan.whole_step.states, plan.whole_step.chosen) == (whole, "float32")
    assert beside < plan.peak_bytes.planned < beside + 50 * bias


@pytest.mark.inductor
def test_the_planned_peak_is_the_measured_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BestOf, "unchanged", lambda *_: None)  # a choice whose peak lies elsewhere
    torch.manual_seed(0)
    model, codes = CharTransformer(vocab=96, layers=2), torch.randint(0, 96, (4, 64))
    muon, adamw = pair(model, states="8bit")
    run = compiled(model, [muon, adamw], lowering="inductor", peak_budget="80%")

    def step() -> None:
        nn.functional.cross_entropy(run(codes).flatten(0, 1), codes.flatten()).backward()
        for optimizer in (muon, adamw):
            optimizer.step()
            optimizer.zero_grad()

    for _ in range(3):
        step()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiled:
        step()
    (plan,) = (c.plan for c in fxprec.backend_of(run).controllers)
    assert plan.peak_bytes is not None
    assert peak_bytes(profiled) == pytest.approx(plan.peak_bytes.planned, rel=0.05)
