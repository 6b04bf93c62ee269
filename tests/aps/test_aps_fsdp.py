"""FSDP2's reduce-scatter in codes, on three ranks, which pad every shard."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from aps_ranks import run_ranks, several
from aps_reference import rows_of, sum_of_codes
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from fxprec.aps import APSReduceScatter, APSState, use_aps
from fxprec.errors import ConfigError
from fxprec.runtime.aps.shards import Shards

WORLD = 3


class Net(nn.Module):
    """Two FSDP2 modules: `a` and the rest; `idle` gets a gradient only where asked."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.idle = nn.Linear(12, 17), nn.Linear(17, 5), nn.Linear(3, 7)

    def forward(self, x: Tensor, with_idle: bool = False) -> Tensor:
        y = self.b(torch.relu(self.a(x)))
        return y + self.idle(x[:, :3]).sum() if with_idle else y


def sharded(**policy: Any) -> Net:
    mesh = init_device_mesh("cpu", (WORLD,))
    model = Net()
    for module in (model.a, model):
        fully_shard(module, mesh=mesh, **policy)
    return model


def inputs() -> list[Tensor]:
    return [torch.randn(6, 12, generator=torch.Generator().manual_seed(r)) for r in range(WORLD)]


def step(model: Net, x: Tensor, with_idle: bool = False) -> dict[str, Tensor]:
    model.zero_grad()
    model(x, with_idle).square().mean().backward()
    return {name: p.grad.full_tensor().clone() for name, p in model.named_parameters() if p.grad is not None}


def plain(with_idle: bool = False) -> dict[str, Tensor]:
    model = Net()
    (sum(model(x, with_idle).square().mean() for x in inputs()) / WORLD).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def errors(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> dict[str, float]:
    return {name: float((found[name] - g).norm() / g.norm()) for name, g in wanted.items()}


def in_codes(rank: int, world: int) -> dict[str, dict[str, float]]:
    found = {}
    for name, fmt, policy in (
        ("8 bits", "e4m3fn", {}),
        ("16 bits", "1-6-9", {}),
        ("codec", "dynamic-tree", {}),
        ("bf16 gradients", "e4m3fn", {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)}),
    ):
        model = sharded(**policy)
        assert use_aps(model, APSState(fmt)) == 2
        found[name] = errors(step(model, inputs()[rank], True), plain(True))
    model = sharded()
    use_aps(model, APSState("e4m3fn"))
    found["a layer without a gradient"] = errors(step(model, inputs()[rank]), plain())
    return found


def schedule(rank: int, world: int) -> tuple[list[float], int, list[float]]:
    """Error of each step with high_steps=2; the steps counted; errors after the state of the first step was loaded.

    A new model and state load it, then those that have taken all steps.
    """
    model, state = sharded(), APSState("e5m2", high_steps=2)
    use_aps(model, state)
    seen, saved = [], {}
    for k in range(4):
        seen.append(max(errors(step(model, inputs()[rank]), plain()).values()))
        saved = state.state_dict() if k == 0 else saved
    counted, after = state.step, []
    fresh, fresh_state = sharded(), APSState("e5m2", high_steps=2)
    use_aps(fresh, fresh_state)
    for net, loaded in ((fresh, fresh_state), (model, state)):
        loaded.load_state_dict(saved)
        after += [max(errors(step(net, inputs()[rank]), plain()).values()) for _ in range(2)]
    return seen, counted, after


def stochastic(rank: int, world: int) -> tuple[bool, float]:
    """Whether two steps round differently; relative error of the mean over 100."""
    model = sharded()
    use_aps(model, APSState("1-3-0", rounding="stochastic"))
    steps = [step(model, inputs()[rank]) for _ in range(100)]
    mean = {"b.weight": sum(s["b.weight"] for s in steps) / len(steps)}
    return not torch.equal(steps[0]["b.weight"], steps[1]["b.weight"]), max(
        errors(mean, {"b.weight": plain()["b.weight"]}).values()
    )


def kept_high(rank: int, world: int) -> tuple[int, dict[str, float]]:
    """How many modules send codes where `a` stays high, and the errors."""
    model = sharded()
    count = use_aps(model, APSState("e4m3fn", keep_high=[model.a]))
    return count, errors(step(model, inputs()[rank]), plain())


def refusals(rank: int, world: int) -> list[str]:
    model, messages = sharded(), []
    for options in (
        {"accumulate": "kahan"},
        {"error_feedback": True},
        {"scaling": "none"},
        {"keep_high": [model.b]},
        {"keep_high": [Net()]},
    ):
        try:
            use_aps(model, APSState(**options))
            messages.append("no error")
        except ConfigError as error:
            messages.append(str(error))
    return messages


LAYERS = (5, 0, 12, 7)


def raw(rank: int, world: int) -> dict[str, Tensor]:
    """This rank's sum, by case."""
    found = {}
    for case in ("plain", "zero-layer", "nan"):
        scatter = APSReduceScatter(APSState("1-4-3"), Shards(sizes=LAYERS))
        found[case] = torch.empty(sum(LAYERS))
        scatter(found[case], rows_of(rank, WORLD, LAYERS, case).reshape(-1), dist.group.WORLD, dist.ReduceOp.SUM)
    return found


CHECKS = (in_codes, schedule, stochastic, kept_high, refusals, raw)


@pytest.fixture(scope="module")
def results(once: Callable[..., Any]) -> list[dict[str, Any]]:
    return once("fsdp", lambda: run_ranks(WORLD, several, [(check, ()) for check in CHECKS]))


def test_gradients_are_those_of_the_plain_model_but_for_one_rounding(results: list[dict[str, Any]]) -> None:
    bounds = {"16 bits": 2**-10, "codec": 2**-4, "8 bits": 2**-4, "bf16 gradients": 2**-4}
    bounds["a layer without a gradient"] = 2**-4
    for found in (r["in_codes"] for r in results):
        assert {name: len(by_parameter) for name, by_parameter in found.items()} == {
            name: 4 if "without" in name else 6 for name in bounds
        }
        for name, by_parameter in found.items():
            assert all(0 < e < bounds[name] for e in by_parameter.values()), (name, by_parameter)


@pytest.mark.parametrize("case", ["plain", "zero-layer", "nan"])
def test_the_sum_is_that_of_the_definition(results: list[dict[str, Any]], case: str) -> None:
    """Each layer of each shard has a scale of its own; codes are added in float32, in rank order."""
    sent = [rows_of(r, WORLD, LAYERS, case).numpy() for r in range(WORLD)]
    for rank, found in enumerate(r["raw"][case] for r in results):
        for got, layer in zip(found.split(list(LAYERS)), np.cumsum(LAYERS), strict=True):
            parts = [rows[rank, layer - len(got) : layer] for rows in sent]
            np.testing.assert_array_equal(got.numpy(), sum_of_codes(parts, "1-4-3"))


def test_the_schedule_counts_steps_of_each_module_and_survives_loading(results: list[dict[str, Any]]) -> None:
    for seen, counted, after_loading in (r["schedule"] for r in results):
        assert [error < 1e-5 for error in seen] == [True, True, False, False]
        assert counted == 4
        assert [error < 1e-5 for error in after_loading] == [True, False] * 2


def test_stochastic_rounding_has_no_bias(results: list[dict[str, Any]]) -> None:
    for steps_differ, error in (r["stochastic"] for r in results):
        assert steps_differ
        assert error < 0.05


def test_a_module_kept_high_is_reduced_as_it_is(results: list[dict[str, Any]]) -> None:
    for count, by_parameter in (r["kept_high"] for r in results):
        assert count == 1
        assert max(by_parameter["a.weight"], by_parameter["a.bias"]) < 1e-6
        assert by_parameter["b.weight"] > 1e-3


def test_what_a_reduce_scatter_cannot_honour_is_refused(results: list[dict[str, Any]]) -> None:
    for messages in (r["refusals"] for r in results):
        assert all("it needs accumulate='fp32', scaling='aps' and no error feedback" in m for m in messages[:3])
        assert "keep_high names 2 of the 4 parameters that FSDP2 reduces together" in messages[3]
        assert "build APSState after it" in messages[4]


def test_a_model_without_fully_shard_is_refused() -> None:
    with pytest.raises(ConfigError, match="call fully_shard on the model first"):
        use_aps(Net(), None)  # type: ignore[arg-type]
