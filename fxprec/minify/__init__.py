"""Reduces a failure: which low tensor causes an error, and the smallest graph that shows it."""

from __future__ import annotations

from fxprec.minify.oracle import largest_error as largest_error
