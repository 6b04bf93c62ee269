"""Lower the symbolic operators of a partitioned graph to ATen, CPU kernels or Triton kernels."""
