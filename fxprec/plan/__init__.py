"""The plan: which tensor has which format, as immutable data, and its files."""

from fxprec.plan.data import SCHEMA, ByteCount, Gemm, Group, KindCounts, Plan, Site

__all__ = ["SCHEMA", "ByteCount", "Gemm", "Group", "KindCounts", "Plan", "Site"]
