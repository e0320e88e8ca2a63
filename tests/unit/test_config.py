"""The settings: what a misspelt one says, and what each worker gets."""

import logging
import os
import subprocess
import sys

import pytest

from dq_engine.attention.base import BLOCK_SIZE
from dq_engine.config import EngineConfig


def test_a_variable_that_no_setting_has_is_a_warning_that_names_it(monkeypatch, caplog):
    monkeypatch.setenv("DQ_ENGINE_MAX_NUM_SEQ", "3")
    monkeypatch.setenv("DQ_ENGINE_ZZZ", "3")
    monkeypatch.setenv("DQ_ENGINE_QUEUE_SIZE", "5")
    monkeypatch.setenv("dq_engine_threads", "1")  # the environment's case does not matter
    assert EngineConfig.from_parameters({"model": "m"}).queue_size == 5
    assert [(record.levelno, record.getMessage()) for record in caplog.records] == [
        (logging.WARNING, "DQ_ENGINE_MAX_NUM_SEQ is no setting; did you mean DQ_ENGINE_MAX_NUM_SEQS?"),
        (logging.WARNING, "DQ_ENGINE_ZZZ is no setting"),
    ]


def test_each_worker_knows_its_device_and_all_devices():
    workers = EngineConfig(model="m", devices="0,cpu").of_workers()
    assert [(worker.device, worker.devices) for worker in workers] == [("auto:0", "0,cpu"), ("cpu", "0,cpu")]
    traced = EngineConfig(model="m", devices="0,cpu", trace_file="/tmp/steps.json").of_workers()
    assert [worker.trace_file for worker in traced] == ["/tmp/steps_0.json", "/tmp/steps_1.json"]
    (worker,) = EngineConfig(model="m", device="cpu", trace_file="/tmp/steps.json").of_workers()
    assert worker.trace_file == "/tmp/steps.json"
    assert (worker.device, worker.devices) == ("cpu", "")


def test_the_kv_blocks_by_their_upstream_name_are_of_256_tokens(monkeypatch):
    monkeypatch.setenv("NANOVLLM_SERVERPOOL_NUM_KVCACHE_BLOCKS", "64")
    config = EngineConfig.from_parameters({"model": "m", "num_kvcache_blocks": "7"})
    assert config.num_kvcache_blocks * BLOCK_SIZE == 64 * 256
    monkeypatch.setenv("DQ_ENGINE_NUM_KVCACHE_BLOCKS", "100")
    assert EngineConfig(model="m").num_kvcache_blocks == 100


@pytest.mark.parametrize("value", ["0", "-4", "many"])
def test_the_upstream_number_of_kv_blocks_is_from_1(monkeypatch, value):
    monkeypatch.setenv("NANOVLLM_SERVERPOOL_NUM_KVCACHE_BLOCKS", value)
    with pytest.raises(ValueError, match=f"^NANOVLLM_SERVERPOOL_NUM_KVCACHE_BLOCKS: '{value}' is no whole number"):
        EngineConfig(model="m")


@pytest.mark.parametrize(
    ("name", "default"),
    [
        ("PREFILL_GRAPH", "1"),
        ("PREFILL_GRAPH_LORA", "0"),
        ("PREFILL_BUCKETS", "1:320,2:640,4:1152,8:2176"),
        ("MAX_PREFILL_TOKENS", "0"),
        ("MAX_PREFILL_SEQS", "0"),
        ("GPU_LATENTS", "1"),
        ("VAE_COMPILE", "1"),
        ("VAE_WEIGHT_NORM_FOLD", "1"),
        ("TIMING", "0"),
        ("QUEUE_SIZE", "1024"),
    ],
)
def test_a_usual_value_given_as_text_is_what_there_is_without_it(monkeypatch, name, default):
    field = name.lower()
    without = getattr(EngineConfig(model="m"), field)
    monkeypatch.setenv(f"DQ_ENGINE_{name}", default)
    given = getattr(EngineConfig(model="m"), field)
    monkeypatch.delenv(f"DQ_ENGINE_{name}")
    assert given == getattr(EngineConfig.from_parameters({"model": "m", field: default}), field)
    assert given == (default if name == "PREFILL_BUCKETS" else without)


def test_weight_norm_is_always_folded(monkeypatch):
    monkeypatch.setenv("DQ_ENGINE_VAE_WEIGHT_NORM_FOLD", "0")
    with pytest.raises(ValueError, match="vae_weight_norm_fold: .*always folded"):
        EngineConfig.from_parameters({"model": "m"})


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        ("prefill_buckets", "1:320,2", '"2" is not requests:tokens, as in 1:320, with no more requests than tokens'),
        ("prefill_buckets", "9:8", '"9:8" is not requests:tokens'),
        ("lora_preload", "kal", r"there is no room for adapters \(lora_max_loras is 0\)"),
        ("threads", "1000000", "less than or equal to 1024"),
        ("devices", "0,cpux", r'"0,cpux" is not understood \(an engine worker on each of these, as 0,1 '),
        ("lora_target_modules_dit", "q_proj,x", r'"q_proj,x" is not understood \(projections of LocDiT that '),
    ],
)
def test_what_only_a_gpu_or_nobody_would_notice_is_refused_before_the_start(monkeypatch, setting, value, message):
    monkeypatch.setenv(f"DQ_ENGINE_{setting.upper()}", value)
    with pytest.raises(ValueError, match=f"^engine settings: {setting}: (Input.*)?{message}"):
        EngineConfig.from_parameters({"model": "m"})


def test_a_parameter_that_is_no_setting_is_named():
    with pytest.raises(ValueError, match="^engine settings: max_num_seq: is no setting$"):
        EngineConfig.from_parameters({"model": "m", "max_num_seq": "3"})


def test_two_adapters_to_preload_have_two_names():
    with pytest.raises(ValueError, match='lora_preload: .*"a" is the name of two adapters'):
        EngineConfig.from_parameters({"model": "m", "lora_max_loras": "2", "lora_preload": "a=x, b, a =y"})


def test_without_a_model_it_says_where_one_is_named(monkeypatch):
    monkeypatch.delenv("DQ_ENGINE_MODEL", raising=False)
    with pytest.raises(ValueError, match=r"^engine settings: model: is required \(variable DQ_ENGINE_MODEL\)$"):
        EngineConfig.from_parameters({})


def test_folders_with_letters_beyond_ascii_in_tritons_locale(tmp_path):
    """Its stubs run Python in the C locale, without UTF-8."""
    adapters, voices = tmp_path / "adaptér", tmp_path / "voix é" / "stored"
    adapters.mkdir()
    folders = {"DQ_ENGINE_LORA_DIR": str(adapters), "DQ_ENGINE_VOICES_DIR": str(voices)}
    locale = {"DQ_ENGINE_LORA_MAX_LORAS": "1", "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    program = """
import sys; assert sys.getfilesystemencoding() != "utf-8"
from dq_engine.config import EngineConfig; config = EngineConfig.from_parameters({"model": "m"})
print(ascii([config.lora_dir, config.voices_dir]))
"""
    environment = {**os.environ, **folders, **locale}
    run = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=60)
    assert run.stdout.strip() == ascii([str(adapters), str(voices)]), run.stderr
    assert voices.is_dir()
