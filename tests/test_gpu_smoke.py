"""The GPU smoke test names what is missing where there is no GPU, and ends at once."""

import subprocess
import sys
from pathlib import Path

import gpu_smoke
import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent


def test_a_machine_without_a_gpu_is_told_so():
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU: `make gpu-smoke` is the test here")
    ended = subprocess.run(
        [sys.executable, ROOT / "tools/gpu_smoke.py"], capture_output=True, text=True, timeout=120, check=False
    )
    assert ended.returncode == 1
    (line,) = ended.stdout.splitlines()
    # Which of the two builds of torch pip took depends on the index.
    reason = (
        "torch sees no GPU: " if torch.version.cuda else f"torch {torch.__version__} is a CPU build; for a GPU: make"
    )
    assert line.startswith(f"MISSING  CUDA: {reason}")


def test_the_checks_of_hidden_and_of_too_few_gpus_hear_what_the_engine_says():
    assert "it sees none" in gpu_smoke.hidden_device()
    if not torch.cuda.is_available():  # where there is one, the command itself is the test
        with pytest.raises(
            gpu_smoke.Missing, match="tensor_parallel_size is 2 and device cuda:0, but there are 0 CUDA"
        ):
            gpu_smoke.too_few_for_tensor_parallelism()
