"""Compile every kernel around GEMMs for four architectures, without a GPU: registers, spills, shared memory, instructions.

    python -m benchmarks.gpu.kernels_table

A spill or too much shared memory is a failure. Instructions are those of a thread, cycles those in which a scheduler issues
them for a warp (`benchmarks.gpu.sass`): once, and in each turn of its loop. A branch that only some launches take is left
out, as that of the moments. A generated GEMM's rate in ``gemm_costs.json`` follows from them: 2 * rows * columns * depth
of a tile, by the cycles of a turn for a quarter of the warps, times multiprocessors and clock.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from benchmarks import machine
from benchmarks.gpu.sass import Mix, code_of
from fxprec.numerics import ahead
from fxprec.runtime.gemm import kernels


def rows() -> list[dict[str, Any]]:
    """Return one entry a kernel and architecture."""
    found = []
    for arch in ahead.ARCHITECTURES:
        for case in kernels.cases(arch):
            compiled = case.compile(arch)
            used, code = ahead.resources(compiled, arch), code_of(compiled)
            once, turn = code.once, sum(code.loops, Mix())
            row = {"kernel": case.name, **used.to_dict(), "fits": used.fits, "warps": code.warps}
            found.append(row | {"once": asdict(once), "each_turn": asdict(turn)})
            print(
                f"sm_{arch:<4} {case.name:48} {used.registers:4} registers {used.spilled:5} spilled {used.shared:7} shared "
                f"{once.instructions:5} + {turn.instructions:4} instructions {once.cycles:5} + {turn.cycles:4} cycles",
                flush=True,
            )
    return found


def main() -> int:
    found = rows()
    path = machine.save("gemm-kernels", found)
    failed = [row for row in found if not row["fits"]]
    print(f"{len(found)} kernels, {len(failed)} of them spill or are too large; written to {path.name}")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
