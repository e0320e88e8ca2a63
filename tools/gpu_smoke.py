#!/usr/bin/env python3
"""Says in a minute or two whether this machine's GPUs can serve, check by check, and what is missing where they cannot.

make gpu-smoke
"""

import importlib.util
import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
MODEL = ROOT / "models/small"
TEXTS = ("peter bought nine green toys", "lucy wants two old chairs", "thomas sees ten white rings")


class Missing(Exception):
    """What keeps a check from passing, and what would help."""


class NotHere(Exception):
    """Why a check says nothing about this machine."""


def cuda() -> str:
    import torch

    if not torch.cuda.is_available():
        if not torch.version.cuda:
            raise Missing(
                f"torch {torch.__version__} is a CPU build; for a GPU: make clean, then make setup "
                "without TORCH_INDEX, or with that of a CUDA build"
            )
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
        if hidden is not None:
            raise Missing(f'torch sees no GPU; CUDA_VISIBLE_DEVICES is "{hidden}"')
        raise Missing("torch sees no GPU: no driver (does nvidia-smi work?), or one too old for torch's CUDA")
    names = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        if properties.major < 8:
            raise Missing(f"{properties.name} has compute capability {properties.major}.{properties.minor}, not 8.0")
        names.append(f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB")
    return f"torch {torch.__version__}, CUDA {torch.version.cuda}; " + "; ".join(names)


def triton_kernels() -> str:
    import torch

    if importlib.util.find_spec("triton") is None:
        raise Missing("the package triton is not installed; it comes with torch's CUDA builds")
    from dq_engine.kernels.rms_norm import add_rms_norm, add_rms_norm_torch

    torch.manual_seed(0)
    x, residual, weight = (torch.randn(*shape, device="cuda") for shape in ((7, 1024), (7, 1024), (1024,)))
    try:
        pairs = zip(add_rms_norm(x, residual, weight, 1e-5), add_rms_norm_torch(x, residual, weight, 1e-5), strict=True)
    except Exception as error:
        raise Missing(f"a Triton kernel does not compile (is there a C compiler?): {error}") from error
    difference = max((ours - exact).abs().max().item() for ours, exact in pairs)
    if difference > 2e-5:
        raise Missing(f"a Triton kernel differs from torch by {difference:.1e}")
    return f"compiled, {difference:.0e} from torch; tests/gpu compares them all"


def flash_attn() -> str:
    if importlib.util.find_spec("flash_attn") is None:
        raise NotHere("not installed; only the stock engine of benchmark/compare.py needs it")
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    try:
        import flash_attn

        q, k, v = torch.randn(3, 1, 33, 4, 128, device="cuda", dtype=torch.bfloat16)
        ours = flash_attn.flash_attn_func(q, k, v, causal=True).float()
    except (ImportError, RuntimeError) as error:  # built for another torch, or not for this GPU
        raise Missing(f"flash-attn is installed and does not run: {error}") from error
    exact = scaled_dot_product_attention(*(x.float().transpose(1, 2) for x in (q, k, v)), is_causal=True)
    difference = (ours - exact.transpose(1, 2)).abs().max().item()
    if difference > 0.05:
        raise Missing(f"flash-attn differs from torch by {difference:.1e}")
    return f"{flash_attn.__version__} runs, {difference:.0e} from torch; for the stock engine of benchmark/compare.py"


def speak(**settings: object) -> list[np.ndarray]:
    from dq_engine.engine import DqCoreEngine, EngineConfig, Request

    config = EngineConfig(model=str(MODEL), device="cuda:0", max_num_seqs=4, **settings)
    with DqCoreEngine(config) as engine:
        streams = [engine.submit(Request(text=text, seed=1, return_latents=True)) for text in TEXTS]
        ends = [list(stream)[-1] for stream in streams]
    return [end.latents for end in ends]


def graphs() -> str:
    with_graphs, eager = speak(), speak(enforce_eager=True)
    for ours, theirs in zip(with_graphs, eager, strict=True):
        # As long as the same numbers of streams run beside each other; later a last bit may differ.
        if not np.isfinite(ours).all() or np.abs(ours[:4] - theirs[:4]).max() > 0.05:
            raise Missing("CUDA graphs and eager steps give different first patches")
    return f"{len(TEXTS)} streams speak, as without graphs"


def two_gpus() -> str:
    import torch

    if torch.cuda.device_count() < 2:
        raise NotHere("there is one GPU")
    import threading

    from dq_engine.config import EngineConfig
    from dq_engine.request import Request
    from dq_engine.serving.messages import Finished
    from dq_engine.serving.supervisor import Supervisor

    config = EngineConfig(model=str(MODEL), devices="cuda:0,cuda:1", max_num_seqs=2)
    supervisor = Supervisor(config.of_workers())
    supervisor.start()
    workers, ended, all_ended = set(), [], threading.Event()

    def on_message(message: object) -> None:
        if not hasattr(message, "audio") or isinstance(message, Finished):
            ended.append(message)
            if len(ended) == 4:
                all_ended.set()

    try:
        for _ in range(4):
            workers.add(supervisor.submit(Request(text=TEXTS[0]), "f32", None, True, on_message).worker)
        if not all_ended.wait(60) or not all(isinstance(message, Finished) for message in ended):
            raise Missing(f"streams on two GPUs did not end well: {ended}")
    finally:
        supervisor.stop()
    if workers != {0, 1}:
        raise Missing(f"only worker {workers} was used")
    return "a worker on each of two speaks"


def refusal(settings: str, visible: str) -> str:
    """What an engine with these settings, that sees these GPUs, ends with; empty if it starts."""
    code = (
        "from dq_engine.engine import DqCoreEngine, EngineConfig\n"
        f"DqCoreEngine(EngineConfig(model={str(MODEL)!r}, {settings})).start()"
    )
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": visible}
    ended = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    return ended.stderr[-500:] if ended.returncode else ""


def hidden_device() -> str:
    said = refusal("device='cuda:0'", visible="")
    if "torch sees no CUDA device" not in said:
        raise Missing(f"with hidden GPUs the engine does not say so: {said}")
    return "with CUDA_VISIBLE_DEVICES empty the engine says that it sees none"


def too_few_for_tensor_parallelism() -> str:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    said = refusal("device='cuda:0', tensor_parallel_size=2", visible)
    if "tensor_parallel_size is 2 and device cuda:0, but there are 1 CUDA devices" not in said:
        raise Missing(f"with one GPU for a tensor_parallel_size of 2 the engine does not say so: {said}")
    return "with one GPU and a tensor_parallel_size of 2 the engine says that it needs more"


CHECKS: dict[str, Callable[[], str]] = {
    "CUDA": cuda,
    "Triton kernels": triton_kernels,
    "flash-attn": flash_attn,
    "CUDA graphs": graphs,
    "two GPUs": two_gpus,
    "hidden GPUs": hidden_device,
    "too few GPUs": too_few_for_tensor_parallelism,
}


def main() -> int:
    failed = 0
    for name, check in CHECKS.items():
        try:
            print(f"ok       {name}: {check()}", flush=True)
        except NotHere as reason:
            print(f"-        {name}: {reason}", flush=True)
        except Missing as reason:
            failed += 1
            print(f"MISSING  {name}: {reason}", flush=True)
            if check is cuda:
                break  # the others could only say the same
        except Exception as error:
            failed += 1
            traceback.print_exc()
            print(f"MISSING  {name}: {type(error).__name__}: {error}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
