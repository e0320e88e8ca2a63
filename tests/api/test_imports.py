"""The engine from a folder on sys.path, with the packages of requirements/ and no others."""

import contextlib
import os
import re
import shutil
import subprocess
import sys
import textwrap
from importlib import metadata
from pathlib import Path

import pytest
from triton_server import ROOT


def required() -> set[str]:
    """The distributions that requirements/ asks for on a CPU, and what these ask for in turn."""

    def names(file: str) -> list[str]:
        return re.findall(r"^([\w.-]+)", (ROOT / "requirements" / file).read_text(), re.MULTILINE)

    found = {name.lower() for name in names("no-deps.txt")}
    waiting = [*names("engine.txt"), *(name for name in names("cpu.txt") if name != "-r")]
    while waiting:
        name = waiting.pop().lower().replace("_", "-")
        if name in found:
            continue
        found.add(name)
        with contextlib.suppress(metadata.PackageNotFoundError):  # for another platform
            requires = metadata.requires(name) or []
            waiting += [re.match(r"[\w.-]+", r)[0] for r in requires if "extra ==" not in r]
    return found


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the required distributions, and no others."""
    folder = tmp_path_factory.mktemp("packages")
    for name in required():
        with contextlib.suppress(metadata.PackageNotFoundError):  # for another platform
            distribution = metadata.distribution(name)
            for entry in {file.parts[0] for file in distribution.files if file.parts[0] not in ("..", "__pycache__")}:
                if not (folder / entry).exists():
                    (folder / entry).symlink_to(distribution.locate_file(entry))
    assert (folder / "torch").is_dir() and (folder / "nanovllm_voxcpm").is_dir()
    assert not (folder / "pytest").exists() and not (folder / "librosa").exists()
    return folder


def run(code: str, cwd: Path, packages: Path) -> list[str]:
    """The lines that code prints in a Python without site-packages."""
    done = subprocess.run(
        [sys.executable, "-S", "-c", textwrap.dedent(code)],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(packages)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.slow
def test_the_engine_from_a_folder(tmp_path, packages):
    """A copy, so that the installed package is not what is found; the worker process finds the copy too."""
    shutil.copytree(ROOT / "backend_src" / "dq_engine", tmp_path / "backend_src" / "dq_engine")
    said = run(
        f"""
        import sys
        sys.path.insert(0, "backend_src")
        from dq_engine.engine import DqCoreEngine, EngineConfig, Request

        with DqCoreEngine(EngineConfig(model={str(ROOT / "models/small")!r}, device="cpu", threads=1)) as engine:
            print(sum(chunk.samples.size for chunk in engine.submit(Request(text="hello", max_generate_length=3))))
        print(DqCoreEngine.__module__, sys.modules["dq_engine"].__file__)

        from dq_engine.serving.supervisor import Supervisor
        supervisor = Supervisor([EngineConfig(model="nothing")])
        supervisor.begin_start()
        environment = open(f"/proc/{{supervisor._slots[0].worker.process.pid}}/environ").read()
        print([entry for entry in environment.split("\\0") if entry.startswith("PYTHONPATH=")][0].split(":")[0])
        supervisor.stop()
        """,
        tmp_path,
        packages,
    )
    assert said == [
        "23040",
        f"dq_engine.engine {tmp_path}/backend_src/dq_engine/__init__.py",
        f"PYTHONPATH={tmp_path}/backend_src",
    ]


def test_importing_the_package_is_cheap(packages):
    said = run(
        """
        import sys
        sys.path.insert(0, "backend_src")
        import dq_engine
        print(dq_engine.__all__)
        print(sorted(name for name in ("torch", "transformers", "numpy", "zmq", "pydantic") if name in sys.modules))
        import dq_engine.config  # by Triton's stub, which has no use for torch
        from dq_engine import VoxCPM
        print("torch" in sys.modules)
        """,
        ROOT,
        packages,
    )
    assert said == [
        "['AsyncVoxCPM2ServerPool', 'LoRAConfig', 'SyncVoxCPM2ServerPool', 'VoxCPM']",
        "[]",
        "False",
    ]
