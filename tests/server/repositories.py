"""Model repositories with a config.pbtxt of few lines, or none."""

from pathlib import Path

from triton_server import ROOT

MINIMAL = """
backend: "python"
model_warmup [ {
  name: "one patch"
  batch_size: 1
  inputs { key: "text" value: { data_type: TYPE_STRING dims: [ 1 ] input_data_file: "text" } }
  inputs { key: "max_generate_length" value: { data_type: TYPE_INT32 dims: [ 1 ] input_data_file: "length" } }
} ]
"""
WARM_UP_FILES = {"text": len(b"hello").to_bytes(4, "little") + b"hello", "length": (1).to_bytes(4, "little")}


def write_repository(folder: Path, configuration: str | None) -> Path:
    """A model repository with voxcpm2 alone; without a config.pbtxt if `configuration` is None."""
    model = folder / "voxcpm2"
    (model / "warmup").mkdir(parents=True)
    (model / "1").symlink_to(ROOT / "model_repository" / "voxcpm2" / "1")
    for name, data in WARM_UP_FILES.items():
        (model / "warmup" / name).write_bytes(data)
    if configuration is not None:
        (model / "config.pbtxt").write_text(configuration)
    return folder
