"""tools/setup.sh, the Makefile and .ci/run as a newcomer meets them."""

import fcntl
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def clone(tmp_path) -> Path:
    """What set-up needs of the repository, without a .venv."""
    for name in ("tools", "requirements", "backend_src"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    return tmp_path


def fake_python(folder: Path, body: str) -> Path:
    path = folder / "fake-python"
    path.write_text(f"#!/bin/bash\n{body}\n")
    path.chmod(0o755)
    return path


def set_up(clone: Path, **environment: str) -> str:
    """The words that a set-up fails with."""
    done = subprocess.run(
        [clone / "tools/setup.sh"], env={**os.environ, **environment}, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1
    assert not (clone / ".venv").exists()
    return done.stderr


def test_a_python_that_is_not_there_or_does_not_fit_is_named(clone):
    assert "PYTHON=/no/python is not there" in set_up(clone, PYTHON="/no/python")
    other = fake_python(clone, "if [[ $1 == --version ]]; then echo Python 3.13.1; else exit 1; fi")
    assert f"PYTHON={other} is Python 3.13.1; Python 3.10, 3.11 or 3.12 is needed" in set_up(clone, PYTHON=str(other))


def test_what_is_missing_on_the_system_is_named_with_one_line_to_install_it(clone):
    version = "{}.{}".format(*sys.version_info)
    bare = fake_python(
        clone, f'[[ "$*" == *libpython.py* || "$*" == *ensurepip* ]] && exit 1\nexec {sys.executable} "$@"'
    )
    said = set_up(clone, PYTHON=str(bare))
    assert f"the venv module of Python {version}" in said
    assert f"libpython{version}.so.1.0" in said
    assert f"sudo apt-get install -y python{version}-venv libpython{version}\n" in said


def test_a_gpu_needs_what_compiles_its_kernels(clone):
    programs = clone / "bin"
    programs.mkdir()
    for program in Path("/usr/bin").iterdir():
        if program.name not in ("gcc", "clang", "nvidia-smi"):
            (programs / program.name).symlink_to(program)
    (programs / "nvidia-smi").write_text("#!/bin/sh\necho GPU 0: a card\n")
    (programs / "nvidia-smi").chmod(0o755)
    version = "{}.{}".format(*sys.version_info)
    # Set-up goes no further than this: the shared library is missing too.
    bare = fake_python(
        clone, f'[[ "$*" == *libpython.py* || "$*" == *Python.h* ]] && exit 1\nexec {sys.executable} "$@"'
    )
    said = set_up(clone, PYTHON=str(bare), PATH=str(programs), CC="")
    assert "a C compiler, for the GPU's kernels" in said
    packages = f"libpython{version} gcc libc6-dev libpython{version}-dev"
    assert f"sudo apt-get install -y {packages}\n" in said
    (programs / "nvidia-smi").unlink()
    assert f"sudo apt-get install -y libpython{version}\n" in set_up(clone, PYTHON=str(bare), PATH=str(programs))


def test_of_two_set_ups_one_waits(clone):
    with open(clone / "tools/setup.sh") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        command = [clone / "tools/setup.sh"]
        environment = {**os.environ, "PYTHON": "/no/python"}
        waiting = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert waiting.stdout.readline() == "setup: waits for another one that is under way\n"
    out, error = waiting.communicate(timeout=60)
    assert (waiting.returncode, out, error) == (1, "", "\nPYTHON=/no/python is not there.\n")


@pytest.mark.alone
@pytest.mark.parametrize("what", ["server", "test"])
def test_a_second_set_up_costs_less_than_a_second(what):
    began = time.monotonic()
    done = subprocess.run([ROOT / "tools/setup.sh", what], capture_output=True, text=True, check=True)
    assert time.monotonic() - began < 1.0
    assert done.stdout == ""


def test_ci_runs_make_test_and_nothing_else():
    lines = (ROOT / ".ci/run").read_text().splitlines()
    assert lines == ["#!/usr/bin/env bash", "set -e", 'cd "$(dirname "$0")/.."', "exec make test"]
    assert os.access(ROOT / ".ci/run", os.X_OK)


def test_make_names_its_targets_and_runs_what_exists():
    said = subprocess.run(["make", "-s", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for target in ("setup", "test", "test-all", "demo", "serve", "lint", "clean"):
        assert f"make {target} " in said
        recipe = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        for word in recipe.split():
            if word.startswith(("tools/", "docker/")):
                assert (ROOT / word).is_file(), word


def test_make_hands_its_settings_to_demo_and_serve_and_not_to_the_tests(tmp_path):
    makefile = (ROOT / "Makefile").read_text()
    show = "@env | grep -E '^(MODEL|HTTP_PORT|GRPC_PORT|METRICS_PORT|TEXT|REFERENCE|OUT)=' | sort || true"
    # The same targets with recipes that only show what they are given.
    targets = "".join(f"{target}:\n\t{show}\n" for target in ("demo", "serve", "test"))
    (tmp_path / "Makefile").write_text(makefile[: makefile.index("help:\n")] + targets)

    def given(*arguments: str, **settings: str) -> list[str]:
        clean = {name: value for name, value in os.environ.items() if name in ("PATH", "HOME")} | settings
        make = ["make", "-s", "-C", tmp_path, *arguments]
        return subprocess.run(make, env=clean, capture_output=True, text=True, check=True).stdout.splitlines()

    assert given("test") == []
    assert given("serve") == ["GRPC_PORT=8001", "HTTP_PORT=8000", "METRICS_PORT=8002", "MODEL=models/small"]
    assert given("serve", "MODEL=/a b", "GRPC_PORT=1")[::3] == ["GRPC_PORT=1", "MODEL=/a b"]
    assert given("serve", DQ_ENGINE_MODEL="/own")[-1] == "MODEL=/own"
    assert given("serve", MODEL="/a", DQ_ENGINE_MODEL="/own")[-1] == "MODEL=/a"
    assert given("demo", 'TEXT=it\'s "so"') == ["MODEL=models/small", "OUT=", "REFERENCE=", 'TEXT=it\'s "so"']


def test_ruff_finds_nothing():
    ruff = [sys.executable, "-m", "ruff", "check", "--no-cache", "--output-format=concise", "."]
    done = subprocess.run(ruff, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
