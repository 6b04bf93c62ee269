"""The plan: which tensor has which format, as immutable data, and its files."""

from fxprec.plan.files import SCHEMA
from fxprec.plan.plan import Plan
from fxprec.plan.rows import ByteCount, Gemm, Group, KindCounts, PeakBytes, Site

__all__ = ["SCHEMA", "ByteCount", "Gemm", "Group", "KindCounts", "PeakBytes", "Plan", "Site"]
