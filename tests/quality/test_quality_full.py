"""The long measure: many sentences through the real server at 1 and 32 streams, and beside the official package."""

import asyncio
import json
import os
import urllib.request

import pytest
from judge import SAME_AUDIO, difference
from quality import failures, figures, speak_all
from reference.listening import hear
from reference.official import Official
from speaking import Spoken, TritonSpeaking
from triton_server import ROOT, TritonServer
from utterances import PROMPTS, RECORDINGS, make_utterances

from dq_engine.engine import DqCoreEngine, EngineConfig, Request

SMALL = ROOT / "models" / "small"
SENTENCES = int(os.environ.get("QUALITY_SENTENCES", "1000"))
"""They take 25 minutes of 2 cores."""


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_32_streams_at_once_lose_nothing(judge):
    environment = {
        "DQ_ENGINE_MAX_NUM_SEQS": "48",
        "DQ_ENGINE_REALTIME": "0",
        "DQ_ENGINE_NUM_KVCACHE_BLOCKS": "100",
        "DQ_ENGINE_QUEUE_TIMEOUT_S": "600",
    }

    utterances = make_utterances(SENTENCES, seed=0)
    ballast = {"text": "a", "min_generate_length": 140, "max_generate_length": 140}

    async def measure(url: str) -> tuple[list[Spoken], list[Spoken]]:
        speaking = TritonSpeaking(url)
        try:
            alone = await speak_all(speaking, utterances, 1)
            # Streams that take ever more blocks, more than there are: the youngest lose theirs.
            taking = [speaking.speak({**ballast, "seed": seed}) for seed in range(12)]
            together, *_ = await asyncio.gather(speak_all(speaking, utterances, 32), *taking)
            return alone, together
        finally:
            await speaking.close()

    with TritonServer(SMALL, environment=environment) as server:
        alone, together = asyncio.run(measure(server.grpc_url))
        with urllib.request.urlopen(f"http://{server.metrics_url}/metrics", timeout=5) as response:
            preemptions = [line for line in response.read().decode().splitlines() if "preemptions_total{" in line]
    rows = [
        {"streams": streams, **figures(judge, utterances, spoken, alone)}
        for streams, spoken in ((1, alone), (32, together))
    ]
    assert float(preemptions[0].rpartition(" ")[2]) > 0
    assert failures(rows, same_audio=True) == []
    for row in rows:
        assert row["words_right"] >= 0.98
        assert row["runaway"] == row["cut_off"] == row["long_pauses"] == 0
        for mode, of_mode in row["modes"].items():
            assert of_mode["words_right"] >= (0.98 if mode == "zero-shot" else 0.97), mode
    assert rows[1]["cached_tokens"] > 0


@pytest.mark.slow
def test_the_official_package_says_the_same(judge, tmp_path):
    """The same checkpoint, seeds and noise in float32: the same audio, so the same words, in every mode and voice."""
    for file in SMALL.iterdir():
        (tmp_path / file.name).symlink_to(file.resolve())
    config = json.loads((SMALL / "config.json").read_text())
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps({**config, "dtype": "float32"}))
    official = Official(tmp_path)
    right, compared = {"ours": 0, "theirs": 0}, 0
    utterances = make_utterances(12, seed=3)
    with DqCoreEngine(EngineConfig(model=str(tmp_path), device="cpu", threads=1)) as engine:
        for utterance in utterances:
            theirs_fields = {}
            if utterance.mode == "control":
                theirs_fields["control"] = utterance.voice
            elif utterance.mode == "reference":
                theirs_fields["reference"] = RECORDINGS / f"{utterance.voice}_reference.flac"
            elif utterance.mode == "continuation":
                theirs_fields["prompt"] = PROMPTS[utterance.voice], RECORDINGS / f"{utterance.voice}_prompt.flac"
            fields = utterance.fields()
            theirs = official.speak(fields["text"], seed=utterance.seed, **theirs_fields)
            ours = hear(engine.submit(Request(**fields)))
            if theirs.is_clear:  # no decision was so close that an error of float32 could turn it
                assert difference(ours.audio, theirs.audio) <= SAME_AUDIO, utterance
                compared += 1
            for whose, audio in (("ours", ours.audio), ("theirs", theirs.audio)):
                verdict = judge.listen(utterance.sentence, audio, engine.sample_rate, ours.finish_reason)
                right[whose] += verdict.words
    assert compared >= len(utterances) // 2
    assert abs(right["ours"] - right["theirs"]) <= 1 and min(right.values()) >= 0.97 * 5 * len(utterances)
