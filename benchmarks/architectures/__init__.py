"""Many architectures trained for a few steps: everything that ``aot_eager`` compiles must train."""
