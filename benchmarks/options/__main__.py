"""Random combinations of options and habits of a training loop: each is compiled, trained and compared.

    python -m benchmarks.options --cases 500              # nightly: about 3 s a case on a busy core
    python -m benchmarks.options --cases 20 --lowering auto
    python -m benchmarks.options --cases 20 --lowering auto --device cuda
    python -m benchmarks.options --only 4711              # one case, and what is wrong with it
    python -m benchmarks.options --case "{'network': 'mlp', 'recipe': 'fp8', 'peak_budget': '95%'}"

A case is a seed. It may end in an error of fxprec's about its options; errors and warnings are counted by their words. A
budget that an error names as enough must be. Otherwise losses, gradients and steps must be float32's up to noise of the
formats' size. A resumed run, one without observers and one by the saved plan must have the same bits, and each option its
effect. A failing case is made smaller and printed, as an argument of ``--case``.
"""

from __future__ import annotations

import argparse
import ast
import logging
import random
import re
import time
from collections import Counter
from collections.abc import Iterable

import torch

import fxprec
from benchmarks.options.cases import CHOICES, Case, drawn, options_of
from benchmarks.options.check import Verdict, check
from benchmarks.options.training import Training

LOOSE = re.compile(r"\d[\d,.]*(?:e-\d+)?|'[^']*'|\b[a-z_.]*_\d+\b")


def case_of(seed: int, refused: Counter[str]) -> Case:
    """Return the first case drawn whose options do not contradict each other; count the errors of those before."""
    pick = random.Random(seed)
    while True:
        case = drawn(pick)
        try:
            Training(
                case,
                {
                    **options_of(case, "dump"),
                    **{name: 10**6 for name in case if name in ("activation_budget", "step_budget")},
                },
            )
        except fxprec.ConfigError as error:
            refused[str(error)] += 1
        else:
            return case


def shrunk(case: Case, verdict: Verdict, seconds: float) -> Case:
    """Return the case with fewer settings that fails with the same words, the smallest found in the time given."""
    end, words = time.monotonic() + seconds, kinds(verdict.failures)
    for name in list(case):
        less = {n: value for n, value in case.items() if n != name}
        if name not in ("network", "recipe") and time.monotonic() < end and kinds(check(less).failures) & words:
            case = less
    return case


def kinds(texts: Iterable[str]) -> set[str]:
    """Return the beginnings of texts, without numbers and names."""
    return {LOOSE.sub("…", text)[:60] for text in texts}


def report(what: str, texts: Counter[str]) -> None:
    """Print each kind of text once, with how often there was one of the kind."""
    by_kind: dict[str, Counter[str]] = {}
    for text, times in texts.items():
        by_kind.setdefault(kinds([text]).pop(), Counter())[text] += times
    print(f"{what}:")
    for found in sorted(by_kind.values(), key=Counter.total, reverse=True):
        print(f"  {found.total():4} {found.most_common(1)[0][0]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=500)
    parser.add_argument("--first", type=int, default=0, metavar="SEED", help="the first case")
    parser.add_argument("--only", type=int, nargs="+", metavar="SEED", help="these cases, each shown")
    parser.add_argument("--case", type=ast.literal_eval, help="this case")
    parser.add_argument("--lowering", choices=("eager", "auto", "triton"), default="eager")
    parser.add_argument("--device", choices=CHOICES["device"], default="cpu")
    parser.add_argument("--shrink", type=float, default=120.0, metavar="SECONDS", help="at most, for each failing case")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin nothing new after these")
    args = parser.parse_args()
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    if args.device == "cuda":
        torch.backends.cudnn.allow_tf32 = False
        torch.use_deterministic_algorithms(True, warn_only=True)
    refused, said, errors = Counter[str](), Counter[str](), Counter[str]()
    failed, count, start = 0, 0, time.perf_counter()
    for seed in [-1] if args.case else args.only or range(args.first, args.first + args.cases):
        if time.perf_counter() - start > args.seconds:
            break
        case = {**(args.case or case_of(seed, refused)), "lowering": args.lowering, "device": args.device}
        verdict = check(case)
        count, failed = count + 1, failed + bool(verdict.failures)
        said.update(f"{text} [{seed}]" for text in verdict.warned)
        errors.update([f"{verdict.error} [{seed}]"] if verdict.error else [])
        if args.only or args.case:
            print(f"# case {seed}: {case}\n{verdict}")
        elif verdict.failures:
            print(f"case {seed}: {'; '.join(verdict.failures)}\n  {case}", flush=True)
            print(f'  --case "{shrunk(case, verdict, args.shrink)}"', flush=True)
    for what, texts in ("refused while drawn", refused), ("errors", errors), ("warnings", said):
        report(what, texts)
    print(f"{count - failed} of {count} cases agree, {time.perf_counter() - start:.0f} s")
    raise SystemExit(bool(failed))


if __name__ == "__main__":
    main()
