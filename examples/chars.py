"""Train a small character transformer on the text of Python's own standard library with 8-bit activations.

python examples/chars.py             fp8, half of all elements low
python examples/chars.py hfp8        another recipe: fp32, bf16, fp8, hfp8
"""

import sys

import torch
import torch.nn.functional as F

import fxprec
from fxprec.demo.data import VOCAB, load_text
from fxprec.demo.models import CharTransformer

STEPS, BATCH, CONTEXT = 250, 32, 64


def windows(codes: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    starts = torch.randint(len(codes) - CONTEXT, (count, 1))
    found = codes[starts + torch.arange(CONTEXT + 1)]
    return found[:, :-1].contiguous(), found[:, 1:].contiguous()


def loss_of(model: torch.nn.Module, codes: torch.Tensor, count: int = BATCH) -> torch.Tensor:
    inputs, targets = windows(codes, count)
    return F.cross_entropy(model(inputs).float().flatten(0, 1), targets.flatten())


def main(recipe: str = "fp8") -> float:
    torch.manual_seed(0)
    text = load_text()
    model = CharTransformer(vocab=VOCAB, context=CONTEXT)

    # The one changed line. Everything else is the loop you already have: no GradScaler, no autocast.
    compiled = torch.compile(model, backend="fxprec", options={"recipe": recipe})

    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for step in range(1, STEPS + 1):
        loss = loss_of(compiled, text.train)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 25 == 0:
            print(f"step {step:3}: loss {loss.item():.3f} nats a character")

    with torch.no_grad():
        held_out = loss_of(model, text.held_out, 256).item()
    print(f"{recipe}: held-out loss {held_out:.3f} nats a character")
    for plan in fxprec.backend_of(compiled).plans:
        plan.save(f"chars-{recipe}.plan.json")
        print(f"what was held low, tensor by tensor: chars-{recipe}.plan.json")
    return held_out


if __name__ == "__main__":
    main(*sys.argv[1:2])
