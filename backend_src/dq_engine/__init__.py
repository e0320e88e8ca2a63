"""dq_engine: a continuous-batching engine for VoxCPM2 text-to-speech.

Importing this package is cheap: nothing heavy (torch, transformers) is loaded before `dq_engine.engine` is.
"""
