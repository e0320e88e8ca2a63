"""The official `voxcpm` imports torchaudio, for VoxCPM 1's recordings alone; without it, a stand-in for that time."""

import contextlib
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Iterator

import transformers  # noqa: F401  before the stand-in: it looks for torchaudio when it is imported


@contextlib.contextmanager
def torchaudio_standing_in() -> Iterator[None]:
    """While imports run that want torchaudio, and do not call it."""
    if importlib.util.find_spec("torchaudio") is not None:
        yield
        return
    module = types.ModuleType("torchaudio")
    module.__spec__ = importlib.machinery.ModuleSpec("torchaudio", loader=None)
    sys.modules["torchaudio"] = module
    try:
        yield
    finally:
        del sys.modules["torchaudio"]
