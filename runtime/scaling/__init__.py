"""Scales of gradients while training runs: what is measured, estimated and solved."""
