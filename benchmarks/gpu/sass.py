"""Count the cycles that a kernel's machine code takes to issue, from NVIDIA's disassembly; needs no GPU.

A scheduler issues one instruction of a warp (32 threads) a cycle. An instruction whose unit has 16 lanes takes the
scheduler's unit for two cycles, one of 4 lanes for eight (CUDA programming guide, "Arithmetic Instructions", compute
capability 8.0 to 10.0). Cycles are added up as if nothing issued beside an instruction of the slower units: waiting for
memory, which other warps fill, is not counted.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from fxprec.numerics import ahead

# fmt: off
HALF_RATE = frozenset((
    "IADD3", "IADD", "VIADD", "IMNMX", "VIMNMX", "VIMNMX3", "VIADDMNMX", "ISETP", "LOP3", "LOP", "PLOP3", "SHF",
    "SHL", "SHR", "PRMT", "LEA", "SEL", "IABS", "SGXT", "BMSK", "FMNMX", "FMNMX3", "FSETP", "FSEL", "F2FP", "F2IP",
    "I2IP", "I2FP", "HMNMX2", "HSETP2", "R2P", "P2R", "IMAD", "ISCADD", "VABSDIFF", "FCHK", "DADD", "DMUL", "DFMA",
    "DSETP",
))
# fmt: on
SLOW = frozenset(("MUFU", "I2F", "F2I", "F2F", "FRND", "POPC", "FLO", "BREV", "SHFL", "REDUX"))
_LINE = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:@(!?U?P\w+)\s+)?([A-Z][\w.]*)\s*([^;]*);")


@dataclass(frozen=True)
class Mix:
    """Instructions of one warp, by the rate at which they issue."""

    full: int = 0
    half: int = 0
    slow: int = 0

    @classmethod
    def of(cls, opcode: str) -> Mix:
        name = opcode.partition(".")[0]
        return cls(slow=1) if name in SLOW else cls(half=1) if name in HALF_RATE else cls(full=1)

    def __add__(self, other: Mix) -> Mix:
        return Mix(self.full + other.full, self.half + other.half, self.slow + other.slow)

    @property
    def cycles(self) -> int:
        return self.full + 2 * self.half + 8 * self.slow

    @property
    def instructions(self) -> int:
        return self.full + self.half + self.slow


@dataclass(frozen=True)
class Instruction:
    """One line of the disassembly."""

    at: int
    is_predicated: bool
    opcode: str
    operands: str

    @property
    def target(self) -> int | None:
        """Where it branches to. A loop may be left by a call that never returns."""
        if not self.opcode.startswith(("BRA", "CALL.REL")):
            return None
        found = re.findall(r"0x([0-9a-f]+)", self.operands)
        return int(found[-1], 16) if found else None


@dataclass(frozen=True)
class Code:
    """What a warp issues: once, and in each turn of each loop. Branches take the side that is shorter.

    So a branch that only some launches take, such as that of a gradient's moments, is left out.
    """

    once: Mix
    loops: tuple[Mix, ...]
    warps: int

    def cycles(self, turns: int = 1) -> int:
        """Return cycles of all warps of one program whose loops turn so often."""
        return self.warps * (self.once.cycles + turns * sum(loop.cycles for loop in self.loops))


def code_of(compiled: Any) -> Code:
    """Read a kernel that Triton compiled."""
    return read(ahead.disassembled(compiled, "-sass"), int(compiled.metadata.num_warps))


def read(text: str, warps: int = 4) -> Code:
    """Read the disassembly of one kernel. A loop inside of another is counted once a turn of the outer one."""
    lines = list(_instructions(text))
    after = {line.at: _successors(line, lines[i + 1 : i + 2]) for i, line in enumerate(lines)}
    mixes = {line.at: Mix.of(line.opcode) for line in lines}
    loops = tuple(_loops(lines, after, mixes))
    last = max((max(body) for body in loops), default=0)  # a program leaves early only where it has no turn to take
    ends = {line.at for line in lines if line.opcode.startswith("EXIT") and (not line.is_predicated or line.at > last)}
    once = _shortest(lines[0].at, ends, after, mixes)
    if once is None:  # what few programs do is a loop at the end
        once = _shortest(lines[0].at, {line.at for line in lines if line.opcode.startswith("EXIT")}, after, mixes)
    assert once is not None, "no way to the end"
    taken = set(once)
    inside = [body for body in loops if body <= taken]  # a way that passes through a loop counts its first turn
    rest = sum((mixes[at] for at in taken.difference(*inside)), Mix())
    return Code(rest, tuple(sum((mixes[at] for at in body), Mix()) for body in loops), warps)


def _instructions(text: str) -> Iterator[Instruction]:
    for at, predicate, opcode, operands in _LINE.findall(text):
        yield Instruction(int(at, 16), bool(predicate) and predicate != "PT", opcode, operands)


def _successors(line: Instruction, following: list[Instruction]) -> list[int]:
    target = line.target
    stops = (target is not None or line.opcode.startswith(("EXIT", "RET"))) and not line.is_predicated
    # ``BRA.U UP0, ...`` and ``BRA.DIV UR4, ...`` have their condition among the operands; most calls return.
    is_conditional = target is not None and (line.opcode != "BRA" or line.operands.strip().startswith(("UP", "!", "P")))
    found = [] if stops and not is_conditional else [nxt.at for nxt in following]
    return found if target is None else [*found, target]


def _shortest(
    start: int, ends: set[int], after: Mapping[int, list[int]], mixes: Mapping[int, Mix], within: range | None = None
) -> list[int] | None:
    """Return the addresses of the cheapest way from ``start`` to one of ``ends``."""
    best, before = {start: mixes[start].cycles}, dict[int, int]()
    queue = [(best[start], start)]
    while queue:
        spent, at = heapq.heappop(queue)
        if at in ends:
            way = [at]
            while way[-1] != start:
                way.append(before[way[-1]])
            return way
        for nxt in after[at]:
            if nxt not in mixes or (within is not None and nxt not in within):
                continue
            cost = spent + mixes[nxt].cycles
            if cost < best.get(nxt, cost + 1):
                best[nxt], before[nxt] = cost, at
                heapq.heappush(queue, (cost, nxt))
    return None


def _loops(
    lines: list[Instruction], after: Mapping[int, list[int]], mixes: Mapping[int, Mix]
) -> Iterator[frozenset[int]]:
    """Yield one turn of each outermost loop: a branch back, and the cheapest way to it from where it leads."""
    found: list[tuple[int, int, frozenset[int]]] = []
    for line in lines:
        target = line.target
        if target is None or target >= line.at:
            continue
        way = _shortest(target, {line.at}, after, mixes, range(target, line.at + 1))
        if way is not None:
            found.append((target, line.at, frozenset(way)))
    for first, last, body in found:
        if not any(a <= first and last <= b and (a, b) != (first, last) for a, b, _ in found):
            yield body
