"""A convolutional network under a budget: at most so many bytes may wait for backward.

python examples/budget.py    --small for a quick look
"""

import sys

import torch
import torch.nn.functional as F

import fxprec
from examples.models.resnet import resnet18


def train(budget: str, small: bool) -> tuple[fxprec.Plan, float]:
    torch.compiler.reset()
    torch.manual_seed(0)
    batch, width, steps = (4, 0.125, 2) if small else (64, 0.5, 30)
    images, labels = torch.randn(batch, 3, 32, 32), torch.randint(100, (batch,))
    model = resnet18(width=width)
    options = {"recipe": "fp8", "activation_budget": budget, "lowering": "eager" if small else "auto"}
    compiled = torch.compile(model, backend="fxprec", options=options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for _ in range(steps):
        loss = F.cross_entropy(compiled(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return fxprec.backend_of(compiled).plans[0], loss.item()


def main(small: bool = False) -> dict[str, fxprec.Plan]:
    plans = {}
    for budget in ("0.9MiB",) if small else ("100MiB", "60MiB", "40MiB"):
        plan, loss = train(budget, small)
        in_float32, planned = (count / 2**20 for count in (plan.saved_bytes.fp32, plan.saved_bytes.planned))
        print(f"budget {budget:>6}: {planned:.2f} MiB saved for backward, {in_float32:.2f} in float32; "
              f"{len(plan.low_groups)} of {len(plan.groups)} groups low; loss {loss:.3f}")  # fmt: skip
        plans[budget] = plan
    return plans


if __name__ == "__main__":
    main("--small" in sys.argv)
