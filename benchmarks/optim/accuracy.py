"""Zamirai et al. 2020, Tables 3 and 4 and Figures 9 to 11, in small: three models, 16-bit weights, several seeds.

    python -m benchmarks.optim.accuracy digits|chars|dlrm|formats [--seeds 3]

Every operator's output and every gradient is rounded to nearest in the format, as are weights and optimizer state;
``standard`` rounds the weight update to nearest too. ``fp32`` rounds nothing.
"""

from __future__ import annotations

import argparse
import math
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import fxprec
from benchmarks import machine
from examples.models.char_transformer import CharTransformer
from examples.models.dlrm import DLRM, auc, generate_clicks
from examples.models.small_cnn import SmallCNN
from fxprec.demo.data import VOCAB, load_digits, load_text
from fxprec.numerics.formats import BF16, Format, parse

METHODS = {
    "fp32": None,
    "standard": "nearest",
    "stochastic": "stochastic",
    "kahan": "kahan",
    "both": "stochastic+kahan",
}
CONTEXT = 48


class _Round(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, fmt: Format) -> Tensor:
        ctx.fmt = fmt
        return _round(x, fmt)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _round(grad, ctx.fmt), None


def _round(x: Tensor, fmt: Format) -> Tensor:
    return x.bfloat16().float() if fmt == BF16 else fxprec.quantize(x, fmt)


def simulate(model: nn.Module, fmt: Format | None) -> None:
    """Round the output of every leaf module, and the gradient that comes back to it."""
    if fmt is None:
        return
    for module in model.modules():
        if not list(module.children()):
            module.register_forward_hook(lambda _m, _i, out: _Round.apply(out, fmt))
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(fxprec.quantize(p, fmt))


def make_optimizer(kind: str, model: nn.Module, method: str, fmt: Format | None, **options: Any) -> Any:
    if fmt is None:
        return getattr(torch.optim, kind)(model.parameters(), **options)
    named = list(model.named_parameters())
    return getattr(fxprec.optim, kind)(named, update=METHODS[method], format=fmt, count_cancelled=True, **options)


def digits(method: str, fmt: Format | None, seed: int) -> dict[str, float]:
    data, model = load_digits(), SmallCNN()
    simulate(model, fmt)
    epochs, batch = 12, 64
    opt = make_optimizer("SGD", model, method, fmt, lr=0.02, momentum=0.9, weight_decay=5e-4)
    steps = epochs * (len(data.train_labels) // batch)
    schedule = torch.optim.lr_scheduler.LambdaLR(opt, lambda s: 0.5 * (1 + math.cos(math.pi * s / steps)))
    for _ in range(epochs):
        order = torch.randperm(len(data.train_labels))
        for chosen in order.split(batch)[: len(order) // batch]:
            loss = functional.cross_entropy(model(data.train_images[chosen]), data.train_labels[chosen])
            step(opt, schedule, loss)
    model.eval()
    with torch.no_grad():
        logits = model(data.test_images)
        right = (logits.argmax(1) == data.test_labels).float().mean().item()
        return {"accuracy": 100 * right, "loss": functional.cross_entropy(logits, data.test_labels).item()} | lost(opt)


def chars(method: str, fmt: Format | None, seed: int) -> dict[str, float]:
    text, model = load_text(), CharTransformer(vocab=VOCAB, context=CONTEXT)
    simulate(model, fmt)
    steps = 300
    betas = (0.9, 0.99)  # for all: 0.999 rounds to 1 in bf16
    opt = make_optimizer("AdamW", model, method, fmt, lr=2e-3, betas=betas)
    schedule = torch.optim.lr_scheduler.LambdaLR(opt, lambda s: min(1, (s + 1) / 20) * (1 - s / steps))

    def loss_of(codes: Tensor, count: int) -> Tensor:
        starts = torch.randint(len(codes) - CONTEXT, (count, 1))
        found = codes[starts + torch.arange(CONTEXT + 1)]
        return functional.cross_entropy(model(found[:, :-1]).flatten(0, 1), found[:, 1:].flatten())

    for _ in range(steps):
        step(opt, schedule, loss_of(text.train, 16))
    torch.manual_seed(99)
    with torch.no_grad():
        return {"loss": loss_of(text.held_out, 512).item()} | lost(opt)


def converged_dlrm(method: str, fmt: Format | None, seed: int) -> dict[str, float]:
    """At 5 times the learning rate: at 0.1 fp32 is far from its best, and the noise of few bits helps it."""
    return dlrm(method, fmt, seed, lr=0.5)


def dlrm(method: str, fmt: Format | None, seed: int, lr: float = 0.1) -> dict[str, float]:
    steps, batch = 2500, 128
    train, test = generate_clicks(steps * batch, seed=1 + seed), generate_clicks(40_000, seed=0)
    model = DLRM()
    simulate(model, fmt)
    opt = make_optimizer("SGD", model, method, fmt, lr=lr)
    schedule = torch.optim.lr_scheduler.ConstantLR(opt, factor=1)
    late: dict[str, float] = {}
    for i in range(steps):
        at = slice(i * batch, (i + 1) * batch)
        loss = functional.binary_cross_entropy_with_logits(
            model(train.dense[at], train.categories[at]), train.clicked[at]
        )
        step(opt, schedule, loss)
        if i == steps - steps // 10 and fmt is not None:
            opt.cancelled(reset=True)  # what follows is the last tenth
    with torch.no_grad():
        late = {"auc": 100 * auc(model(test.dense, test.categories), test.clicked)}
        seen = slice((steps - steps // 8) * batch, steps * batch)  # the paper's Figure 10 shows training AUC
        logits = model(train.dense[seen], train.categories[seen])
        late["training_auc"] = 100 * auc(logits, train.clicked[seen])
    return late | lost(opt)


def step(opt: Any, schedule: Any, loss: Tensor) -> None:
    loss.backward()
    opt.step()
    schedule.step()
    opt.zero_grad()


def lost(opt: Any) -> dict[str, float]:
    """Share of non-zero updates cancelled, in percent."""
    if not hasattr(opt, "cancelled"):
        return {}
    rows = opt.cancelled()
    return {"cancelled": 100 * sum(r.cancelled for r in rows) / max(1, sum(r.nonzero for r in rows))}


def run(task: Callable[..., dict[str, float]], method: str, fmt: Format | None, seeds: int) -> dict[str, Any]:
    runs = []
    start = time.perf_counter()
    for seed in range(seeds):
        torch.manual_seed(seed)
        runs.append(task(method, fmt, seed))
    mean = {name: round(sum(r[name] for r in runs) / seeds, 4) for name in runs[0]}
    row = {"task": task.__name__, "method": method, "format": fmt.name if fmt else "fp32", **mean, "runs": runs}
    print({k: v for k, v in row.items() if k != "runs"}, f"{time.perf_counter() - start:.0f} s", flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["digits", "chars", "dlrm", "formats"])
    parser.add_argument("--seeds", type=int, default=3)
    given = parser.parse_args()
    warnings.simplefilter("ignore", fxprec.FxprecWarning)  # `standard` is meant to be stuck
    if given.what == "formats":
        narrow = [(method, parse(f"1-8-{m}:ieee")) for m in (5, 3, 1) for method in ("stochastic", "kahan")]
        wanted = [(converged_dlrm, *row) for row in [("fp32", None), ("kahan", BF16), *narrow]]
    else:
        task = {"digits": digits, "chars": chars, "dlrm": dlrm}[given.what]
        wanted = [(task, method, None if method == "fp32" else BF16) for method in METHODS]
    rows = [run(task, method, fmt, given.seeds) for task, method, fmt in wanted]
    print("wrote", machine.save(f"optim-{given.what}", rows))


if __name__ == "__main__":
    main()
