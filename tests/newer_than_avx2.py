"""Print what ``NPY_DISABLE_CPU_FEATURES`` must name so that NumPy uses nothing newer than AVX2; for `./dev avx2`."""

from __future__ import annotations

from numpy._core._multiarray_umath import __cpu_dispatch__, __cpu_features__

if __name__ == "__main__":
    newer = [name for name in __cpu_dispatch__ if "AVX512" in name or name == "X86_V4"]
    print(" ".join(name for name in newer if __cpu_features__.get(name)))
