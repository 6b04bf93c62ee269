"""Compile every kernel around GEMMs for four architectures, without a GPU: registers, spills, shared memory.

    python -m benchmarks.gpu.kernels_table

A spill or too much shared memory is a failure.
"""

from __future__ import annotations

from typing import Any

from benchmarks import machine
from fxprec.numerics import ahead
from fxprec.runtime.gemm import kernels


def rows() -> list[dict[str, Any]]:
    """Return one entry a kernel and architecture."""
    found = []
    for arch in ahead.ARCHITECTURES:
        for case in kernels.cases(arch):
            used = ahead.resources(case.compile(arch), arch)
            found.append({"kernel": case.name, **used.to_dict(), "fits": used.fits})
            print(
                f"sm_{arch:<4} {case.name:48} {used.registers:4} registers {used.spilled:5} spilled {used.shared:7} shared",
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
