"""Find the moments of a replayed step at which too many bytes are live, and what each way holds then.

For the ways of the replayed choice the bytes are the replay's. For all others they are estimates, from the order of the
nodes: good for few changes of the choice.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch.fx import Node

from fxprec.passes.analysis.replay.kernels import Kind, kind_of, result_bytes
from fxprec.passes.analysis.replay.replay import Replay
from fxprec.passes.analysis.replay.step import Step
from fxprec.passes.analysis.ways import Form, Way
from fxprec.passes.budget_part import Bound
from fxprec.passes.crossings.problem import Problem, Row, Ways

MOMENTS, NEAR = 12, 8  # the most rows of one choice, and the kernels within which only the moment of most bytes has one
_NEVER = np.iinfo(np.int64).max


@dataclass(frozen=True)
class Fit:
    """A choice, and the tensors in memory when it is replayed."""

    replay: Replay
    ways: Ways
    seconds: float
    """Predicted time of recomputing, rounding and moving values."""

    @property
    def peak(self) -> int:
        """Return the live bytes at the step's peak."""
        return self.replay.peak

    @property
    def waiting(self) -> int:
        """Return the bytes that are live between forward and backward: saved tensors and outputs."""
        return self.replay.timeline.waiting

    def excess(self, bound: Bound) -> float:
        """Return the most bytes by which the choice exceeds either limit of a bound; 0 or less if it does not."""
        return max(self.peak - bound.peak, self.waiting - bound.waiting)

    def above(self, bound: Bound) -> float:
        """Return the bytes above a bound, summed over all moments of the step; 0 if it is within the bound."""
        waiting = max(self.waiting - bound.waiting, 0)
        return waiting + sum(live - bound.peak for live in self.replay.timeline.live if live > bound.peak)


@dataclass(frozen=True)
class Moment:
    """A moment of the step, with the bytes that are live then.

    ``sizes`` has, by column, the bytes of each way that is live then, or would be. ``base`` has all other live bytes.
    """

    sizes: dict[int, float]
    base: float
    is_between: bool = False
    """Whether this is the moment between forward and backward."""

    def row(self, bound: Bound) -> Row:
        """Return the solver's row: coefficients by column, lower and upper limit, in bytes."""
        return self.sizes, -np.inf, (bound.waiting if self.is_between else bound.peak) - self.base


class Moments:
    """The moments of replayed choices of one problem."""

    def __init__(self, problem: Problem) -> None:
        self._problem, step = problem, problem.needs.step
        self._order = {n: i for half in (step.forward, step.backward) for i, n in enumerate(half)}
        self._in_backward = step.backward_set
        first, last = _reads_in_backward(problem)
        last_in_forward = _reads_in_forward(step)

        def column(node: Node, way: Way) -> tuple[int, ...]:
            """Return the first and last times in each half, and the bytes: in forward, until backward reads, after."""
            kept = problem.size(node, way) if isinstance(way, Form) else 0
            unread = kept if _waits(way) else 0
            leaves = last_in_forward[node] if way.is_on_host else _NEVER
            times = self._order[node], leaves, first.get(node, _NEVER), last.get(node, -1)
            return *times, kept, unread, _once_read(step, node, way, kept)

        columns = np.array([column(*key) for key in problem.columns], np.int64).reshape(-1, 7)
        self._made, self._leaves, self._first, self._last, self._kept, self._unread, self._read = columns.T
        self._waits = np.array([_waits(way) for _, way in problem.columns], bool)

    def above(self, fit: Fit, bound: Bound, most: int = MOMENTS, near: int = NEAR) -> Iterator[Moment]:
        """Yield the ``most`` moments above a bound at which most bytes are live, one of those ``near`` each other."""
        live = fit.replay.timeline.live
        tops = [
            t
            for t in range(len(live))
            if live[t] > bound.peak and live[t] == max(live[max(t - near, 0) : t + near + 1])
        ]
        for time in sorted(tops, key=lambda t: -live[t])[:most]:
            yield self._moment(fit, live[time], self._living(fit, time))
        if fit.waiting > bound.waiting:
            yield self._moment(fit, fit.waiting, self._waiting(fit), is_between=True)

    def _moment(self, fit: Fit, live: int, sizes: npt.NDArray[np.int64], *, is_between: bool = False) -> Moment:
        chosen = [self._problem.columns[key] for key in fit.ways.items()]
        columns = np.flatnonzero(sizes)
        found = dict(zip(columns.tolist(), sizes[columns].astype(float).tolist(), strict=True))
        return Moment(found, float(live - sizes[chosen].sum()), is_between)

    def _waiting(self, fit: Fit) -> npt.NDArray[np.int64]:
        """Return for each column the bytes of its tensor that waits for backward, or would."""
        sizes, split = np.where(self._waits, self._kept, 0), fit.replay.timeline.split
        for key in fit.ways.items():
            if _waits(key[1]) and not fit.replay.lives(key[0], split, recomputed=False):
                sizes[self._problem.columns[key]] = 0
        return sizes

    def _living(self, fit: Fit, time: int) -> npt.NDArray[np.int64]:
        """Return for each column its live bytes at one time of a replayed step, or those that its way would hold."""
        sizes = self._would_hold(fit.replay.anchors[fit.replay.timeline.order[time]])
        for node, way in fit.ways.items():
            live = fit.replay.live_bytes(node, time, recomputed=not isinstance(way, Form))
            sizes[self._problem.columns[node, way]] = live
        return sizes

    def _would_hold(self, anchor: Node) -> npt.NDArray[np.int64]:
        """Estimate for each column the live bytes while ``anchor`` runs, if backward got the value in this way."""
        now = self._order[anchor]
        if anchor not in self._in_backward:
            return np.where((self._made <= now) & (now <= self._leaves), self._kept, 0)
        return np.where(now > self._last, 0, np.where(self._first <= now, self._read, self._unread))


def _waits(way: Way) -> bool:
    """Return whether a way keeps a tensor on the device between forward and backward."""
    return isinstance(way, Form) and not way.is_on_host


def _once_read(step: Step, node: Node, way: Way, kept: int) -> int:
    """Estimate the live bytes of a value once backward has begun to read it."""
    if not isinstance(way, Form):
        return result_bytes(node) if _is_in_memory(node) else 0
    is_decoded_by_kernel = way.format is not None and (
        step.cast_kernels.kind(way.format) is not Kind.FUSED or way.kernel is not Kind.FUSED
    )
    return result_bytes(node) if is_decoded_by_kernel and _waits(way) else kept


def _reads_in_backward(problem: Problem) -> tuple[dict[Node, int], dict[Node, int]]:
    """Return when backward first and last reads each value, by position among backward's nodes.

    For values that only repeated nodes read, the positions are estimates.
    """
    step = problem.needs.step
    first: dict[Node, int] = {}
    last: dict[Node, int] = {}
    for position, node in enumerate(step.backward):
        for wanted in map(step.undecoded, step.wanted_by(node)):
            first.setdefault(wanted, position)
            last[wanted] = position
    for node in reversed(problem.nodes):
        for source in problem.sources(node) if node in first else ():
            last[source] = max(last.get(source, 0), first[node])
            first.setdefault(source, first[node])
    return first, last


def _reads_in_forward(step: Step) -> dict[Node, int]:
    """Return when forward last reads each value, views included, by position among forward's nodes."""
    last = dict[Node, int]()
    for position, node in reversed([*enumerate(step.forward)]):
        last.setdefault(node, position)
        for source in map(step.undecoded, node.all_input_nodes):
            last[source] = max(last.get(source, 0), last[node] if kind_of(node) is Kind.VIEW else position)
    return last


def _is_in_memory(node: Node) -> bool:
    """Estimate whether a recomputed value is written to memory."""
    kind = kind_of(node)
    if kind is not Kind.FUSED:
        return kind not in (Kind.FREE, Kind.VIEW)
    return any(kind_of(user) is Kind.EXTERN for user in node.users)
