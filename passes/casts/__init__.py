"""Where casts go: sites, the nodes of a cast, and which tensors get one in each storage."""
