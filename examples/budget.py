"""A transformer under a budget: at most so many bytes may wait for backward.

python examples/budget.py    --small for a quick look
"""

import sys

import torch
import torch.nn.functional as F

import fxprec
from fxprec.demo.models import CharTransformer


def train(budget: str, small: bool) -> tuple[fxprec.Plan, float]:
    torch.compiler.reset()
    torch.manual_seed(0)
    batch, length, layers, width, steps = (4, 32, 2, 32, 2) if small else (16, 128, 6, 128, 30)
    codes, following = torch.randint(97, (2, batch, length))
    model = CharTransformer(vocab=97, context=length, layers=layers, width=width, heads=4)
    options = {"recipe": "fp8", "activation_budget": budget, "lowering": "eager" if small else "auto"}
    compiled = torch.compile(model, backend="fxprec", options=options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(steps):
        loss = F.cross_entropy(compiled(codes).flatten(0, 1), following.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return fxprec.backend_of(compiled).plans[0], loss.item()


def main(small: bool = False) -> dict[str, fxprec.Plan]:
    plans = {}
    for budget in ("0.14MiB",) if small else ("40MiB", "27MiB", "22MiB"):
        plan, loss = train(budget, small)
        in_float32, planned = (count / 2**20 for count in (plan.saved_bytes.fp32, plan.saved_bytes.planned))
        print(f"budget {budget:>6}: {planned:.2f} MiB saved for backward, {in_float32:.2f} in float32; "
              f"{len(plan.low_groups)} of {len(plan.groups)} groups low; loss {loss:.3f}")  # fmt: skip
        plans[budget] = plan
    return plans


if __name__ == "__main__":
    main("--small" in sys.argv)
