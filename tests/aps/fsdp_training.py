"""Training under FSDP2 for tests: a model of padded shards, what its layers compute with, and what is sent."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from fxprec.aps import APSState, use_aps
from fxprec.runtime.aps import by_link, exchange, fsdp_gather
from fxprec.runtime.aps.link_plan import GatheredBits, LayerBits, LinkPlan
from fxprec.runtime.aps.links import Links

WIDTH = 257


class Training:
    """Four layers, three of them FSDP2 modules of their own; no shard is whole blocks, and each is padded."""

    def __init__(
        self,
        rank: int,
        *,
        parameters: str | None = None,
        exact_every: int | None = None,
        policy: Any = None,
        **options: Any,
    ) -> None:
        torch.manual_seed(0)
        layers = [nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)]
        self.model = nn.Sequential(*layers, nn.Linear(WIDTH, 8))
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for module in (self.model[0], self.model[2], self.model[3], self.model):
            fully_shard(module, mesh=mesh, mp_policy=policy or MixedPrecisionPolicy())
        if "bits" in options:
            options["model"] = self.model
        self.state = APSState("e4m3fn", **options)
        use_aps(self.model, self.state, parameters=parameters, exact_every=exact_every)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)
        self.rank, self.at = rank, 0

    def backward(self, nan_on: int | None = None) -> float:
        x = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(100 * self.at + self.rank))
        x[0, 0] = torch.nan if nan_on == self.rank else x[0, 0]
        self.optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self.model(x).float(), x[:, :8].argmax(1))
        loss.backward()
        self.at += 1
        return float(loss.detach())

    def step(self, count: int = 1) -> Training:
        for _ in range(count):
            self.backward()
            self.optimizer.step()
        return self

    @property
    def plan(self) -> LinkPlan:
        assert self.state.by_link is not None
        assert self.state.by_link.plan is not None
        return self.state.by_link.plan

    def shards(self) -> Tensor:
        return torch.cat([p.to_local().detach().flatten() for p in self.model.parameters()])

    def gradients(self) -> dict[str, Tensor]:
        return {n: p.grad.full_tensor().clone() for n, p in self.model.named_parameters() if p.grad is not None}


@contextmanager
def links(*found: Links) -> Iterator[None]:
    """Let each probe find the next of these, the last one from then on; the planned bits are not tried."""
    left = list(found)
    probe = mock.patch.object(by_link, "probe_links", side_effect=lambda *_: left.pop(0) if len(left) > 1 else left[0])
    with probe, mock.patch.object(by_link, "TRIALS", 0):
        yield


@contextmanager
def weights_seen(module: nn.Module) -> Iterator[dict[str, list[Tensor]]]:
    """Note a module's whole weight whenever it computes forward, and whenever its backward begins.

    FSDP2 gathers for backward one module ahead: the first two of backward's modules are gathered before anything is sent.
    """
    seen: dict[str, list[Tensor]] = {"forward": [], "backward": []}

    def note(when: str) -> None:
        seen[when].append(module.weight.detach().clone())

    def forward(*_: object) -> None:
        note("forward")

    def backward(_module: nn.Module, _args: object, out: Tensor) -> None:
        if out.requires_grad:
            out.register_hook(lambda _: note("backward"))

    handles = [module.register_forward_pre_hook(forward), module.register_forward_hook(backward)]
    yield seen
    for handle in handles:
        handle.remove()


@contextmanager
def bytes_gathered() -> Iterator[list[int]]:
    """Note the bytes of each message that is gathered."""
    sizes: list[int] = []
    real = exchange.all_gather_into

    def counted(out: Tensor, message: Tensor, **kwargs: Any) -> Any:
        sizes.append(message.nbytes)
        return real(out, message, **kwargs)

    with (
        mock.patch.object(exchange, "DIRECT_BYTES", -1),  # gathers are no all-to-alls then
        mock.patch.object(exchange, "all_gather_into", counted),
        mock.patch.object(fsdp_gather, "all_gather_into", counted),
    ):
        yield sizes


class Mixed(nn.Module):
    """A frozen table in bf16 before a layer in float32, which then lies at no multiple of 4 bytes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Parameter(torch.randn(63, 33).bfloat16(), requires_grad=False)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        self.seen = [self.table.clone(), self.linear.weight.detach().clone(), self.linear.bias.detach().clone()]
        return self.linear(x)


def plan_of(training: Training, bits: int, gathered_bits: int) -> LinkPlan:
    layers = [LayerBits(n, 0, p.numel(), bits, 0.0, 0.0) for n, p in training.model.named_parameters()]
    modules = [GatheredBits(m.name, sum(m.sizes), gathered_bits) for m in training.state.by_link._gathers.modules]
    return LinkPlan(dist.get_world_size(), 1e6, 0.0, 1 / 32, 0.0, (0.0,), 0.0, 0, tuple(layers), tuple(modules))


def by_bits(rank: int, plan: Callable[[Training, int], LinkPlan], **options: Any) -> dict[int, Any]:
    """By bits of a plan: each gradient's error against FSDP2's own, and its share of NaNs with a NaN on one rank."""
    exact = Training(rank, high_steps=1)
    exact.backward()
    wanted, found = exact.gradients(), {}
    for bits in (32, 16, 8, 4):
        training = Training(rank, bits="by link", parameters="by link", **options)
        training.state.by_link.adopt(plan(training, bits))
        training.backward()
        got = training.gradients()
        errors = {n: float((got[n] - g).norm() / g.norm()) for n, g in wanted.items()}
        training.backward(nan_on=1)
        nans = {n: float(g.isnan().float().mean()) for n, g in training.gradients().items()}
        found[bits] = {"errors": errors, "nans": nans}
    return found


def check_bits(found: dict[int, Any], bounds: dict[int, tuple[float, float]]) -> None:
    """Check that each gradient's error lies within the bounds of its bits, and that one rank's NaN is in all of it."""
    for bits, (least, most) in bounds.items():
        errors = found[bits]["errors"].values()
        assert all(least <= error < most for error in errors), (bits, errors)
        assert set(found[bits]["nans"].values()) == {1.0}
