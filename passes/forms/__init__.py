"""The forms in which a value is kept for backward, one in each file. `crossings.needs` offers forms to values."""
