"""torch.compile around and inside DistributedDataParallel, with Dynamo's DDP optimizer on, as it is by default."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from aps_ranks import run_ranks
from models import Parts
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from fxprec import Backend, Config, backend_of
from fxprec.aps import APSState, aps_hook


def wide() -> nn.Module:
    """Three layers in three of DDP's buckets. Not a Sequential: Dynamo does not trace torch's own modules from DDP."""
    torch.manual_seed(0)
    layers = {"a": nn.Linear(12, 600), "b": nn.Linear(600, 600), "c": nn.Linear(600, 600)}
    return Parts(lambda m, x: m.c(torch.relu(m.b(torch.relu(m.a(x))))), **layers)


class Gemms(TorchDispatchMode):
    """Logs the GEMMs that run."""

    def __init__(self, log: list[str]) -> None:
        super().__init__()
        self.log = log

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            self.log.append("gemm")
        return func(*args, **(kwargs or {}))


def gradients(rank: int, make: str, log: list[str] | None = None, **how: Any) -> tuple[Tensor, Any]:
    """Gradients after two steps, flat, and the compiled module; ``log`` gets the second backward's GEMMs and buckets."""
    log = [] if log is None else log

    def hook(state, bucket):  # type: ignore[no-untyped-def]  # DDP refuses annotations that are texts
        log.append("bucket")
        return aps_hook(state, bucket)

    torch._dynamo.reset()
    model = wide()
    inner = compiled = torch.compile(model, **how) if make == "ddp(compile)" else model
    run = ddp = DistributedDataParallel(inner, bucket_cap_mb=1)
    ddp.register_comm_hook(APSState("e4m3fn"), hook)
    if make == "compile(ddp)":
        run = compiled = torch.compile(ddp, **how)
    x = torch.randn(6, 12, generator=torch.Generator().manual_seed(rank))
    for step in range(2):
        model.zero_grad()
        loss = run(x).square().mean()
        log.clear()
        with Gemms(log) if step else contextlib.nullcontext():
            loss.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()]), compiled


def compiled(rank: int, world: int) -> dict[str, Any]:
    """By way: graphs seen, relative error of the gradients against eager DDP with the same hook, messages."""
    from torch._dynamo.testing import CompileCounterWithBackend

    wanted, _ = gradients(rank, "eager")
    found: dict[str, Any] = {}
    logs: dict[str, list[str]] = {}
    grads: dict[str, Tensor] = {}

    def record(name: str, make: str, graphs: Any, **how: Any) -> None:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            got, made = gradients(rank, make, log := [], **how)
        messages = [str(w.message) for w in caught if "DDP optimizer" in str(w.message)]
        found[name] = (graphs(made), float((got - wanted).norm() / wanted.norm()), messages)
        logs[name], grads[name] = log, got

    for make in ("compile(ddp)", "ddp(compile)"):
        counter = CompileCounterWithBackend("aot_eager")
        record(f"{make} aot_eager", make, lambda _, c=counter: c.frame_count, backend=counter)
        backend = Backend(Config(recipe="fp8", lowering="eager"))
        record(f"{make} fxprec", make, lambda _, b=backend: len(b.plans), backend=backend)
    options = {"recipe": "fp8", "lowering": "eager"}
    record("by name", "compile(ddp)", lambda made: len(backend_of(made).plans), backend="fxprec", options=options)
    with torch._dynamo.config.patch(optimize_ddp=False):
        backend = Backend(Config(recipe="fp8", lowering="eager"))
        record("switched off", "compile(ddp)", lambda _, b=backend: len(b.plans), backend=backend)
    backend = Backend(Config(recipe="fp8", lowering="eager", low_ratio=None, activation_budget=1 << 30))
    record("budget", "compile(ddp)", lambda _, b=backend: len(b.plans), backend=backend)
    backend = Backend(Config(recipe="fp8", lowering="eager"))
    gradients(rank, "compile(ddp)", backend=backend)
    found["steps"] = [controller.step for controller in backend.controllers]
    whole = grads["switched off"]
    found["apart"] = float((grads["compile(ddp) fxprec"] - whole).norm() / whole.norm())
    return found | {"logs": logs}


@pytest.fixture(scope="module")
def results(once: Callable[..., Any]) -> list[dict[str, Any]]:
    return once("compile", lambda: run_ranks(2, compiled))


@pytest.mark.parametrize("make", ["compile(ddp)", "ddp(compile)"])
def test_plain_backends_get_the_pieces_and_the_same_gradients(results: list[dict[str, Any]], make: str) -> None:
    for pieces, error, messages in (r[f"{make} aot_eager"] for r in results):
        assert pieces > 1
        assert error < 1e-6
        assert messages == []


@pytest.mark.parametrize("way", ["compile(ddp) fxprec", "ddp(compile) fxprec", "by name"])
def test_fxprec_plans_the_pieces_and_says_nothing(results: list[dict[str, Any]], way: str) -> None:
    for plans, error, messages in (r[way] for r in results):
        assert plans > 1
        assert 0 < error < 0.2  # fp8 activations, not the exchange
        assert messages == []


@pytest.mark.parametrize("way", ["compile(ddp) fxprec", "ddp(compile) fxprec", "by name"])
def test_buckets_leave_before_the_last_gemm_of_backward(results: list[dict[str, Any]], way: str) -> None:
    for log in (r["logs"][way] for r in results):
        last = max(i for i, what in enumerate(log) if what == "gemm")
        assert log[:last].count("bucket") >= 1, log
    for log in (r["logs"]["switched off"] for r in results):
        assert log.count("gemm") > 0
        assert log[: log.index("bucket")].count("gemm") == log.count("gemm"), (
            "of a whole graph none leaves before its end"
        )


def test_pieces_give_the_gradients_of_the_whole(results: list[dict[str, Any]]) -> None:
    for found in results:
        assert found["apart"] < 0.05, "what the exchange rounds, by each bucket's exponents"


def test_what_dynamo_asks_for_shapes_is_no_step(results: list[dict[str, Any]]) -> None:
    for found in results:
        assert len(found["steps"]) > 1
        assert set(found["steps"]) == {2}


def test_an_option_about_the_whole_graph_keeps_it_whole_and_says_so_once(results: list[dict[str, Any]]) -> None:
    for plans, error, messages in (r["budget"] for r in results):
        assert plans == 1
        assert 0 < error < 0.2
        assert len(messages) == 1
        assert "splits graphs at DDP's buckets, and activation_budget is about the whole graph" in messages[0]
        assert "Leave activation_budget out, or compile by layer (fxprec.integrations.compile_layers)" in messages[0]
        assert "set torch._dynamo.config.optimize_ddp = False" in messages[0]


def test_nothing_is_said_where_the_user_has_switched_the_optimizer_off(results: list[dict[str, Any]]) -> None:
    for plans, _, messages in (r["switched off"] for r in results):
        assert (plans, messages) == (1, [])
