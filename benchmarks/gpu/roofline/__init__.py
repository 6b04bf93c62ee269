"""What a training step would move, multiply and launch on a GPU that is not there, counted in Inductor's code for it."""
