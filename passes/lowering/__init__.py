"""Making the symbolic ops of a partitioned graph real."""
