"""Overlap copies to host memory and back with kernels: place the waits, and sum the seconds that kernels wait.

Copies run one after the other on a stream of their own, kernels on another stream. A tensor takes device memory until a
kernel waits for its copy out, and again from the start of its copy back. A copy overlaps with kernels as long as the
bound leaves memory for its tensor. The rest of its time is exposed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fxprec.passes.analysis.replay.replay import Replay
from fxprec.passes.crossings.costs import Rates
from fxprec.passes.crossings.moments import Fit
from fxprec.passes.crossings.problem import Problem


@dataclass(frozen=True)
class Copy:
    """A copy that begins behind kernel ``at``; behind kernel ``needless`` only the copy still reads its tensor."""

    at: int
    needless: int
    bytes: int
    seconds: float


@dataclass(frozen=True)
class CopyWaits:
    """The kernel after which each copy is waited for, and the total seconds that kernels wait."""

    after: list[int]
    exposed: float


def place_waits(seconds: Sequence[float], live: Sequence[float], copies: Sequence[Copy], bound: float) -> CopyWaits:
    """Return when each copy is waited for, beside kernels that take ``seconds`` and have ``live`` bytes in memory.

    A copy is waited for as soon as it is done, or earlier if the next kernel would exceed ``bound``. All copies are
    done behind the last kernel.
    """
    clock = lane = 0.0
    after = [0] * len(copies)
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
                # A tensor that is live for another reason is already part of ``live``.
                if sum(copies[j].bytes for j, end in ready[number:] if end > clock) <= room:
                    break
                clock = done
            after[i] = time
            pending.remove((i, done))
    return CopyWaits(after, clock - sum(seconds))


def overlap(replay: Replay, rates: Rates, bound: float) -> float:
    """Overlap the copies of a replayed step with its kernels, within ``bound``; return the exposed seconds.

    Afterwards the replay also counts tensors that wait for their copy.
    """
    if not replay.offloads:
        return 0.0
    line = replay.timeline
    time = {item: t for t, item in enumerate(line.order)}
    seconds, end = _seconds(replay, rates), len(line.order) - 1
    values = [value for value, _ in replay.reloaded]

    def stored(value: object) -> int:
        return replay.copies.get(value, replay.at[value])  # type: ignore[call-overload, index, no-any-return]

    def copy(value: object, at: int, needless: int) -> Copy:
        size = replay.items[replay.reloads[value]].bytes  # type: ignore[index]
        return Copy(at, needless, size, size / rates.host_bytes_per_s)

    offloads = [copy(v, time[replay.offloads[v]], line.dies[stored(v)]) for v in values]
    found = place_waits(seconds[: line.split], line.live[: line.split], offloads, bound)
    # With time reversed a copy back is a copy out: it begins at its reader, and its tensor is live until it is done.
    reloaded = sorted(values, key=lambda v: -time[replay.reloads[v]])
    reloads = [copy(v, end - time[replay.reloads[v]], end - time[replay.reloads[v]]) for v in reloaded]
    backwards = place_waits(seconds[: line.split - 1 : -1], line.live[: line.split - 1 : -1], reloads, bound)
    for value, kernel in zip(values, found.after, strict=True):
        line.extend(stored(value), dies=kernel)
        replay.sent[value] = replay.anchors[line.order[kernel]]
    for value, ahead in zip(reloaded, backwards.after, strict=True):
        line.extend(replay.reloads[value], born=end - ahead)
        replay.fetched[value] = replay.anchors[line.order[end - ahead]]
    return found.exposed + backwards.exposed


def _seconds(replay: Replay, rates: Rates) -> list[float]:
    """Return the seconds of each kernel of a replay; copies to and from host memory take none of their stream."""
    lane, stored = {*replay.offloads.values(), *replay.reloads.values()}, {*replay.copies.values()}

    def taken(item: int) -> float:
        if item in lane:
            return 0.0
        return replay.items[item].bytes / rates.bytes_per_s if item in stored else rates.running(replay.made[item])

    return [taken(item) for item in replay.timeline.order]


def overlapped(fit: Fit, problem: Problem, bound: float) -> Fit:
    """Return a choice with its copies overlapped within ``bound``, and with only the exposed time in its seconds."""
    if not fit.replay.offloads:
        return fit
    replay = Replay(problem.needs.step, fit.replay.kept)
    moved = [(node, form) for node, form in replay.kept.items() if form.is_on_host]
    counted = sum(problem.moving(problem.size(node, form)) for node, form in moved)
    exposed = overlap(replay, problem.rates, bound) + 2 * len(moved) * problem.rates.call_s
    return replace(fit, replay=replay, seconds=fit.seconds - counted + exposed)
