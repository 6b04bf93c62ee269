"""Making a failure small: which tensor, held low, causes an error, and the smallest graph that shows it."""

from __future__ import annotations

from fxprec.minify.oracle import largest_error as largest_error
