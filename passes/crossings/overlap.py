"""Run copies to host memory and back beside the kernels: place the waits, and sum the seconds that kernels wait.

Copies run one after the other on a stream of their own, kernels on another. A tensor takes memory until a kernel waits
for its copy out, and again from the start of its copy back. Each copy runs as long as the bound leaves memory for; the
rest of its time is exposed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fxprec.passes.analysis.replay.step import Held
from fxprec.passes.crossings.choice import Fit
from fxprec.passes.crossings.costs import Rates
from fxprec.passes.crossings.problem import Problem


@dataclass(frozen=True)
class Copy:
    """A copy that begins behind kernel ``at``; behind kernel ``needless`` nothing but the copy reads its tensor."""

    at: int
    needless: int
    bytes: int
    seconds: float


@dataclass(frozen=True)
class Waits:
    """The kernel behind which each copy is waited for, and the seconds that kernels wait in all."""

    behind: list[int]
    exposed: float


def waits(seconds: Sequence[float], live: Sequence[float], copies: Sequence[Copy], bound: float) -> Waits:
    """Return when copies are waited for, behind kernels that take ``seconds`` and hold ``live`` bytes.

    A copy is waited for as soon as it is done, but earlier where the next kernel would hold more than ``bound``. All of
    them are done behind the last kernel.
    """
    clock = lane = 0.0
    behind = [0] * len(copies)
    pending: list[tuple[int, float]] = []  # (copy, when it is done), in the order of the stream
    for time, taken in enumerate(seconds):
        clock += taken
        for i, copy in enumerate(copies):
            if copy.at == time:
                lane = max(lane, clock) + copy.seconds
                pending.append((i, lane))
        is_last = time == len(seconds) - 1
        room = -1.0 if is_last else bound - live[time + 1]
        ready = [(i, done) for i, done in pending if copies[i].needless <= time]
        for number, (i, done) in enumerate(ready):
            if done > clock:
                # A tensor that lives on for another reason is part of ``live``.
                if sum(copies[j].bytes for j, end in ready[number:] if end > clock) <= room:
                    break
                clock = done
            behind[i] = time
            pending.remove((i, done))
    return Waits(behind, clock - sum(seconds))


def overlap(held: Held, rates: Rates, bound: float) -> float:
    """Let the copies of a replayed step run beside its kernels, within ``bound``; return the exposed seconds.

    The replay counts what waits for its copy from then on.
    """
    if not held.hosts:
        return 0.0
    line = held.timeline
    time = {item: t for t, item in enumerate(line.order)}
    seconds, end = _seconds(held, rates), len(line.order) - 1
    values = [value for value, _ in held.reloaded]

    def stored(value: object) -> int:
        return held.copies.get(value, held.at[value])  # type: ignore[call-overload, index, no-any-return]

    def copy(value: object, at: int, needless: int) -> Copy:
        size = held.items[held.back[value]].bytes  # type: ignore[index]
        return Copy(at, needless, size, size / rates.host_bytes_per_s)

    out = [copy(v, time[held.hosts[v]], line.dies[stored(v)]) for v in values]
    found = waits(seconds[: line.split], line.live[: line.split], out, bound)
    # Backward in time the copies back are copies out: each begins before its reader, and lives until it is done.
    back = sorted(values, key=lambda v: -time[held.back[v]])
    again = [copy(v, end - time[held.back[v]], end - time[held.back[v]]) for v in back]
    turned = waits(seconds[: line.split - 1 : -1], line.live[: line.split - 1 : -1], again, bound)
    for value, behind in zip(values, found.behind, strict=True):
        line.extend(stored(value), dies=behind)
        held.sent[value] = held.anchors[line.order[behind]]
    for value, ahead in zip(back, turned.behind, strict=True):
        line.extend(held.back[value], born=end - ahead)
        held.fetched[value] = held.anchors[line.order[end - ahead]]
    return found.exposed + turned.exposed


def _seconds(held: Held, rates: Rates) -> list[float]:
    """Return what each kernel of a replay takes; the copies themselves are on no kernel's stream."""
    lane, stored = {*held.hosts.values(), *held.back.values()}, {*held.copies.values()}

    def taken(item: int) -> float:
        if item in lane:
            return 0.0
        return held.items[item].bytes / rates.bytes_per_s if item in stored else rates.again(held.made[item])

    return [taken(item) for item in held.timeline.order]


def overlapped(fit: Fit, problem: Problem, bound: float) -> Fit:
    """Return a choice whose copies run beside its kernels as far as ``bound`` lets them, with the time that is left."""
    if not fit.held.hosts:
        return fit
    held = Held(problem.needs.step, fit.held.kept)
    moved = [(node, form) for node, form in held.kept.items() if form.is_on_host]
    counted = sum(problem.moving(problem.size(node, form)) for node, form in moved)
    exposed = overlap(held, problem.rates, bound) + 2 * len(moved) * problem.rates.call_s
    return replace(fit, held=held, seconds=fit.seconds - counted + exposed)
