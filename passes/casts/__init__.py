"""Place casts: sites, the nodes of a cast, and the tensors that get a cast in each storage."""
