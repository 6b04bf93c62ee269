"""Zamirai et al. 2020, Figures 10 to 12: fewer bits, both techniques at once, and float16."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.papers import svg
from benchmarks.papers.claims import Claim, Verdict, lower, most, no_worse
from benchmarks.papers.found import Found, Row
from benchmarks.papers.sixteen_bit import BOTH, FP32, KAHAN, STOCHASTIC, Training, constant
from benchmarks.papers.sixteen_bit_tasks import clicks, trained
from fxprec.numerics.formats import parse

TITLE = "Fewer than 16 bits, both techniques, and float16"
SOURCE = "Figures 10, 11 and 12"
PUBLISHED: dict[str, dict[str, float]] = {}
FORMATS = {16: "bf16", 14: "1-8-5:ieee", 12: "1-8-3:ieee", 10: "1-8-1:ieee"}
SMALLER = (
    "A DLRM on generated clicks stands for Kaggle's (2,000 steps). For float16 there is also the residual CNN on "
    "digits. The paper's figures print no numbers."
)
DEVIATES = (
    "The learning rate is 0.5, five times the paper's. At 0.1, fp32 is far from its best after so few steps, and "
    "the noise of few bits helps it. Held-out loss is judged, where the paper shows training AUC. After one "
    "epoch the two are of the same kind, and a step's own loss is rounded like all else. There is no loss scale, "
    "as in the paper. The step's own loss was judged until it was seen to be rounded itself."
)
SEEDS = 3
LOSS = "loss"
HALF = "fp16"


def run(seed: int, full: bool) -> Iterator[Row]:
    """32 bits, then each width with both techniques, both at once, float16."""
    yield "32-bit", _clicks(FP32, "bf16", seed)
    for bits, name in FORMATS.items():
        for method in (STOCHASTIC, KAHAN):
            yield f"{bits}-bit, {method}", _clicks(method, name, seed)
    yield "16-bit, both", _clicks(BOTH, "bf16", seed)
    for method in (STOCHASTIC, KAHAN):
        yield f"float16, {method}", _clicks(method, HALF, seed)
    for method, name in ((FP32, "bf16"), (KAHAN, "bf16"), (STOCHASTIC, HALF), (KAHAN, HALF)):
        figures = trained("small CNN", method, seed, parse(name))
        yield f"digits, {_label(method, name)}", {LOSS: figures["loss"], "score": figures["score"]}


def _label(method: str, name: str) -> str:
    return method if method == FP32 else f"{'float16' if name == HALF else '16-bit'}, {method}"


def _clicks(method: str, name: str, seed: int) -> dict[str, float]:
    torch.manual_seed(seed)
    figures = clicks(Training(method, parse(name)), seed, 2000, 128, 0.5, constant)
    return {LOSS: figures["loss"], "score": figures["score"]}


def _margin(found: Found) -> float:
    """A tenth of what 10 bits lose with Kahan summation."""
    return abs(found.mean("10-bit, Kahan", LOSS) - found.mean("32-bit", LOSS)) / 10


def _fourteen(found: Found) -> Verdict:
    return no_worse("14-bit, Kahan", "32-bit", LOSS, _margin(found), is_loss=True)(found)


def _fewer(found: Found) -> Verdict:
    others = [f"14-bit, {STOCHASTIC}", *(f"{b}-bit, {m}" for b in (12, 10) for m in (STOCHASTIC, KAHAN))]
    return most({row: lower("32-bit", row, LOSS)(found) for row in others}, len(others))


def _both(found: Found) -> Verdict:
    return no_worse("16-bit, both", "32-bit", LOSS, _margin(found), is_loss=True)(found)


def _half(found: Found) -> Verdict:
    pairs = [("32-bit", f"float16, {m}") for m in (STOCHASTIC, KAHAN)]
    pairs += [("digits, 32-bit", f"digits, float16, {m}") for m in (STOCHASTIC, KAHAN)]
    return most({theirs: lower(ours, theirs, LOSS)(found) for ours, theirs in pairs}, len(pairs))


CLAIMS = [
    Claim("14 bits with Kahan summation train as well as 32 (Figure 10)", _fourteen),
    Claim(
        "every other width below 16 bits trains worse (Figure 10)",
        _fewer,
        "It is shown for 12 and for 10 bits. A network this small loses nothing beyond noise at 14 bits with "
        "stochastic rounding. Nor did one seed after 1,200 steps.",
    ),
    Claim("stochastic rounding and Kahan summation together match 32 bits (Figure 11)", _both),
    Claim(
        "float16 in place of bfloat16 trains worse, with either technique (Figure 12)",
        _half,
        "Gradients of networks this small lie within float16's range: the paper's cause, underflow, does not "
        "arise. Two networks were tried with both techniques, a DLRM and a CNN. float16 has three more bits of "
        "mantissa, and nothing is lost to range.",
    ),
]


def draw(found: Found) -> str:
    """Training loss by width."""
    groups = {"32": {"": found.mean("32-bit", LOSS)}}
    groups |= {str(b): {m: found.mean(f"{b}-bit, {m}", LOSS) for m in (STOCHASTIC, KAHAN)} for b in FORMATS}
    least = min(v for bar in groups.values() for v in bar.values())
    return svg.bars(groups, "held-out loss", low=0.95 * least)
