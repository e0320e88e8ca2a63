"""Triton kernels, each beside the few lines of torch that define it; those run where there is no GPU."""
