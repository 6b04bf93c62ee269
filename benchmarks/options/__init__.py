"""Random combinations of options and training loops, compared with float32 and with themselves."""
