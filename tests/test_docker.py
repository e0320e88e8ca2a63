"""The container's files, without Docker: what they name exists, and the entrypoint runs from the folders they make."""

import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import time
import zipfile
from pathlib import Path

import pytest
import stand_in_model
import tritonclient.grpc as grpcclient
import yaml
from packaging.requirements import Requirement
from reference.processes import processes_below
from triton_server import TritonServer

from dq_engine.config import EngineConfig
from dq_engine.request import MAX_ENCODED_AUDIO_BYTES, MAX_TEXT_CHARACTERS

ROOT = Path(__file__).resolve().parent.parent
WRITTEN = ("HF_HOME", "TRITON_CACHE_DIR", "DQ_ENGINE_VOICES_DIR")
"""Folders that outlive the container."""
IMAGE = "nvcr.io/nvidia/tritonserver:24.10-py3"  # tritonserver 2.51 as in nvidia-pytriton 0.7.0; Python 3.10


def instructions() -> list[tuple[str, str]]:
    """The Dockerfile's instructions, each in one line."""
    text = re.sub(r"^\s*#.*\n", "", (ROOT / "docker/Dockerfile").read_text(), flags=re.M).replace("\\\n", " ")
    return [tuple(line.split(None, 1)) for line in text.splitlines() if line.strip()]


def of(name: str) -> list[str]:
    return [rest for instruction, rest in instructions() if instruction == name]


def copies() -> list[tuple[list[str], str]]:
    """(sources, destination) of every COPY from the repository."""
    words = [shlex.split(rest) for rest in of("COPY") if not rest.startswith("--from=")]
    return [(w[:-1], w[-1]) for w in words]


def environment() -> dict[str, str]:
    return dict(word.split("=", 1) for rest in of("ENV") for word in shlex.split(rest))


def copy_into(container: Path) -> None:
    """Lay the repository's files out as the Dockerfile does, below `container`."""
    for sources, destination in copies():
        target = container / destination.lstrip("/")
        for source in sources:
            if (ROOT / source).is_dir():
                shutil.copytree(ROOT / source, target, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                path = target / Path(source).name if destination.endswith("/") else target
                path.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / source, path)


def requirements(path: Path) -> list[Requirement]:
    found = []
    for line in path.read_text().splitlines():
        line = line.partition(" #")[0].strip() if not line.startswith("#") else ""
        if line.startswith("-r "):
            found += requirements(path.parent / line[3:].strip())
        elif line:
            found.append(Requirement(line))
    return found


def test_every_stage_is_the_pinned_image():
    assert [rest.split()[0] for rest in of("FROM")] == [IMAGE, IMAGE]
    assert [re.match(r"--from=(\w+) ", rest)[1] for rest in of("COPY") if rest.startswith("--from=")] == ["wheel"]
    assert of("FROM")[0].endswith(" AS wheel")


def test_what_is_copied_is_in_the_repository_and_not_ignored():
    rules = (ROOT / "docker/Dockerfile.dockerignore").read_text().split()
    assert rules[0] == "*"
    for sources, _ in copies():
        for source in sources:
            assert (ROOT / source).exists(), source
            assert f"!{source}" in rules, source
            tracked = subprocess.run(["git", "ls-files", source], cwd=ROOT, capture_output=True, text=True, check=True)
            assert tracked.stdout, f"{source} is not committed"
    assert {rule[1:] for rule in rules if rule.startswith("!")} == {s for sources, _ in copies() for s in sources}


def test_paths_that_instructions_name_are_made_by_the_image_or_a_copy(tmp_path):
    copy_into(tmp_path)
    entrypoint = yaml.safe_load(of("ENTRYPOINT")[0])
    assert entrypoint == ["/opt/voxcpm2/docker/entrypoint.sh"]
    assert os.access(tmp_path / entrypoint[0][1:], os.X_OK)
    for rest in of("RUN"):
        for path in re.findall(r"/opt/voxcpm2/\S+", rest):
            assert (tmp_path / path[1:]).exists(), path
    made = " ".join(rest for rest in of("RUN") if rest.startswith("install -d -o 1000 -g 1000"))
    for name in ("HOME", *WRITTEN):
        assert environment()[name] in made.split()
    assert of("VOLUME") == [" ".join(environment()[name] for name in WRITTEN)]
    assert of("USER") == ["1000:1000"]


def test_commands_that_instructions_and_the_entrypoint_run_exist():
    for rest in of("RUN") + [rest.split("CMD ", 1)[1] for rest in of("HEALTHCHECK")]:
        for command in re.split(r"&&|\| ", rest):
            assert shutil.which(command.split()[0]), command
    script = (ROOT / "docker/entrypoint.sh").read_text()
    subprocess.run(["bash", "-n", ROOT / "docker/entrypoint.sh"], check=True)
    for command in ("od", "tr", "setsid", "sleep", "rm", "dirname", "head", "python3"):
        assert command in script
        assert shutil.which(command), command


def test_requirements_parse_and_pin_what_must_be():
    parsed = {path.name: requirements(path) for path in (ROOT / "requirements").glob("*.txt")}
    named = re.findall(r"requirements/([\w-]+\.txt)", " ".join(of("RUN")))
    assert named == ["gpu.txt", "admin.txt", "no-deps.txt"]
    gpu = {r.name: str(r.specifier) for r in parsed["gpu.txt"]}
    assert gpu["numpy"] == "==1.26.4"
    assert gpu["torch"] == "==2.13.0"
    assert [str(r) for r in parsed["no-deps.txt"]] == ["nano-vllm-voxcpm==2.0.5"]
    assert all(r.specifier for found in parsed.values() for r in found), "a requirement without a version"


@pytest.mark.slow
def test_requirements_have_builds_for_the_images_python(tmp_path):
    for name in ("gpu.txt", "admin.txt", "no-deps.txt"):
        subprocess.run(
            [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--no-deps", "--only-binary=:all:"]
            + ["--python-version=3.10", f"--target={tmp_path}", "-r", ROOT / "requirements" / name],
            check=True,
        )


def test_the_wheel_holds_the_whole_engine(tmp_path):
    source = tmp_path / "src"
    shutil.copytree(ROOT / "backend_src", source, ignore=shutil.ignore_patterns("*.egg-info", "build", "__pycache__"))
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
        + ["--wheel-dir", tmp_path, source],
        check=True,
    )
    (wheel,) = tmp_path.glob("dq_engine-*.whl")
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".py")}
    assert packed == {str(path.relative_to(source)) for path in (source / "dq_engine").rglob("*.py")}


def test_compose_agrees_with_the_dockerfile():
    compose = yaml.safe_load((ROOT / "docker/compose.yaml").read_text())
    service = compose["services"]["voxcpm2"]
    build = service["build"]
    assert (ROOT / "docker" / build["context"]).resolve() == ROOT
    assert (ROOT / build["dockerfile"]).exists()
    assert set(build["args"]) == {rest.split("=")[0] for rest in of("ARG")}
    assert all(port.startswith("${PUBLISH:-127.0.0.1}:") for port in service["ports"])
    assert environment()["HOST"] == "0.0.0.0"  # within the container
    inside = [port.rsplit(":", 1)[1] for port in service["ports"]]
    assert inside == of("EXPOSE")[0].split()
    assert inside == [environment()[name] for name in ("HTTP_PORT", "GRPC_PORT", "METRICS_PORT")]
    assert [volume.split(":")[0] for volume in service["volumes"]] == [*compose["volumes"]]
    assert [volume.split(":")[1] for volume in service["volumes"]] == [environment()[name] for name in WRITTEN]
    # The file that Compose reads for what is in braces goes into the container whole, but for the ports.
    assert service["env_file"] == [{"path": ".env", "required": False}]
    assert [service["environment"][name] for name in ("HTTP_PORT", "GRPC_PORT", "METRICS_PORT")] == inside
    for name, value in service["environment"].items():
        assert name.endswith("_PORT") or re.fullmatch(rf"\$\{{{name}:-.*\}}", value), "it would hide the file's"
    subprocess.run(["git", "check-ignore", "-q", "docker/.env"], cwd=ROOT, check=True)
    assert service["shm_size"] == "1gb"
    assert service["stop_grace_period"] == "10s"  # the entrypoint needs up to 5
    assert service["deploy"]["resources"]["reservations"]["devices"][0]["capabilities"] == ["gpu"]


def manifest() -> dict:
    """The deployment of docs/deploy.md."""
    page = (ROOT / "docs/deploy.md").read_text()
    (text,) = re.findall(r"^```yaml\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    deployment, service = yaml.safe_load_all(text)
    assert service["spec"]["selector"] == deployment["spec"]["template"]["metadata"]["labels"]
    return deployment["spec"]["template"]["spec"]


def test_the_kubernetes_manifest_agrees_with_the_dockerfile():
    (server,) = manifest()["containers"]
    assert [str(port["containerPort"]) for port in server["ports"]] == of("EXPOSE")[0].split()
    folders = [*(environment()[name] for name in WRITTEN), "/dev/shm"]
    assert [mount["mountPath"] for mount in server["volumeMounts"]] == folders
    used = dict.fromkeys(mount["name"] for mount in server["volumeMounts"])
    assert list(used) == [volume["name"] for volume in manifest()["volumes"]]
    settings = [v["name"].removeprefix("DQ_ENGINE_").lower() for v in server["env"] if v["name"] != "MODEL"]
    assert set(settings) <= set(EngineConfig.model_fields)
    user = ":".join(str(manifest()["securityContext"][name]) for name in ("runAsUser", "runAsGroup"))
    assert of("USER") == [user]
    check = of("HEALTHCHECK")[0].split("CMD ", 1)[1].replace('"', "").replace("$METRICS_PORT", "8002")
    assert server["readinessProbe"]["exec"]["command"] == ["sh", "-c", check]


def test_the_pages_links_and_settings_are_there():
    page = (ROOT / "docs/deploy.md").read_text()
    links = [link.partition("#")[0] for link in re.findall(r"\]\(((?!https://)[^)]+)\)", page)]
    assert links
    assert [link for link in links if not (ROOT / "docs" / link).exists()] == []
    assert {name.lower() for name in re.findall(r"DQ_ENGINE_([A-Z_]+)", page)} <= set(EngineConfig.model_fields)
    metrics = (ROOT / "docs/metrics.md").read_text()
    names = set(re.findall(r"voxcpm2_[a-z_]+(?=[`)\[{])", page)) - {"voxcpm2_admin"}
    assert names and [name for name in names if f"`{name}" not in metrics] == []


def test_the_proxy_lets_the_largest_request_through():
    """Not run here: there is no nginx. How deep JSON may be is in tests/server/test_bad_input.py."""
    page = (ROOT / "docs/deploy.md").read_text()
    limits = re.findall(r"client_(?:max_body|body_buffer)_size (\d+)m;", page)
    texts = 3 * 4 * MAX_TEXT_CHARACTERS
    assert len(limits) == 3 and all(int(limit) * 2**20 > 2 * MAX_ENCODED_AUDIO_BYTES + texts for limit in limits)
    (brackets,) = re.findall(r"brackets\.length > (\d+)", page)
    assert 3 * MAX_TEXT_CHARACTERS < int(brackets) == 20_000
    models = re.findall(r"location = /v2/models/(\w+)/", page)
    assert {*models} == {"voxcpm2", "voxcpm2_encode"} <= {path.name for path in (ROOT / "model_repository").iterdir()}


@pytest.fixture(scope="module")
def container(tmp_path_factory) -> Path:
    """A script that runs what the Dockerfile names as its entrypoint where it will lie: in a mount namespace with
    /opt as the image and the copies make it. tritonserver and Python are those of .venv."""
    folder = tmp_path_factory.mktemp("container")
    copy_into(folder / "files")
    site = Path(sysconfig.get_path("platlib"))
    script = folder / "run.sh"
    script.write_text(f"""#!/usr/bin/env bash
exec unshare --map-root-user --mount -- bash -c '
    set -e
    mount -t tmpfs tmpfs /opt
    cp -r {folder}/files/opt/. /opt/
    mkdir /opt/tritonserver
    mount --bind {site}/pytriton/tritonserver /opt/tritonserver
    export LD_LIBRARY_PATH={site}/nvidia_pytriton.libs:$({sys.executable} {ROOT}/tools/libpython.py)
    export PATH={Path(sys.executable).parent}:$PATH
    cd /
    exec {shlex.join(yaml.safe_load(of("ENTRYPOINT")[0]))} "$@"' entrypoint "$@"
""")
    script.chmod(0o755)
    probe = subprocess.run(["unshare", "--map-root-user", "--mount", "true"], capture_output=True, text=True)
    if probe.returncode:
        pytest.skip(f"this machine allows no mount namespaces: {probe.stderr.strip()}")
    return script


def test_the_entrypoint_runs_as_in_the_container(container, tmp_path):
    repository = stand_in_model.write(tmp_path / "repository")
    with TritonServer(entrypoint=container, model_repository=repository, environment={"HF_HOME": "/x"}) as server:
        assert "/opt/tritonserver/backends/python/libtriton_python.so" in server.log_path.read_text()
        assert grpcclient.InferenceServerClient(server.grpc_url).is_model_ready("counter")


def is_healthy(port: int) -> bool:
    """What the HEALTHCHECK says of a server whose metrics are on that port."""
    check = ["sh", "-c", of("HEALTHCHECK")[0].split("CMD ", 1)[1]]
    return subprocess.run(check, env={**os.environ, "METRICS_PORT": str(port)}, capture_output=True).returncode == 0


def test_the_repository_serves_from_where_the_image_has_it_and_its_health_is_the_workers(container):
    with TritonServer(entrypoint=container) as server:
        client = grpcclient.InferenceServerClient(server.grpc_url)
        assert client.is_model_ready("voxcpm2")
        assert "/opt/voxcpm2/model_repository" in server.log_path.read_text()
        ends = time.monotonic() + 10
        while not is_healthy(server.metrics_port):
            assert time.monotonic() < ends
            time.sleep(0.2)
        assert not is_healthy(1)
        drain = manifest()["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
        drain[2] = drain[2].replace("sleep 5", "sleep 0").replace(":8002", f":{server.metrics_port}")
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        settings = {**os.environ, "PATH": path, "VOXCPM_URL": server.grpc_url}
        drained = subprocess.run(drain, env=settings, capture_output=True, text=True, timeout=60)
        assert (drained.returncode, yaml.safe_load(drained.stdout), drained.stderr) == (0, {"draining": True}, "")
        (worker,) = processes_below(server.pid, "dq_engine.serving.worker")
        worker.kill()
        ends = time.monotonic() + 10
        while is_healthy(server.metrics_port):  # until it is back, which takes seconds
            assert time.monotonic() < ends
            time.sleep(0.1)
        assert server.is_ready()  # Triton does not know
