"""The plan, immutable data that gives each tensor's format, and plan files."""

from fxprec.plan.plan import Plan
from fxprec.plan.rows import ByteCount, Gemm, Group, KindCounts, PeakBytes, PeakPoint, SavedTensor, Site

__all__ = [
    "ByteCount",
    "Gemm",
    "Group",
    "KindCounts",
    "PeakBytes",
    "PeakPoint",
    "Plan",
    "SavedTensor",
    "Site",
]
