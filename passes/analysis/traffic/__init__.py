"""Estimate the launches and bytes of a lowered half on a GPU from its nodes (`estimate.traffic_of`)."""
