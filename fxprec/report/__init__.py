"""Look into a compiled graph: dump folders, comparison and explanation of plans, the HTML report."""
