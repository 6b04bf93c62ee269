"""What passes ask of a graph: nothing here edits one but for the helpers that insert casts."""
