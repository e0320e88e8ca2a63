"""The engine works with more than one version of nano-vllm-voxcpm. (`make test-nano` runs all its tests with one.)"""

import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from triton_server import ROOT

OLDER = "2.0.4"


def test_this_version():
    """So that nobody thinks that he tests one version and tests another."""
    import dq_engine.nano  # noqa: F401  imports it with stand-ins for what a CPU lacks

    nano = sys.modules["nanovllm_voxcpm"]
    assert nano.__version__ == metadata.version("nano-vllm-voxcpm")
    for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep):
        if Path(folder).name.startswith("nano-"):
            assert Path(nano.__file__).resolve().is_relative_to(Path(folder).resolve())
            assert nano.__version__ == Path(folder).name.removeprefix("nano-")


@pytest.mark.slow
def test_the_older_one_gives_what_the_official_model_gives(tmp_path):
    """Without what 2.0.5 brought: longrope's kernel, `text_only_prefill`, batch buckets, the worker link."""
    folder = tmp_path / f"nano-{OLDER}"
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", folder]
    subprocess.run([*install, f"nano-vllm-voxcpm=={OLDER}"], check=True, timeout=120)
    tests = ["tests/test_nano_versions.py", "tests/engine/test_official_equality.py"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-m", "not slow", *tests],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout
    assert "skipped" not in done.stdout.splitlines()[-1]
