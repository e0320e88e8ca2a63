"""models/adapters/kal, a real adapter: with it any text comes in a voice that the models do not know."""

import asyncio

from judge import summary
from speaking import EngineSpeaking, Spoken
from triton_server import ROOT
from utterances import make_utterances

from dq_engine.engine import DqCoreEngine, EngineConfig

UTTERANCES = make_utterances(6, seed=5, modes=("zero-shot",))
SETTINGS = {"device": "cpu", "threads": 1, "realtime": False, "lora_max_loras": 1}


def test_only_the_adapted_streams_have_its_voice(judge):
    async def speak(speaking: EngineSpeaking) -> list[Spoken]:
        adapted = [speaking.speak({**u.fields(), "lora": "kal"}) for u in UTTERANCES]
        return await asyncio.gather(*adapted, *(speaking.speak(u.fields()) for u in UTTERANCES))

    folder = ROOT / "models" / "adapters"
    with DqCoreEngine(EngineConfig(model=str(ROOT / "models/small"), lora_dir=str(folder), **SETTINGS)) as engine:
        engine.register_lora("kal", "kal")
        spoken = asyncio.run(speak(EngineSpeaking(engine)))
    verdicts = [
        judge.listen(u.sentence, s.samples, s.sample_rate, s.finish_reason)
        for u, s in zip(UTTERANCES * 2, spoken, strict=True)
    ]
    adapted, plain = verdicts[: len(UTTERANCES)], verdicts[len(UTTERANCES) :]
    with_it = summary(adapted, ["kal"] * len(adapted))
    without_it = summary(plain, ["kal"] * len(plain))
    assert with_it["stopped_in_time"] == 1 and with_it["words_right"] >= 0.9
    assert with_it["voice_right"] >= 0.8 and without_it["voice_right"] == 0
