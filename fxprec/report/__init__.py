"""Inspect compiled graphs: dump folders, comparison of plans and of runs, the HTML report."""
