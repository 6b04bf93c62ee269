"""CPU kernels: one compiled pass over memory per stored tensor."""
