"""Questions that passes ask about a graph. Only the helpers that insert casts edit one."""
