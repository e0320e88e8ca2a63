"""voxcpm-admin: voices, adapters, draining and information of a running server, over gRPC.

Answers are JSON on standard output; an error is one line on standard error, and status 1. Of a command line that cannot
be understood the usage is printed, and the status is 2.
"""

import base64
import io
import json
from pathlib import Path
from typing import Annotated, NoReturn

import numpy as np
import tritonclient.grpc
import typer
from tritonclient.utils import InferenceServerException

_PLAIN = {"no_args_is_help": True, "rich_markup_mode": None}
app = typer.Typer(help=__doc__, add_completion=False, pretty_exceptions_enable=False, **_PLAIN)
voices = typer.Typer(help="Stored voices, which requests name in `voice`.", **_PLAIN)
adapters = typer.Typer(help="Registered LoRA adapters, which requests name in `lora`.", **_PLAIN)
app.add_typer(voices, name="voices")
app.add_typer(adapters, name="adapters")

TIMEOUT_S = 320.0
Name = Annotated[str, typer.Argument(help="Letters, digits, - and _; 64 at most.")]
_RECORDING = {"help": "An audio file, or latents as a .npy file (float32, frames x 64)."}
_NO_ANSWER = {  # in gRPC's words, in ours
    "Connection refused": "nothing listens there; is the server running, and ready?",
    "Socket closed": "no gRPC is spoken there, or only with TLS (grpcs://)",
    "http1.x server": "no gRPC is spoken there, or only with TLS (grpcs://)",
    "http2 header": "no gRPC is spoken there, or a proxy does not let this through",
    "WRONG_VERSION": "no TLS is spoken there, so leave grpcs:// away",
    "CERTIFICATE": "its certificate is of no known authority (GRPC_DEFAULT_SSL_ROOTS_FILE_PATH names a file of others)",
}


class Server:
    """Where operations go; set up from the options that all commands share."""

    url = "localhost:8001"
    tls = False
    model = "voxcpm2_admin"
    token: str | None = None


@app.callback()
def common(
    url: Annotated[
        str, typer.Option(envvar="VOXCPM_URL", help="gRPC address of the server; grpcs:// before it for TLS.")
    ] = Server.url,
    token: Annotated[
        str | None,
        typer.Option(envvar="DQ_ENGINE_ADMIN_TOKEN", help="The server's DQ_ENGINE_ADMIN_TOKEN, if it has one."),
    ] = None,
    model: Annotated[str, typer.Option(help="The model that answers.")] = Server.model,
) -> None:
    scheme, _, Server.url = url.rstrip("/").rpartition("://")
    Server.tls, Server.token, Server.model = scheme in ("grpcs", "https"), token, model


def call(operation: str, arguments: dict | None = None, payload: bytes | None = None) -> None:
    """Have an operation done, and print its result."""
    fields = {"operation": operation, "arguments": json.dumps(arguments or {}), "token": Server.token}
    fields["payload"] = payload
    inputs = []
    for name, value in fields.items():
        if value is not None:
            inputs.append(tritonclient.grpc.InferInput(name, [1], "BYTES"))
            data = value.encode() if isinstance(value, str) else value
            inputs[-1].set_data_from_numpy(np.array([data], np.object_))
    try:
        with tritonclient.grpc.InferenceServerClient(Server.url, ssl=Server.tls) as client:
            result = client.infer(Server.model, inputs, client_timeout=TIMEOUT_S)
    except InferenceServerException as error:
        message = error.message()
        why = next((ours for words, ours in _NO_ANSWER.items() if words in message), None)
        if why or error.status() == "StatusCode.UNAVAILABLE" and not message.startswith("UNAVAILABLE: "):
            ports = "gRPC is on port 8001 by default, HTTP on 8000, metrics on 8002"
            fail(f"no answer from {Server.url}: {why or message} ({ports}; --url or VOXCPM_URL says where)")
        fail(message)
    typer.echo(json.dumps(json.loads(result.as_numpy("result")[0]), indent=2, ensure_ascii=False))


def fail(message: str) -> NoReturn:
    typer.echo(message, err=True)
    raise typer.Exit(1) from None


@app.command()
def info() -> None:
    """Sample rates, sizes, limits, versions, and the settings in force."""
    call("information")


@app.command()
def stats() -> None:
    """What each engine worker holds right now, and what it has done."""
    call("statistics")


@app.command()
def drain() -> None:
    """Take no more requests; those that run end as they would have."""
    call("drain")


@app.command()
def undrain() -> None:
    """Take requests again."""
    call("undrain")


@voices.command("list")
def list_voices() -> None:
    """All voices."""
    call("list_voices")


@voices.command("show")
def show_voice(name: Name) -> None:
    """One voice."""
    call("get_voice", {"name": name})


@voices.command("delete")
def delete_voice(name: Name) -> None:
    """Remove a voice; streams that use it go on."""
    call("delete_voice", {"name": name})


@voices.command("register")
def register_voice(
    name: Name,
    reference: Annotated[Path | None, typer.Option(**_RECORDING)] = None,
    prompt: Annotated[Path | None, typer.Option("--prompt", "--prompt-audio", **_RECORDING)] = None,
    prompt_text: Annotated[str | None, typer.Option(help="The words of the prompt.")] = None,
) -> None:
    """Keep a voice: a reference to clone, a prompt to continue, or both."""
    if reference is None and prompt is None:
        fail("a recording is missing: --reference, or --prompt-audio with --prompt-text")
    arguments, payload = {"name": name}, None
    if prompt_text is not None:
        arguments["prompt_text"] = prompt_text
    for kind, path in ("reference", reference), ("prompt", prompt):
        if path is None:
            continue
        try:
            data = path.read_bytes()
        except OSError as error:
            fail(f"--{kind}: {path} cannot be read: {error.strerror}")
        form, data = ("latents", _latents(path, data)) if path.suffix == ".npy" else ("audio", data)
        field = f"{kind}_{form}"
        if payload is None:
            arguments["payload"], payload = field, data
        elif form == "audio":
            arguments[field] = base64.b64encode(data).decode()
        else:
            arguments[field] = np.frombuffer(data, np.float32).tolist()
    call("register_voice", arguments, payload)


@adapters.command("list")
def list_adapters() -> None:
    """All adapters, of each engine worker."""
    call("list_loras")


@adapters.command("register")
def register_adapter(
    name: Name, path: Annotated[str, typer.Argument(help="On the server, below its DQ_ENGINE_LORA_DIR.")]
) -> None:
    """Offer an adapter; a name that is taken gets a new version."""
    call("register_lora", {"name": name, "path": path})


@adapters.command("unregister")
def unregister_adapter(name: Name) -> None:
    """Take an adapter back; streams that use it go on."""
    call("unregister_lora", {"name": name})


def _latents(path: Path, data: bytes) -> bytes:
    try:
        array = np.lib.format.read_array(io.BytesIO(data), allow_pickle=False)
    except (ValueError, MemoryError) as error:  # the latter of a header that promises too much
        fail(f"{path}: is no .npy file of numbers: {error}")
    if array.ndim != 2 or array.dtype.kind != "f":
        fail(f"{path}: must be floats of shape [frames, 64], got {array.dtype} {list(array.shape)}")
    return array.astype("<f4").tobytes()
