"""The operators that passes insert and lowering makes real."""
