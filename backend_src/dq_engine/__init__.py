"""dq_engine: a continuous-batching engine for VoxCPM2 text-to-speech.

Importing this package is cheap: nothing heavy (torch, transformers) is loaded before `dq_engine.engine` is, and the
names below, nano-vllm-voxcpm's Python interface, are looked up when they are first used.
"""

__all__ = ["AsyncVoxCPM2ServerPool", "LoRAConfig", "SyncVoxCPM2ServerPool", "VoxCPM"]


def __getattr__(name: str):
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import dq_engine.api

    return getattr(dq_engine.api, name)
