"""Read what was decided, change it by hand, and train with the changed plan.

python examples/edit_plan.py    --small for a quick look
"""

import json
import sys
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F

import fxprec
from fxprec.demo.models import SmallCNN


def train(options: dict[str, object], small: bool) -> tuple[float, fxprec.Plan]:
    torch.compiler.reset()
    torch.manual_seed(0)
    model = SmallCNN(width=4 if small else 16)
    images, labels = torch.randn(64, 1, 8, 8), torch.randint(10, (64,))
    compiled = torch.compile(model, backend="fxprec", options={"lowering": "eager" if small else "auto", **options})
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for _ in range(2 if small else 50):
        loss = F.cross_entropy(compiled(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss.item(), fxprec.backend_of(compiled).plans[0]


def show(title: str, loss: float, plan: fxprec.Plan) -> None:
    print(f"{title}: {plan.achieved_low_ratio:.0%} of the elements low, loss {loss:.4f}")
    for group in plan.groups:
        sites = [site for site in plan.sites if site.group == group.id and site.direction == "forward"]
        modules = ", ".join(dict.fromkeys(site.module for site in sites if site.module))
        print(f"  group {group.id} {'low ' if group.low else 'high'} {group.elements:8,} elements: {modules}")


def main(small: bool = False) -> tuple[fxprec.Plan, fxprec.Plan]:
    loss, solved = train({"recipe": "fp8", "low_ratio": 0.5}, small)
    show("solved", loss, solved)

    # A plan is a JSON file; to switch a group is to change one word. Its sites follow when it is loaded.
    path = Path(tempfile.mkdtemp()) / "plan.json"
    solved.save(path)
    entries = json.loads(path.read_text())
    for group in entries["groups"]:
        group["low"] = group["id"] != 0  # all but the first
    path.write_text(json.dumps(entries))

    loss, edited = train({"recipe": "fp8", "plan": str(path)}, small)
    show("edited", loss, edited)
    return solved, edited


if __name__ == "__main__":
    main("--small" in sys.argv)
