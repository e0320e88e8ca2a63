#!/usr/bin/env python3
"""How far from float32 the engines are, teacher-forced: stock nano-vllm-voxcpm and dq_engine in one run on one GPU.

    python3 benchmark/precision.py CHECKPOINT
    python3 benchmark/precision.py CHECKPOINT --engines engine --streams 4 --patches 20
    python3 benchmark/precision.py CHECKPOINT --streams 256 --tensor-parallel 2

dq_engine in float32, without graphs and with PyTorch's own attention, speaks first. Then each engine, as it serves,
makes the same patches from the same noise, and whatever it makes, the float32 patch is what it is fed next: so an error
is that of one step. Half of the streams clone a reference. The AudioVAE is compared by itself, on the float32 latents.
With --tensor-parallel each engine runs on several GPUs, and each stream makes one patch: take many streams.
Each engine has a process of its own; into --out go precision.json and the engines' logs.
"""

import json
import os
import sys
from pathlib import Path
from typing import Annotated

import commands
import numpy as np
import torch
import typer
from engine_process import run_to_its_end
from workload import Job, Range, make_jobs

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
REFERENCE_S = 4.0
ENGINES = ("nano", "engine")
MOST_AT_ONCE = 64


def jobs_of(streams: int, patches: int) -> list[Job]:
    """The requests; a stream's number is its seed too."""
    arguments = Range(30, 60), Range(patches, patches)
    half = streams // 2
    return make_jobs(half, *arguments, REFERENCE_S, "clones") + make_jobs(streams - half, *arguments, 0, "others")


def engine_speaks(
    model: str, jobs: list[Job], fed: np.ndarray | None, **settings: object
) -> tuple[np.ndarray, np.ndarray]:
    """What dq_engine makes of the jobs.

    Args:
        fed: float32 [streams, patches, patch_size, feat_dim], fed back in place of what is made; None: no forcing.
        settings: of EngineConfig.

    Returns:
        Latents, float32 [streams, patches, patch_size, feat_dim], and audio, float32 [streams, samples].
    """
    from dq_engine.engine import DqCoreEngine, EngineConfig, Request

    at_once = min(len(jobs), MOST_AT_ONCE)
    config = EngineConfig(
        model=model, max_num_seqs=at_once, gpu_memory_utilization=0.6, realtime=False, queue_timeout_s=200, **settings
    )
    with DqCoreEngine(config) as engine:
        runner = engine._runner
        if fed is not None:
            forced = torch.from_numpy(fed).to(runner.device, runner.dtype)
            run = runner.run

            def run_forced(step):
                for sequence in step.decodes:  # the step makes patch launched - 1 of the one before it
                    runner.state.condition[sequence.slot] = forced[sequence.seed, sequence.launched - 2]
                return run(step)

            runner.run = run_forced
        streams = [
            engine.submit(
                Request(
                    text=job.text,
                    reference_latents=job.reference_latents,
                    seed=seed,
                    min_generate_length=job.patches,
                    max_generate_length=job.patches,
                    return_latents=True,
                )
            )
            for seed, job in enumerate(jobs)
        ]
        chunks = [list(stream) for stream in streams]
    latents = np.stack([stream[-1].latents for stream in chunks])
    shape = len(jobs), -1, runner.patch_size, runner.feat_dim
    return latents.reshape(shape), np.stack([np.concatenate([chunk.samples for chunk in stream]) for stream in chunks])


def engine_vocodes(model: str, latents: np.ndarray) -> np.ndarray:
    """The audio that dq_engine's AudioVAE makes of latents, patch by patch; float32 [streams, samples]."""
    from dq_engine.model.checkpoint import load_checkpoint
    from dq_engine.vae.decoder import StreamingDecoder

    on_gpu = torch.cuda.is_available()
    device, dtype = torch.device("cuda" if on_gpu else "cpu"), torch.float16 if on_gpu else torch.float32
    vae = load_checkpoint(Path(model), device, torch.float32, 10, lambda *_: None).vae
    decoder, slots = StreamingDecoder(vae, len(latents), dtype), torch.arange(len(latents), device=device)
    with torch.inference_mode():
        patches = torch.from_numpy(latents).to(device, dtype).unbind(1)
        return torch.cat([decoder.decode(patch, slots) for patch in patches], dim=1).float().cpu().numpy()


def nano_speaks(model: str, jobs: list[Job], fed: np.ndarray, gpus: int) -> tuple[np.ndarray, np.ndarray]:
    """What the stock engine makes of the jobs, and the audio that its AudioVAE makes of `fed`; as `engine_speaks`."""
    from nano_noise import SameNoiseRunner
    from nanovllm_voxcpm.config import Config
    from nanovllm_voxcpm.models.voxcpm2 import engine as nano
    from nanovllm_voxcpm.models.voxcpm2.config import VoxCPM2Config

    sys.path.append(str(Path(__file__).resolve().parent.parent / "backend_src"))
    nano.VoxCPM2Runner = SameNoiseRunner
    engine = nano.VoxCPM2Engine(
        Config(
            model=model,
            max_num_seqs=min(len(jobs), MOST_AT_ONCE),
            gpu_memory_utilization=0.6,
            model_config=VoxCPM2Config.model_validate_json((Path(model) / "config.json").read_text()),
            devices=list(range(gpus)),
            tensor_parallel_size=gpus,
        )
    )
    runner, made, keep = engine.model_runner, np.empty_like(fed), engine.postprocess_seq

    def force(sequence, outputs, is_prefill):
        stream, patch = int(sequence.seq_id), len(sequence.custom_payload.generated_waveforms)
        made[stream, patch] = outputs["latents"]
        keep(sequence, {**outputs, "stop_flag": 0}, is_prefill)
        sequence.custom_payload.feats[-1] = fed[stream, patch][None]

    engine.postprocess_seq = force
    for stream, job in enumerate(jobs):
        engine.add_request(
            str(stream),
            job.text,
            ref_audio_latents=job.reference_latents,
            max_generate_length=job.patches,
            temperature=1.0,
            cfg_value=2.0,
            seed=stream,
        )
    with torch.inference_mode():
        while not engine.is_finished():
            engine.step()
        decoder, audio = runner.vae_streaming_decoder, []
        for names in np.array_split(np.arange(len(jobs)), -(-len(jobs) // MOST_AT_ONCE)):
            patches = torch.from_numpy(fed[names]).to("cuda", runner.vae_dtype).transpose(2, 3).unbind(1)
            again = [f"again {stream}" for stream in names]
            chunks = [decoder.decode_chunks(patch, again, [None] * len(names))[:, 0] for patch in patches]
            audio.append(torch.cat(chunks, dim=1).float().cpu())
    return made, torch.cat(audio).numpy()


def relative(made: np.ndarray, exact: np.ndarray) -> float:
    """|made - exact| / |exact|."""
    return float(np.linalg.norm(made - exact) / np.linalg.norm(exact))


@app.command()
def main(
    model: Annotated[str, typer.Argument(help="checkpoint directory")],
    engines: Annotated[str, typer.Option(help="in this order")] = "nano,engine",
    streams: Annotated[int, typer.Option(min=2, help=f"of which up to {MOST_AT_ONCE} run at once")] = 8,
    patches: Annotated[int, typer.Option(min=1, help="of each stream")] = 100,
    tensor_parallel: Annotated[int, typer.Option(min=1, help="GPUs of each engine")] = 1,
    engine_timeout: Annotated[float, typer.Option(min=1, help="seconds for one engine, its start included")] = 200,
    out: Annotated[Path, typer.Option(help="folder of the results; replaces earlier ones")] = Path("build/precision"),
    part: Annotated[str, typer.Option(hidden=True)] = "",
) -> None:
    """Compare engines with float32."""
    patches = patches if tensor_parallel == 1 else 1
    jobs = jobs_of(streams, patches)
    if part:
        arrays = measure_part(part, model, jobs, tensor_parallel, out)
        np.savez(out / f"{part}.npz", **arrays)
        os._exit(0)  # nano-vllm-voxcpm's end, at the interpreter's, hangs when graphs hold NCCL's communicator
    names = engines.split(",")
    if unknown := [name for name in names if name not in ENGINES]:
        raise typer.BadParameter(f"{unknown[0]!r} is not one of {', '.join(ENGINES)}")
    out.mkdir(parents=True, exist_ok=True)
    arguments = [model, f"--streams={streams}", f"--patches={patches}", f"--out={out}"]
    arguments.append(f"--tensor-parallel={tensor_parallel}")
    for name in ["float32", *names]:
        command = [sys.executable, str(Path(__file__).resolve()), *arguments, f"--part={name}"]
        print(f"{name}: speaking", flush=True)
        if fault := run_to_its_end(command, out / f"{name}.log", engine_timeout):
            raise RuntimeError(f"{name}: {fault}; see {out}/{name}.log")
    with np.load(out / "float32.npz") as exact:
        latents, audio = exact["latents"], exact["audio"]
    result = {"model": model, "streams": streams, "patches": patches, "tensor_parallel": tensor_parallel}
    for name in names:
        with np.load(out / f"{name}.npz") as made:
            noise = float(np.square(made["audio"] - audio).mean())
            result[name] = {
                "error": relative(made["latents"], latents),
                "first_patch_error": relative(made["latents"][:, 0], latents[:, 0]),
                "vae_snr_db": float(10 * np.log10(np.square(audio).mean() / noise)) if noise else None,
            }
        print(name, " ".join(f"{key} {value:.4g}" for key, value in result[name].items() if value is not None))
    (out / "precision.json").write_text(json.dumps(result, indent=1))


def measure_part(part: str, model: str, jobs: list[Job], gpus: int, out: Path) -> dict[str, np.ndarray]:
    """What one process computes."""
    if part == "float32":
        settings = {"dtype": "float32", "attention": "sdpa", "enforce_eager": True}
        latents, audio = engine_speaks(model, jobs, None, **settings)
        return {"latents": latents, "audio": audio}
    with np.load(out / "float32.npz") as exact:
        fed = exact["latents"]
    if part == "nano":
        latents, audio = nano_speaks(model, jobs, fed, gpus)
    else:
        forced = fed if gpus == 1 else None
        latents, _ = engine_speaks(model, jobs, forced, tensor_parallel_size=gpus)
        audio = engine_vocodes(model, fed)
    return {"latents": latents, "audio": audio}


if __name__ == "__main__":
    commands.run(app)
