"""What every rank runs in the tests; each returns plain values that the test compares."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from fxprec.aps import APSState, aps_hook
from fxprec.errors import ConfigError

SIZES = (37, 0, 1, 64, 200)


class FakeBucket:
    """What a hook sees of DDP's bucket."""

    def __init__(self, gradients: list[Tensor], parameters: list[Tensor], index: int = 0, last: bool = True) -> None:
        self._buffer = torch.cat([g.reshape(-1) for g in gradients]) if gradients else torch.empty(0)
        self._views = list(self._buffer.split([g.numel() for g in gradients])) if gradients else []
        self._parameters, self._index, self._last = parameters, index, last

    def buffer(self) -> Tensor:
        return self._buffer

    def gradients(self) -> list[Tensor]:
        return self._views

    def parameters(self) -> list[Tensor]:
        return self._parameters

    def index(self) -> int:
        return self._index

    def is_last(self) -> bool:
        return self._last


def gradients_of(rank: int, case: str, sizes: tuple[int, ...] = SIZES) -> list[Tensor]:
    """Gradients of one rank; any rank can make any other's."""
    g = torch.Generator().manual_seed(1000 + rank)
    layers = [torch.randn(n, generator=g) * 10.0 ** (3 * i - 6) for i, n in enumerate(sizes)]
    if case == "zero-layer" or (case == "zero-on-one-rank" and rank == 1):
        layers[3].zero_()
    elif case == "huge" and rank == 1:
        layers[0][5] = 3e38
    elif case == "denormal":
        layers[0] = torch.randint(-200, 200, (sizes[0],), generator=g) * 2.0**-149
    elif case == "nan" and rank == 1:
        layers[3][7] = torch.nan
    elif case == "inf" and rank == 0:
        layers[0][0] = torch.inf
    elif case == "power":
        layers[4] = torch.where(layers[4] > 0, 2.0**-3, torch.nextafter(torch.tensor(2.0**-3), torch.tensor(1.0)))
    return layers


def exchange_all(rank: int, world: int, cases: list[tuple[str, dict[str, Any]]]) -> list[list[Tensor]]:
    """The mean gradients of each (case, options), one list of layers each."""
    found = []
    for case, options in cases:
        state = APSState(**options)
        layers = gradients_of(rank, case)
        bucket = FakeBucket(layers, [nn.Parameter(torch.empty(g.shape)) for g in layers])
        result = aps_hook(state, bucket).wait()
        found.append([v.clone() for v in result.split(list(SIZES))])
    return found


def small_model(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 5)).to(dtype)


def train(rank: int, world: int, options: dict[str, Any], steps: int) -> Tensor:
    """Parameters after `steps` steps of SGD under the hook, flat."""
    model = small_model()
    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook(APSState(**options), aps_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    data = torch.Generator().manual_seed(7 + rank)
    for _ in range(steps):
        x = torch.randn(6, 12, generator=data)
        optimizer.zero_grad()
        nn.functional.cross_entropy(ddp(x), (x[:, 0] > 0).long() + 2 * (x[:, 1] > 0).long()).backward()
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def train_modes(rank: int, world: int, modes: list[dict[str, Any]], steps: int) -> list[Tensor]:
    return [train(rank, world, options, steps) for options in modes]


def mismatched_options(rank: int, world: int) -> str:
    try:
        APSState(format="e5m2" if rank else "e4m3fn")
    except ConfigError as error:
        return str(error)
    return "no error"


class Unused(nn.Module):
    """One layer that takes no part in the forward pass, and parameters of one and of no element."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.used, self.unused = nn.Linear(12, 5), nn.Linear(12, 5)
        self.one, self.none = nn.Parameter(torch.ones(())), nn.Parameter(torch.empty(0))

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x) * self.one + self.none.sum()


def unused_parameters(rank: int, world: int) -> dict[str, Any]:
    model = Unused()
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    ddp.register_comm_hook(APSState("bf16"), aps_hook)
    x = torch.randn(8, 12, generator=torch.Generator().manual_seed(rank))
    ddp(x).square().sum().backward()
    wanted = Unused()
    all_x = [torch.randn(8, 12, generator=torch.Generator().manual_seed(r)) for r in range(world)]
    (sum(wanted(x).square().sum() for x in all_x) / world).backward()
    error = (model.used.weight.grad - wanted.used.weight.grad).norm() / wanted.used.weight.grad.norm()
    return {
        "unused": model.unused.weight.grad is None or bool((model.unused.weight.grad == 0).all()),
        "error": float(error),
        "one": float(model.one.grad / wanted.one.grad),
        "none": tuple(model.none.grad.shape),
    }


def bf16_gradients(rank: int, world: int) -> dict[str, Any]:
    layers = [g.bfloat16() for g in gradients_of(rank, "plain")]
    parameters = [nn.Parameter(torch.empty(g.shape, dtype=g.dtype)) for g in layers]
    result = aps_hook(APSState("e4m3fn"), FakeBucket(layers, parameters)).wait()
    wide = [g.bfloat16().float() for g in gradients_of(rank, "plain")]
    same = aps_hook(APSState("e4m3fn"), FakeBucket(wide, parameters)).wait()
    return {"dtype": str(result.dtype), "equal": torch.equal(result, same.bfloat16())}


def kept_high(rank: int, world: int) -> dict[str, Any]:
    """Gradients of a model whose last layer stays high, beside plain DDP's."""

    def grads(hook: bool) -> list[Tensor]:
        model = small_model()
        ddp = DistributedDataParallel(model)
        if hook:
            ddp.register_comm_hook(APSState(keep_high=["3"], model=ddp), aps_hook)
        x = torch.randn(6, 12, generator=torch.Generator().manual_seed(rank))
        ddp(x).square().mean().backward()
        return [p.grad for p in model.parameters()]

    low, high = grads(True), grads(False)
    return {"equal": [torch.equal(a, b) for a, b in zip(low, high, strict=True)]}


def schedule(rank: int, world: int) -> list[bool]:
    """Per call, whether the result was the exact mean: two high steps, then low; then epoch 1 of high_epochs=1."""
    exact = torch.stack([torch.cat(gradients_of(r, "plain")) for r in range(world)])
    mean = exact.sum(0) / world

    def call(state: APSState) -> bool:
        layers = gradients_of(rank, "plain")
        found = aps_hook(state, FakeBucket(layers, [nn.Parameter(torch.empty(g.shape)) for g in layers])).wait()
        return bool(torch.allclose(found, mean, rtol=1e-6, atol=0))

    by_step = APSState(high_steps=2)
    by_epoch = APSState(high_epochs=1)
    seen = [call(by_step) for _ in range(3)]
    seen.append(call(by_epoch))
    by_epoch.set_epoch(1)
    return [*seen, call(by_epoch)]


def resumed(rank: int, world: int) -> bool:
    """A state loaded at step 1 rounds stochastically as the one that got there."""

    def call(state: APSState) -> Tensor:
        layers = gradients_of(rank, "plain")
        return aps_hook(state, FakeBucket(layers, [nn.Parameter(torch.empty(g.shape)) for g in layers])).wait().clone()

    first = APSState(rounding="stochastic")
    one, saved = call(first), first.state_dict()
    two = call(first)
    second = APSState(rounding="stochastic")
    second.load_state_dict(saved)
    return torch.equal(call(second), two) and not torch.equal(one, two)


def feedback(rank: int, world: int) -> tuple[float, float]:
    """Relative error of the sum over 64 equal steps, without and with error feedback."""
    mean = sum(torch.cat(gradients_of(r, "plain")) for r in range(world)) / world
    errors = []
    for on in (False, True):
        state = APSState("1-2-1", error_feedback=on, scaling="aps")
        parameters = [nn.Parameter(torch.empty(n)) for n in SIZES]
        total = torch.zeros_like(mean)
        for _ in range(64):
            total += aps_hook(state, FakeBucket(gradients_of(rank, "plain"), parameters)).wait()
        last = slice(-SIZES[-1], None)
        errors.append(float((total[last] / 64 - mean[last]).norm() / mean[last].norm()))
    return errors[0], errors[1]


def stochastic_mean(rank: int, world: int) -> float:
    """Relative error of the mean over 400 draws of one gradient (nearest rounding would leave a bias)."""
    state = APSState("1-3-0", rounding="stochastic")
    mean = sum(torch.cat(gradients_of(r, "plain")) for r in range(world)) / world
    parameters = [nn.Parameter(torch.empty(n)) for n in SIZES]
    total = torch.zeros_like(mean)
    for _ in range(400):
        total += aps_hook(state, FakeBucket(gradients_of(rank, "plain"), parameters)).wait()
    last = slice(-SIZES[-1], None)
    return float((total[last] / 400 - mean[last]).norm() / mean[last].norm())


class Wide(nn.Module):
    """Three layers in three of DDP's buckets. Not a Sequential: Dynamo does not trace torch's own modules from DDP."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = nn.Linear(12, 600), nn.Linear(600, 600), nn.Linear(600, 600)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(torch.relu(self.b(torch.relu(self.a(x)))))


def compiled_gradients(rank: int, make: str, backend: Any) -> Tensor:
    torch._dynamo.reset()
    model = Wide()
    inner = torch.compile(model, backend=backend) if make == "ddp(compile)" else model
    ddp = DistributedDataParallel(inner, bucket_cap_mb=1)
    ddp.register_comm_hook(APSState("e4m3fn"), aps_hook)
    run = torch.compile(ddp, backend=backend) if make == "compile(ddp)" else ddp
    x = torch.randn(6, 12, generator=torch.Generator().manual_seed(rank))
    for _ in range(2):
        model.zero_grad()
        run(x).square().mean().backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def compiled(rank: int, world: int) -> dict[str, Any]:
    """Graphs seen, and relative error of compiled DDP's gradients against eager DDP with the same hook."""
    from torch._dynamo.testing import CompileCounterWithBackend

    from fxprec import Backend, Config
    from fxprec.aps import keep_graphs_whole

    wanted = compiled_gradients(rank, "eager", None)
    found: dict[str, Any] = {}

    def record(name: str, make: str, backend: Any, graphs: Any) -> None:
        got = compiled_gradients(rank, make, backend)
        found[name] = (graphs(), float((got - wanted).norm() / wanted.norm()))

    for make in ("compile(ddp)", "ddp(compile)"):
        counter = CompileCounterWithBackend("aot_eager")
        record(f"{make} aot_eager", make, counter, lambda c=counter: c.frame_count)
    found["switched"] = [keep_graphs_whole(), keep_graphs_whole()]
    for make in ("compile(ddp)", "ddp(compile)"):
        backend = Backend(Config(recipe="fp8", lowering="eager"))
        record(f"{make} fxprec", make, backend, lambda b=backend: len(b.plans))
    torch._dynamo.config.optimize_ddp = True
    return found


def odd_buckets(rank: int, world: int) -> dict[str, Any]:
    """Buckets of nothing, of one empty layer, of one number; and one cut into parts by a large layer."""
    found: dict[str, Any] = {}
    for mode in ("fp32", "format"):
        state = APSState(accumulate=mode)
        for name, sizes in (("none", ()), ("empty", (0,)), ("one", (1,))):
            layers = [torch.full((n,), 1.0 + rank) for n in sizes]
            result = aps_hook(state, FakeBucket(layers, [nn.Parameter(torch.empty(n)) for n in sizes])).wait()
            found[f"{mode} {name}"] = result.tolist()
        sizes = (1_050_000, 3, 5)
        layers = [torch.full((n,), float(k + 1)) for k, n in enumerate(sizes)]
        result = aps_hook(state, FakeBucket(layers, [nn.Parameter(torch.empty(n)) for n in sizes])).wait()
        found[f"{mode} parts"] = [(float(v.min()), float(v.max())) for v in result.split(list(sizes))]
    return found


def several(rank: int, world: int, names: list[tuple[str, tuple[Any, ...]]]) -> dict[str, Any]:
    """Many checks in one process group: name -> what it returned."""
    return {name: globals()[name](rank, world, *args) for name, args in names}


def fsdp(rank: int, world: int) -> dict[str, Any]:
    """Relative error of FSDP2's gradients under APS against the plain model's; how many modules; the refusal."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from fxprec.aps import use_aps

    mesh = init_device_mesh("cpu", (world,))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 17), nn.ReLU(), nn.Linear(17, 5))
    plain = nn.Sequential(nn.Linear(12, 17), nn.ReLU(), nn.Linear(17, 5))
    plain.load_state_dict(model.state_dict())
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    count = use_aps(model, APSState("e4m3fn"))
    inputs = [torch.randn(6, 12, generator=torch.Generator().manual_seed(r)) for r in range(world)]
    model(inputs[rank]).square().mean().backward()
    (sum(plain(x).square().mean() for x in inputs) / world).backward()
    errors = [
        float((a.grad.full_tensor() - b.grad).norm() / b.grad.norm())
        for a, b in zip(model.parameters(), plain.parameters(), strict=True)
    ]
    try:
        use_aps(model, APSState(accumulate="kahan"))
        refusal = ""
    except ConfigError as error:
        refusal = str(error)
    return {"errors": errors, "count": count, "refusal": refusal}


def tensor_parallel(rank: int, world: int) -> dict[str, float]:
    """Relative errors of a column- then row-parallel pair of layers in codes, and of each collective."""
    from fxprec.runtime import parallel

    g = torch.Generator().manual_seed(5)
    x, w1, w2 = (torch.randn(s, generator=g) for s in ((8, 12), (12, 4 * world), (4 * world, 6)))
    full = [t.clone().requires_grad_() for t in (x, w1, w2)]
    wanted = torch.relu(full[0] @ full[1]) @ full[2]
    wanted.square().sum().backward()

    mine = slice(4 * rank, 4 * rank + 4)
    x_, a, b = x.clone().requires_grad_(), w1[:, mine].clone().requires_grad_(), w2[mine].clone().requires_grad_()
    found = parallel.reduce_from_group(torch.relu(parallel.copy_to_group(x_) @ a) @ b)
    found.square().sum().backward()

    def error(p: Tensor, q: Tensor) -> float:
        return float((p - q).norm() / q.norm())

    gathered = parallel.all_gather(a.detach(), dim=1)
    leaf = torch.arange(6.0 * world).view(2 * world, 3).add(rank).requires_grad_()
    moved = parallel.all_to_all(leaf)
    moved.backward(torch.ones_like(moved) * (rank + 1))
    back = torch.arange(1.0, world + 1).repeat_interleave(2)[:, None].expand(2 * world, 3)
    rows = torch.cat(
        [(torch.arange(6.0 * world).view(2 * world, 3) + r)[2 * rank : 2 * rank + 2] for r in range(world)]
    )
    leaf2 = a.detach().clone().requires_grad_()
    parallel.all_gather(leaf2, dim=1).square().sum().backward()
    leaf3 = a.detach().clone().requires_grad_()
    parallel.all_reduce(leaf3).sum().backward()
    return {
        "forward": error(found, wanted),
        "x": error(x_.grad, full[0].grad),
        "w1": error(a.grad, full[1].grad[:, mine]),
        "w2": error(b.grad, full[2].grad[mine]),
        "gather": error(gathered, w1),
        "gather backward": error(leaf2.grad, 2 * world * a.detach()),
        "all-to-all": error(moved, rows),
        "all-to-all backward": error(leaf.grad, back),
        "all-reduce backward": error(leaf3.grad, torch.full_like(leaf3, world)),
    }


def dies(rank: int, world: int) -> str:
    """Rank 1 leaves the process in the middle of the exchange; the others say how their backward pass ended."""
    import os
    import time

    model = small_model()
    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook(APSState(), aps_hook)
    x = torch.randn(6, 12)
    ddp(x).sum().backward()
    loss = ddp(x).sum()
    if rank == 1:
        os._exit(1)
    start = time.monotonic()
    try:
        loss.backward()
    except RuntimeError as error:
        return f"{type(error).__name__} after {time.monotonic() - start:.0f} s: {error}"
    return "no error"
