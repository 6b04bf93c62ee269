"""Command functions that `fxprec.cli` registers."""
