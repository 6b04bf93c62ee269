"""Training a network whose activations overflow 8 bits: promotion is what makes it learn."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from backend_helpers import eager_backend
from models import Apply
from torch import nn

from fxprec import Backend
from fxprec.demo.data import load_digits

STEPS, BATCH = 120, 64


def loud_cnn() -> nn.Module:
    """(batch, 1, 8, 8) images to 10 logits; every activation is 1e4 times what it would be."""
    convolutions = nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 16, 3, padding=1, stride=2), nn.ReLU()
    classifier = nn.Flatten(), nn.Linear(256, 10)
    return nn.Sequential(Apply(lambda x: x * 1e4), *convolutions, *classifier, Apply(lambda x: x * 1e-4))


def accuracy(backend: Backend | None, steps: int = STEPS) -> float:
    """Train and return the test accuracy of the uncompiled module."""
    torch.compiler.reset()
    torch.manual_seed(0)
    digits, model = load_digits(), loud_cnn()
    called = model if backend is None else torch.compile(model, backend=backend)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        chosen = torch.randint(len(digits.train_labels), (BATCH,), generator=generator)
        F.cross_entropy(called(digits.train_images[chosen]), digits.train_labels[chosen]).backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        return float((model(digits.test_images).argmax(1) == digits.test_labels).float().mean())


def test_it_trains_with_promotion_and_stalls_without() -> None:
    """Where every reader gets the rounded value: saturated, an activation is the same for every image."""
    exact = accuracy(None)
    promoting = eager_backend("simulate", recipe="hfp8", low_ratio=1.0)
    stuck = eager_backend("simulate", recipe="hfp8", low_ratio=1.0, promote_above=None)
    with_promotion, without = accuracy(promoting), accuracy(stuck, STEPS // 3)
    plan = promoting.plans[0]
    print(f"fp32 {exact:.3f}, promoted {with_promotion:.3f} ({plan.promoted_ratio:.1%}), none {without:.3f}")
    assert exact > 0.9
    assert accuracy(None, STEPS // 3) > 0.8, "fp32 had learnt by then"
    assert with_promotion > exact - 0.02
    assert without < 0.5
    assert stuck.plans[0].promoted_ratio == 0
    # Every activation overflows and every one is promoted: gradients and parameters stay low.
    assert 0.3 < plan.promoted_ratio < 0.6
    assert {site.kind for site in plan.promoted} == {"output"}


def test_where_forward_reads_values_only_gradients_are_at_stake() -> None:
    promoting = eager_backend("packed", recipe="hfp8", low_ratio=1.0)
    assert accuracy(promoting) > accuracy(None) - 0.02
    plan = promoting.plans[0]
    assert [site.tensor for site in plan.promoted] == [s.tensor for s in plan.sites if s.reads == "backward"]
