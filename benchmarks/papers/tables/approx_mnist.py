"""Dettmers 2016, sections 3.4 and 4.2: an MLP with gradients, or activations, in four 8-bit types and in one bit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from benchmarks.papers import svg
from benchmarks.papers.claims import Claim, Verdict, lower, together
from benchmarks.papers.eight_bit import (
    ONE_BIT,
    TYPES,
    Network,
    Send,
    WithFeedback,
    digits,
    same_as_float32,
    sent,
    tested,
    train,
)
from benchmarks.papers.found import Found, Row

TITLE = "An MLP with gradients, or activations, in 8 bits and in one"
SOURCE = "sections 2.4, 3.4 and 4.2, MNIST"
PUBLISHED: dict[str, dict[str, float]] = {}
SMALLER = (
    "8x8 digits (360 test images: one is 0.28 points) take the place of MNIST. The MLP is 64-128-128-10 in place of "
    "784-1024-1024-10, trained for 20 epochs."
)
DEVIATES = (
    "The error is that after the last epoch, where the paper takes the best one on the test set. Data parallel: "
    "every gradient is sent in 8 bits and none is kept in 32, as in the paper's simulation. Model parallel: each "
    "layer's result and its gradient are sent. In sub-batches each quarter of a batch is sent by itself "
    "(`fxprec.aps.sub_batches`). One bit is Seide et al.'s method: it sends each number's sign, and for each row "
    "the mean of each sign. The paper cites the method and does not run it. The paper prints no errors, only "
    "that they do not differ."
)
SEEDS = 10
EPOCHS = 20
SUB_BATCHES = f"4 sub-batches, model parallel, {TYPES[0]}"


def parts(full: bool) -> Sequence[str]:
    """32 bits, 8 bits in either kind of parallelism, sub-batches, one bit."""
    return "32-bit", "data parallel", "model parallel", SUB_BATCHES, ONE_BIT


def run(seed: int, full: bool, part: str) -> Iterator[Row]:
    """Each type in the part; one bit with and without feedback."""
    if part == "32-bit":
        yield part, one(seed)
    elif part == SUB_BATCHES:
        yield part, one(seed, crosses=TYPES[0], sub_batches=4)
    elif part == ONE_BIT:
        yield f"{ONE_BIT}, data parallel", one(seed, WithFeedback(ONE_BIT))
        yield f"{ONE_BIT}, data parallel, no feedback", one(seed, lambda p: sent(p.grad, ONE_BIT))
        yield f"{ONE_BIT}, model parallel", one(seed, crosses=ONE_BIT)
    for name in TYPES if part in ("data parallel", "model parallel") else ():
        if part == "data parallel":
            yield f"{part}, {name}", one(seed, lambda p, name=name: sent(p.grad, name))
        else:
            yield f"{part}, {name}", one(seed, crosses=name)


def one(seed: int, send: Send | None = None, crosses: str | None = None, sub_batches: int = 1) -> dict[str, float]:
    """One training run."""
    torch.manual_seed(seed)
    model, data = Network(), digits()
    model.crosses, model.sub_batches = crosses, sub_batches
    optimizer = torch.optim.RMSprop(model.parameters(), lr=0.003, alpha=0.9)
    train(model, data, optimizer, EPOCHS, send)
    return tested(model, data)


def _too_coarse(found: Found) -> Verdict:
    return together(*(lower(f"model parallel, {n}", f"{ONE_BIT}, model parallel", "loss")(found) for n in TYPES))


CLAIMS = [
    Claim("no 8-bit type's test error differs from 32 bits, data or model parallel (99 %, Welch)", same_as_float32()),
    Claim("no 8-bit type's held-out loss differs from 32 bits either", same_as_float32("loss")),
    Claim(
        "gradients in one bit with error feedback train as 32 bits do (section 4.2)",
        same_as_float32("loss", only=f"{ONE_BIT}, data parallel"),
    ),
    Claim("one bit is too coarse for activations: every 8-bit type ends with a lower loss (section 4.2)", _too_coarse),
]


def draw(found: Found) -> str:
    """Test error of each type."""
    groups = {"32-bit": {"": found.mean("32-bit", "test error, %")}}
    for kind in ("data", "model"):
        groups[f"{kind} parallel"] = {n: found.mean(f"{kind} parallel, {n}", "test error, %") for n in TYPES}
        groups[f"{kind} parallel"][ONE_BIT] = found.mean(f"{ONE_BIT}, {kind} parallel", "test error, %")
    return svg.bars(groups, "test error, %")
