"""The process layer: the worker that owns an engine, its supervisor, and the messages between them."""
