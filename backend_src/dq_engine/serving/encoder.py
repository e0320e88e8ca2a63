"""The process that encodes the audio of a worker's streams.

    python -m dq_engine.serving.encoder

Standard input is a socket to the worker: messages of `encoder_process` come in and answers go out. Its end means that
the worker is gone, however it ended.
"""

import os
import signal
from multiprocessing.connection import Connection

import msgspec
import numpy as np

from dq_engine.audio.output import OutputEncoder
from dq_engine.serving.encoder_process import Drop, Encoded, Failure, Piece


def main() -> None:
    # Both may be sent to the whole group; streams that still run end in order first.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    connection = Connection(os.dup(0))
    decoder, encoders = msgspec.msgpack.Decoder(Piece | Drop), {}
    while True:
        try:
            message = decoder.decode(connection.recv_bytes())
            if isinstance(message, Drop):
                encoders.pop(message.stream, None)
            else:
                connection.send_bytes(msgspec.msgpack.encode(_answer(message, encoders)))
        except (EOFError, OSError):
            return


def _answer(piece: Piece, encoders: dict[int, OutputEncoder]) -> Encoded | Failure:
    try:
        if piece.output is not None:
            output = piece.output
            encoders[piece.stream] = OutputEncoder(output.output_format, output.model_rate, output.sample_rate)
        encoder = encoders.pop(piece.stream) if piece.last else encoders[piece.stream]
        samples = np.frombuffer(piece.samples, np.float32)
        return Encoded(encoder.finish(samples) if piece.last else encoder.encode(samples))
    except KeyError:
        return Failure("the process that had encoded its beginning has ended")
    except Exception as error:  # of the libraries that encode; one stream's trouble
        encoders.pop(piece.stream, None)
        return Failure(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
