"""A training loop with the habits that a case names, of an uncompiled model or of a compiled one."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

import fxprec
from benchmarks.graphs.values import Noise
from benchmarks.options.cases import BESIDE, CHOICES, Case, setting, unit
from benchmarks.options.networks import IMAGES, LENGTH, TOKENS, WIDTH, made, shapes

RATE = 1e-2
OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "torch": (torch.optim.SGD, {"momentum": 0.9}),
    "sgd": (fxprec.optim.SGD, {"momentum": 0.5, "update": "nearest"}),
    "sgd sums": (fxprec.optim.SGD, {"gradients": "bf16", "update": "nearest"}),
    **{f"adamw {states}": (fxprec.optim.AdamW, {"eps": 1.0, "states": states, "update": "nearest"}) for states in ("float32", "8bit", "auto")},
}  # fmt: skip
"""With AdamW's usual eps a gradient near 0 moves its weight as far as a large one does, by the sign of its error."""
Numbers = Iterator[tuple[str, Tensor]]


class Training:
    """A model, its optimizer and, with options, the backend that compiles it."""

    def __init__(self, case: Case, options: dict[str, Any] | None = None, noise: Noise | None = None) -> None:
        self._other_recipe = "fp8" if unit(case) >= 2.0**-3 else "fp32"
        self.case = SimpleNamespace(**{name: setting(case, name) for name in CHOICES})
        self.noise = noise or nullcontext()
        self.is_exact = self.case.weights == "float32" and not self.case.partly
        self.device = torch.device(self.case.device)
        torch.manual_seed(0)
        self.model = made(self.case).to(self.device)
        self.second = None if self.case.second is None else _second(self.case, self.model).to(self.device)
        self.start = {name: p.detach().clone() for name, p in self._named()}
        self.optimizer = self._new_optimizer()
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.5) if self.case.schedule else None
        self.backends: list[fxprec.Backend] = []
        self.is_stepped = options is not None and self.case.in_backward
        self.called: Any = self._whole if self.case.wrapped == "loss" else self.model
        self.called_second: Any = self.second
        if options is not None:
            self._compile(options)

    def _new_optimizer(self) -> torch.optim.Optimizer:
        case, (kind, given) = self.case, OPTIMIZERS[self.case.optimizer]
        self.is_clipped = case.clip == "torch" or (case.clip is not None and kind is torch.optim.SGD)
        if case.clip is not None and not self.is_clipped:
            given = {**given, "max_norm": 0.5, "norm": case.clip}
        trained = [p for _, p in self._named() if p.requires_grad or case.frozen in ("until 2", "in turns")]
        return kind(trained, lr=RATE, **given)

    def _compile(self, options: dict[str, Any]) -> None:
        torch._dynamo.reset()
        case = self.case
        own = {"optimizer": self.optimizer if self.is_stepped else None}
        config = fxprec.Config(**{name: value for name, value in options.items() if name != "step_budget"})
        backend = fxprec.Backend(config, **own, step_budget=options.get("step_budget"))
        self.backends = [backend]
        dynamic = None if case.dynamic == "mark" else case.dynamic
        if case.wrapped == "in place":
            self.model.compile(backend=backend, dynamic=dynamic)
        elif case.wrapped == "function":
            model = self.model
            self.called = torch.compile(lambda inputs: model(inputs), backend=backend, dynamic=dynamic)
        else:
            self.called = torch.compile(self.called, backend=backend, dynamic=dynamic)
        if self.second is not None:
            if case.second != "shared":
                beside = {name: value for name, value in options.items() if name in BESIDE}
                config = fxprec.Config(
                    **(beside if case.second == "same" else {**beside, "recipe": self._other_recipe})
                )
                backend = fxprec.Backend(config, **own)
                self.backends.append(backend)
            self.called_second = torch.compile(self.second, backend=backend, dynamic=dynamic)

    @property
    def backend(self) -> fxprec.Backend:
        """The backend of the model."""
        return self.backends[0]

    @property
    def has_skipped(self) -> bool:
        """Whether a dynamic loss scale has left out steps."""
        return any(backend.skipped_steps for backend in self.backends)

    def _named(self) -> Iterator[tuple[str, nn.Parameter]]:
        yield from self.model.named_parameters()
        if self.second is not None:
            known = set(self.model.parameters())
            yield from ((f"second.{name}", p) for name, p in self.second.named_parameters() if p not in known)

    def run(self, first: int, last: int) -> dict[str, Tensor]:
        """Take steps; return losses, gradients, how far parameters have moved, and buffers, float64, by name."""
        found: dict[str, Tensor] = {}
        for step in range(first, last):
            found.update((f"step {step}: {name}", x.detach().double().clone()) for name, x in self._step(step))
        return found

    def _step(self, step: int) -> Numbers:
        case = self.case
        if step == 3 and case.reset:
            torch.compiler.reset()
        if step == 3 and case.copy:
            self._copy()
        if step >= 2 and case.frozen == "until 2":
            self.model.requires_grad_(True)
        if case.frozen == "in turns":
            for _, parameter in [*self._named()][:2]:
                parameter.requires_grad_(step % 2 == 1)
        if case.evaluate is not None and (step > 0) == (case.evaluate != "first") and step < 2:
            yield "evaluation", self._evaluation(step)
        parts = self.parts(step)
        with self.noise:
            if case.skipped:
                self._loss(self._batch(80 + step, case.sizes[0]), step)
            losses = list(self.passes(parts, step))
        yield from ((f"loss {i}", loss) for i, loss in enumerate(losses))
        yield from ((f"gradient of input {i}", x.grad) for i, x in enumerate(parts) if x.grad is not None)
        if step % case.every == 0:  # so that no gradient waits when a state is saved
            yield from self._update()

    def passes(self, parts: list[Tensor], step: int) -> Iterator[Tensor]:
        """Run forward and backward of all parts; yield the losses."""
        case = self.case
        if case.flight is None:
            for part in parts:
                loss, outputs = self._forward(part, step)
                if case.between:
                    self._evaluation(step)
                self._backward(loss, outputs, len(parts))
                yield loss
            return
        passes = [self._forward(part, step) for part in parts]
        for loss, outputs in reversed(passes) if case.flight == "reversed" else passes:
            self._backward(loss, outputs, len(parts))
            yield loss

    def _update(self) -> Numbers:
        case = self.case
        for _, parameter in self._named() if case.alternate else ():
            if parameter.grad is None and parameter.requires_grad:  # compiled code makes one of zeros
                parameter.grad = torch.zeros_like(parameter)
        if not self.is_stepped:  # reading a gradient that backward has used is an error
            grads = {name: p.grad for name, p in self._named() if p.grad is not None}
            torch._foreach_div_(list(grads.values()), case.loss_scale)
            if self.is_clipped:
                nn.utils.clip_grad_norm_([p for _, p in self._named()], 0.5)
            yield from ((f"gradient of {name}", grad) for name, grad in grads.items())
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=case.zero == "none")
        if self.scheduler is not None:
            self.scheduler.step()
        if case.moved:
            for _, parameter in self._named():
                parameter.data = parameter.data.clone()
        if case.save:
            for backend in self.backends:
                backend.state_dict()
        if self.is_exact:
            yield from ((f"move of {name}", p - self.start[name]) for name, p in self._named())
            yield from self.model.named_buffers()

    def parts(self, step: int) -> list[Tensor]:
        """Return the inputs of a step, one tensor for each micro-batch."""
        case, rows = self.case, self.case.sizes[step % len(self.case.sizes)]
        whole = self._batch(step, rows)
        if case.channels_last and case.network in IMAGES:
            whole = whole.contiguous(memory_format=torch.channels_last)
        found = list(whole.split(rows - rows // 4) if case.uneven else whole.chunk(case.parts))
        if case.input_grad and whole.is_floating_point():
            found = [part.detach().clone().requires_grad_() for part in found]
        if case.dynamic == "mark":
            for part in found:
                torch._dynamo.mark_dynamic(part, 0)
        return found

    def _batch(self, seed: int, rows: int) -> Tensor:
        pick = torch.Generator().manual_seed(100 + seed)
        if self.case.network in TOKENS:
            return torch.randint(0, WIDTH, (rows, LENGTH), generator=pick).to(self.device)
        shape = (rows, 3, 8, 8) if self.case.network in IMAGES else (rows, WIDTH)
        return torch.randn(shape, generator=pick).to(self.device, getattr(torch, self.case.weights))

    def _loss(self, inputs: Tensor, seed: int) -> tuple[Tensor, Tensor]:
        """Return the loss, and the model's results as one tensor."""
        torch.manual_seed(seed)
        case, called = self.case, self._called_inside()
        last = case.alternate and seed % 2 == 1
        sizes = [torch.Size(shape).numel() for shape in shapes(case.network, len(inputs))]
        target = torch.randn(sum(sizes), generator=torch.Generator().manual_seed(seed)).to(self.device)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=case.autocast):
            if case.wrapped == "loss":
                loss, results = called(inputs, target, last)
            else:
                results = called(inputs)
                loss = _distance(results, target, last)
            if self.second is not None:
                first = results[0] if isinstance(results, tuple) else results
                loss = loss + self.called_second(first).float().square().mean()
        return loss, _flat(results, last)

    def _whole(self, inputs: Tensor, target: Tensor, last: bool) -> tuple[Tensor, Any]:
        results = self.model(inputs)
        return _distance(results, target, last), results

    def _called_inside(self) -> Callable[..., Any]:
        """Return what calls the model inside of what a case puts around it."""
        if self.case.functional:
            return lambda inputs: functional_call(
                self.called, {name: p * 1.0 for name, p in self.called.named_parameters()}, (inputs,)
            )
        if self.case.outer in ("checkpoint", "reentrant") and self.model.training:
            is_reentrant = self.case.outer == "reentrant"
            return lambda *args: checkpoint(self.called, *args, use_reentrant=is_reentrant)
        return self.called  # type: ignore[no-any-return]

    def _forward(self, inputs: Tensor, seed: int) -> tuple[Tensor, Tensor]:
        with save_on_cpu() if self.case.outer == "on host" else nullcontext():
            loss, outputs = self._loss(inputs, seed)
        if self.case.penalty:
            loss = loss + 0.1 * sum(p.float().square().mean() for _, p in self._named() if p.requires_grad)
        return loss, outputs

    def _backward(self, loss: Tensor, outputs: Tensor, parts: int) -> None:
        scale = (1.0 if self.is_stepped else self.case.loss_scale) / parts
        (loss * scale).backward(retain_graph=self.case.retain)
        if self.case.retain:
            (outputs.square().mean() * 0.1 * scale).backward()

    def _evaluation(self, step: int) -> Tensor:
        self.model.eval()
        modes = {"inference": torch.inference_mode, "with gradients": torch.enable_grad}
        with self.noise, modes.get(self.case.evaluate, torch.no_grad)():
            loss, _ = self._loss(self._batch(50 + step, 32), step)
        self.model.train()
        return loss

    def _copy(self) -> None:
        """Go on with a copy of the model."""
        state = self.optimizer.state_dict()
        self.called = copy.deepcopy(self.called)
        self.model = getattr(self.called, "_orig_mod", self.called)
        self.optimizer = self._new_optimizer()
        self.optimizer.load_state_dict(state)
        if self.backends:
            self.backends = [fxprec.backend_of(self.called)]

    def _stateful(self) -> list[Any]:
        own = (self.model, self.second, self.optimizer, self.scheduler, *self.backends)
        return [part for part in own if part is not None]

    def state(self) -> bytes:
        """Return models, optimizer and backends as a checkpoint file."""
        file = io.BytesIO()
        torch.save([part.state_dict() for part in self._stateful()], file)
        return file.getvalue()

    def load(self, state: bytes) -> None:
        """Load a result of `state`."""
        saved = torch.load(io.BytesIO(state), weights_only=True)
        for part, one in zip(self._stateful(), saved, strict=True):
            part.load_state_dict(one)


class Tied(nn.Module):
    """A layer with a weight of another model."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(x @ self.weight)


def _second(case: SimpleNamespace, model: nn.Module) -> nn.Module:
    """Return a model that reads the first one's result."""
    (*_, width), *_ = shapes(case.network, 1)
    if case.second == "tied":
        return Tied([p for p in model.parameters() if p.dim() == 2 and len(p) == width][-1])
    return nn.Sequential(nn.Linear(width, 64), nn.GELU(), nn.Linear(64, 8)).to(getattr(torch, case.weights))


def _flat(results: Any, last: bool) -> Tensor:
    every = results if isinstance(results, tuple) else (results,)
    return torch.cat([each.float().flatten() for each in (every[-1:] if last else every)])


def _distance(results: Any, target: Tensor, last: bool) -> Tensor:
    found = _flat(results, last)
    return F.mse_loss(found, target[-found.numel() :])
