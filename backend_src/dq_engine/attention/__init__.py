"""Attention behind one interface: this package's kernels where they take device, dtype and heads, else torch's SDPA."""
