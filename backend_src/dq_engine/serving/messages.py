"""What travels between the supervisor and an engine worker: msgpack, one message a zmq frame.

Arrays travel as [shape, raw little-endian float32 bytes]. Nothing here is pickled, and every message is checked against
its type when it is decoded.
"""

import msgspec
import numpy as np

from dq_engine.request import Request


class Submit(msgspec.Struct, tag=True, frozen=True):
    """Supervisor to worker: speak this.

    Args:
        id: the stream's number, unique in the life of the supervisor.
        request: what the engine is asked for.
        output_format: name of an audio format of `dq_engine.audio.output`.
        sample_rate: of the audio that comes back, in Hz; None for the model's own.
        stream: True for chunks as they are made; False for all audio in the `Finished` message.
    """

    id: int
    request: Request
    output_format: str
    sample_rate: int | None
    stream: bool


class Cancel(msgspec.Struct, tag=True, frozen=True):
    """Supervisor to worker: nobody listens to this stream any more. A stream that has ended is no error."""

    id: int


class Call(msgspec.Struct, tag=True, frozen=True):
    """Supervisor to worker: do something other than speak (`dq_engine.serving.operations` lists what).

    `id` is of the same row as the streams' numbers. The answer is a `Result` or a `Failed`.
    """

    id: int
    operation: str
    arguments: dict
    payload: bytes | None = None


class Shutdown(msgspec.Struct, tag=True, frozen=True):
    """Supervisor to worker: end running streams with UNAVAILABLE, then exit."""


class Progress(msgspec.Struct, tag=True, frozen=True):
    """Worker to supervisor, while it starts: what it does, and how much of it is done (0 to 1)."""

    stage: str
    fraction: float


class Ready(msgspec.Struct, tag=True, frozen=True):
    """Worker to supervisor: requests are welcome. Of the model:

    Args:
        sample_rate: of the audio that it makes, in Hz.
        encoder_sample_rate: of the recordings that it encodes, in Hz.
        feat_dim: width of a latent frame.
        patch_size: latent frames of a patch.
        patch_samples: samples of a patch, at `sample_rate`.
    """

    sample_rate: int
    encoder_sample_rate: int
    feat_dim: int
    patch_size: int
    patch_samples: int


class StartFailed(msgspec.Struct, tag=True, frozen=True):
    """Worker to supervisor: the engine could not start; the worker exits."""

    message: str


class Audio(msgspec.Struct, tag=True, frozen=True):
    """Worker to supervisor: the next piece of a stream's audio, in its output format (f32: raw float32 samples).

    `seconds`: how much audio was encoded for it.
    """

    id: int
    audio: bytes
    sample_rate: int
    seconds: float = 0.0


class Finished(msgspec.Struct, tag=True, frozen=True):
    """Worker to supervisor: a stream's last piece of audio, perhaps empty, and how it ended.

    `latents`: float32 [frames, feat_dim], when they were asked for. `seconds` as in `Audio`.
    """

    id: int
    audio: bytes
    sample_rate: int
    finish_reason: str
    stats: dict
    latents: np.ndarray | None = None
    seconds: float = 0.0


class Failed(msgspec.Struct, tag=True, frozen=True):
    """Worker to supervisor: a stream broke off, or was refused; nothing follows. `code` as in `RequestError`."""

    id: int
    code: str
    message: str


class Result(msgspec.Struct, tag=True, frozen=True):
    """Worker to supervisor: what a `Call` led to."""

    id: int
    value: dict
    payload: bytes | None = None


class Heartbeat(msgspec.Struct, tag=True, frozen=True):
    """Worker to supervisor, once a second: `DqCoreEngine.snapshot()`."""

    snapshot: dict


ToWorker = Submit | Cancel | Call | Shutdown
StreamMessage = Audio | Finished | Failed
FromWorker = Progress | Ready | StartFailed | StreamMessage | Result | Heartbeat


def _encode_array(value: object) -> list:
    if isinstance(value, np.ndarray):
        return [value.shape, np.ascontiguousarray(value, dtype="<f4").tobytes()]
    if isinstance(value, np.generic):
        return value.item()
    raise NotImplementedError(f"no message form for {type(value).__name__}")


def _decode_array(kind: type, value: list) -> np.ndarray:
    if kind is not np.ndarray:
        raise NotImplementedError(f"no message form for {kind.__name__}")
    shape, data = value
    return np.frombuffer(data, dtype="<f4").reshape(shape)


encode = msgspec.msgpack.Encoder(enc_hook=_encode_array).encode
decode_to_worker = msgspec.msgpack.Decoder(ToWorker, dec_hook=_decode_array).decode
decode_from_worker = msgspec.msgpack.Decoder(FromWorker, dec_hook=_decode_array).decode
