"""What the log says of one request, once it has ended. No text and no audio, unless texts are asked for."""

import logging
import time

from dq_engine.logs import log_request
from dq_engine.metrics import Playback
from dq_engine.serving.messages import Failed, Finished
from dq_engine.serving.request_parser import ParsedRequest
from dq_engine.serving.signature import INPUTS

_NAMES = {tensor.name for tensor in INPUTS}
_TEXTS = ("text", "control", "prompt_text")
_MAX_ID_CHARACTERS = 128
_LEVELS = {"UNAVAILABLE": logging.WARNING, "INTERNAL": logging.ERROR}


class RequestLog:
    """Gathers one request's line.

    Args:
        model: the name that it was sent to.
        request_id: the client's own, or "".
        over: "grpc" or "http".
        with_texts: whether its texts are written down.
        trace: what Triton hands on of the request's trace, if it is traced that way.
    """

    def __init__(self, model: str, request_id: str, over: str, with_texts: bool, trace: dict | None) -> None:
        self._with_texts = with_texts
        self._fields: dict = {"model": model, "id": request_id[:_MAX_ID_CHARACTERS], "over": over}
        if trace:
            self._fields["trace"] = trace

    def parsed(self, parsed: ParsedRequest) -> None:
        """What it asks for is known: its sizes, how its audio comes back."""
        request, fields = parsed.request, self._fields
        for name in _TEXTS:
            if (text := getattr(request, name)) is not None:
                fields[f"{name}_characters"] = len(text)
                if self._with_texts:
                    fields[name] = text
        for kind in ("prompt", "reference"):
            if (audio := getattr(request, f"{kind}_audio")) is not None:
                fields[f"{kind}_audio_bytes"] = len(audio)
            if (latents := getattr(request, f"{kind}_latents")) is not None:
                fields[f"{kind}_latents_frames"] = len(latents)
        # A name that nobody has registered may be anything: only streams that finish tell theirs.
        self._names = {name: value for name in ("voice", "lora") if (value := getattr(request, name)) is not None}
        fields |= {"output_format": parsed.output_format[:16], "streamed": parsed.stream}

    def routed(self, worker: int, stream: int) -> None:
        """An engine worker has it. `stream`: its number among all of this server's."""
        self._fields |= {"worker": worker, "stream": stream}

    def finished(self, message: Finished, playback: Playback) -> None:
        """Its last response was sent: write the line."""
        fields = {"outcome": message.finish_reason, "sample_rate": message.sample_rate}
        stats = {name: value for name, value in message.stats.items() if name != "ttfb_ms"}
        log_request(logging.INFO, self._fields | self._names | fields | stats | self._times(playback))

    def failed(self, message: Failed, playback: Playback) -> None:
        """It was refused, broke off or was cancelled: write the line.

        Of what was refused for its values only the field is told, because the message may repeat them.
        """
        code = message.code
        fields = {"outcome": "cancelled" if code == "CANCELLED" else "error", "code": code}
        if code in ("INVALID_ARG", "NOT_FOUND"):
            field = message.message.partition(":")[0]
            fields["field"] = field if field in _NAMES else "unknown"
        elif code != "CANCELLED":
            fields["message"] = message.message
        log_request(_LEVELS.get(code, logging.INFO), self._fields | fields | self._times(playback))

    @staticmethod
    def _times(playback: Playback) -> dict:
        """In milliseconds since the request came, but for the factor."""
        times = {"total_ms": round(1e3 * (time.monotonic() - playback.arrived), 1)}
        if playback.first is not None:
            times |= {
                "ttfb_ms": round(1e3 * playback.ttfb, 1),
                "largest_gap_ms": round(1e3 * playback.largest_gap, 1),
                "rtf": round(playback.rtf, 3),
                "sent_s": round(playback.audio_s, 3),
                "ran_dry": playback.ran_dry,
            }
        return times
