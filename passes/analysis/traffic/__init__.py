"""What a lowered graph half moves and launches on a GPU, estimated from its nodes (`estimate.traffic_of`)."""
