"""The operators that passes insert and that lowering turns into code."""
