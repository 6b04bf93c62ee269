"""Replay a step kernel by kernel without running it: what each node allocates, and what lives at each moment."""
