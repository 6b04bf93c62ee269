"""The GPU benchmark suite: ``python -m benchmarks.gpu`` (docs/gemm.md)."""
