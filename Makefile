# `make help` lists what there is. Every target sets up what is missing first (tools/setup.sh); a second run starts at once.

SHELL := /bin/bash
.DEFAULT_GOAL := help
.PHONY: help setup setup-test demo serve test test-all test-nano gpu-smoke lint clean

# make MODEL=openbmb/VoxCPM2 demo: a directory or a repository of the Hugging Face hub
MODEL ?= $(or $(DQ_ENGINE_MODEL),models/small)
HTTP_PORT ?= 8000
GRPC_PORT ?= 8001
METRICS_PORT ?= 8002
# The interpreter of .venv (python3, python3.12, 3.11 or 3.10 by default), and an additional index to take torch from.
PYTHON ?=
TORCH_INDEX ?=
# Of the demo
TEXT ?=
REFERENCE ?=
OUT ?=
# Of the tests: PYTEST='tests/server -k cancel' runs some of them, one after the other
PYTEST ?=
# Of test-nano: a version of nano-vllm-voxcpm
NANO ?= 2.0.4

export PYTHON TORCH_INDEX
# The tests choose their own.
demo serve: export MODEL := $(MODEL)
serve: export HTTP_PORT := $(HTTP_PORT)
serve: export GRPC_PORT := $(GRPC_PORT)
serve: export METRICS_PORT := $(METRICS_PORT)
demo: export TEXT := $(TEXT)
demo: export REFERENCE := $(REFERENCE)
demo: export OUT := $(OUT)

python := .venv/bin/python

help:
	@echo "make demo      one sentence through a real server into demo.wav and demo.png"
	@echo "               MODEL=openbmb/VoxCPM2 or /dir, TEXT='...', REFERENCE=voice.wav, OUT=demo.wav"
	@echo "make serve     the server in the foreground until Ctrl-C; MODEL, HTTP_PORT, GRPC_PORT, METRICS_PORT"
	@echo "make test      every test that is not slow, without a GPU those that need none; PYTEST='arguments of pytest'"
	@echo "make test-all  the slow tests too"
	@echo "make test-nano the tests of everything below Triton with another version of nano-vllm-voxcpm; NANO=2.0.4"
	@echo "make gpu-smoke whether this machine's GPUs can serve, check by check"
	@echo "make lint      ruff"
	@echo "make setup     only sets up .venv; PYTHON=python3.12, TORCH_INDEX=index of PyTorch's CPU builds"
	@echo "make clean     removes .venv and what builds and tests leave"

setup:
	@tools/setup.sh server

setup-test:
	@tools/setup.sh test

demo: setup
	@exec $(python) tools/demo.py

serve: setup
	@exec docker/entrypoint.sh

# Two files at a time, a core each; then, whatever came of them, the tests that need the machine for themselves. With a GPU
# one file at a time: each engine takes most of its memory.
test: which := not slow
test-all: which := slow or not slow
test test-all: setup-test
ifeq ($(strip $(PYTEST) $(shell command -v nvidia-smi)),)
	@failed=0; \
	OMP_NUM_THREADS=1 $(python) -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder -m "($(which)) and not alone" || failed=1; \
	$(python) -m pytest -m "($(which)) and alone" || failed=1; \
	exit $$failed
else
	$(python) -m pytest -m "$(which)" $(PYTEST)
endif

test-nano: setup-test
	$(python) -m pip install --quiet --upgrade --no-deps --target build/nano-$(NANO) nano-vllm-voxcpm==$(NANO)
	PYTHONPATH=build/nano-$(NANO) $(python) -m pytest -m "not slow" tests/test_nano_versions.py \
		tests/unit tests/engine tests/parallel tests/serving tests/api tests/offline $(PYTEST)

gpu-smoke: setup
	$(python) tools/gpu_smoke.py

lint: setup-test
	$(python) -m ruff check .

clean:
	rm -rf .venv .pytest_cache .ruff_cache .hypothesis backend_src/*.egg-info backend_src/build build/nano-*
	find . -name __pycache__ -not -path './.git/*' -prune -exec rm -rf {} +
