"""Tensor parallelism: one engine over several processes, each with a part of every attention and feed-forward layer."""
