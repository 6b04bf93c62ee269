"""Place casts: sites, the nodes of a cast, and the tensors that get one in each storage."""
