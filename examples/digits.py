"""Train a small residual CNN on scikit-learn's 8x8 digits with 8-bit activations.

python examples/digits.py            fp8, half of all elements low
python examples/digits.py hfp8       another recipe: fp32, bf16, fp8, hfp8
"""

import sys

import torch
import torch.nn.functional as F

import fxprec
from fxprec.demo.data import load_digits
from fxprec.demo.models import SmallCNN

EPOCHS, BATCH = 10, 64


def main(recipe: str = "fp8") -> float:
    torch.manual_seed(0)
    digits = load_digits()
    model = SmallCNN()

    # The one changed line. Everything else is the loop you already have: no GradScaler, no autocast.
    compiled = torch.compile(model, backend="fxprec", options={"recipe": recipe})

    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for epoch in range(EPOCHS):
        order = torch.randperm(len(digits.train_labels))
        for chosen in order.split(BATCH)[: len(order) // BATCH]:  # whole batches: one shape, one compilation
            loss = F.cross_entropy(compiled(digits.train_images[chosen]), digits.train_labels[chosen])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        print(f"epoch {epoch + 1:2}: loss {loss.item():.4f}")

    model.eval()
    with torch.no_grad():
        right = model(digits.test_images).argmax(dim=1) == digits.test_labels
    accuracy = right.float().mean().item()
    print(f"{recipe}: test accuracy {accuracy:.2%}")
    for plan in fxprec.backend_of(compiled).plans:
        plan.save(f"digits-{recipe}.plan.json")
        print(f"what was held low, tensor by tensor: digits-{recipe}.plan.json")
    return accuracy


if __name__ == "__main__":
    main(*sys.argv[1:2])
