"""Networks for examples, tests and benchmarks; each takes a ``width`` multiplier.

``resnet``, ``mobilenet``, ``shufflenet`` and ``squeezenet`` are the CIFAR networks of "Training with
Mixed-Precision Floating-Point Assignments" (21, 58, 57 and 26 GEMM operators); ``small_cnn`` and
``char_transformer`` are the two of ``fxprec demo``; ``planned`` has full-size ones for ``fxprec dump``.
"""
