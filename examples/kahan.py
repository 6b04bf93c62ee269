"""Train with 16-bit weights and nothing wider: no float32 copy of a weight, a gradient or an activation exists.

python examples/kahan.py    --small for a quick look
"""

import sys

import torch
import torch.nn.functional as F

import fxprec
from fxprec.demo.data import VOCAB, load_text
from fxprec.demo.models import CharTransformer

LR = 5e-4  # small updates, which bfloat16's 8 bits of a weight mostly swallow


def train(update: str, small: bool) -> float:
    """Return the held-out loss, in nats a character."""
    torch.compiler.reset()
    torch.manual_seed(0)
    steps, text = (4, load_text(20_000)) if small else (400, load_text())
    model = CharTransformer(vocab=VOCAB, layers=1 if small else 2, width=16 if small else 64).bfloat16()

    # "bf16-pure" refuses a model with wider weights; fxprec.optim rounds each operation of the step to 16 bits.
    options = {"recipe": "bf16-pure", "lowering": "eager" if small else "auto"}
    compiled = torch.compile(model, backend="fxprec", options=options)
    optimizer = fxprec.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.997), update=update, count_cancelled=True)

    for _ in range(steps):
        inputs, targets = windows(text.train, 32)
        loss = F.cross_entropy(compiled(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    inputs, targets = windows(text.held_out, 256)
    with torch.no_grad():
        held_out = F.cross_entropy(model(inputs).float().flatten(0, 1), targets.flatten()).item()
    rows = optimizer.cancelled()
    lost = sum(row.cancelled for row in rows) / sum(row.nonzero for row in rows)
    print(f"{update:10}: held-out loss {held_out:.4f}; {lost:.0%} of the updates were lost to rounding")
    return held_out


def windows(codes: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    found = codes[torch.randint(len(codes) - 64, (count, 1)) + torch.arange(65)]
    return found[:, :-1], found[:, 1:]


def main(small: bool = False) -> dict[str, float]:
    updates = ("nearest", "kahan") if small else ("nearest", "stochastic", "kahan")
    return {update: train(update, small) for update in updates}


if __name__ == "__main__":
    main("--small" in sys.argv)
