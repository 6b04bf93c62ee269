"""Analyses of a graph for passes. They edit metadata of nodes at most; passes and `casts` edit the graph."""
