# Common tasks. `make run` and `make test` need only Python >= 3.11.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
WORKER_STAMP := $(VENV)/.installed-worker
# vLLM pins its own versions of torch and transformers: it has an environment of its own, and runs beside the daemons of .venv.
VLLM_VENV ?= build/vllm-venv
VLLM_STAMP := build/vllm-venv/.installed
# Clients of OpenAI's API pin their own versions of much, too.
CLIENTS_VENV ?= build/clients-venv
CLIENTS_STAMP := build/clients-venv/.installed
PYTEST := $(BIN)/python -m pytest
# More processes than cores, as tests of faults wait for deadlines; a file's tests share daemons; slow files come first.
SPREAD := -n 4 --dist loadfile --no-loadscope-reorder
# Dozens of daemons and commands are started: each would compile its modules anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup setup-vllm run test test-all faults stalls soak stamps soak-service check fmt type bench fuzz schemas matrix test-vllm test-vllm-upstream test-clients test-gpu test-gpu-kernels test-gpu-daemons test-multi-gpu golden clean

help:            ## list the targets
	@grep -E '^[a-z-]+: .*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/'

setup: $(STAMP)  ## make .venv with pinned dependencies

$(WORKER_STAMP): pyproject.toml constraints.txt
	@echo "making $(VENV): torch and the rest are downloaded and installed, once; this takes minutes and prints nothing"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c constraints.txt setuptools wheel
	$(BIN)/python -m pip install -q -c constraints.txt torch
	$(BIN)/python -m pip install -q -c constraints.txt --no-build-isolation -e '.[worker]'
	touch $(WORKER_STAMP)

$(STAMP): $(WORKER_STAMP)
	@echo "adding the test tools to $(VENV), once"
	$(BIN)/python -m pip install -q -c constraints.txt --no-build-isolation -e '.[dev]'
	touch $(STAMP)

setup-vllm: $(VLLM_STAMP)  ## make build/vllm-venv: vLLM without a device, for `worker-client up-vllm` and make test-vllm

run: $(WORKER_STAMP)  ## make a small checkpoint, generate on two daemons, kill a driver and a daemon, compare the tokens
	$(BIN)/python -m worker_client.cli.demo_model build/demo-model
	$(BIN)/worker-client demo --model build/demo-model

test: $(STAMP)   ## run the tests that need no GPU: make test ARGS="--cpu-report build/cpu.json"
	$(PYTEST) tests --ignore tests/gpu --ignore tests/multi_gpu --ignore tests/vllm --ignore tests/clients $(SPREAD) $(ARGS)

test-all:        ## before a release: also the tests that show little beyond others
	$(MAKE) test ARGS="--exhaustive $(ARGS)"

faults: $(STAMP) ## inject each fault, print how soon it was noticed: make faults ARGS=--exhaustive
	mkdir -p build
	FAULTS=100000 $(BIN)/python -m pytest tests/faults -p no:xdist --fault-report build/faults.json $(ARGS)

STALLED := e2e faults unit/client unit/server unit/distributed unit/worker unit/device
stalls: $(STAMP) ## tests of several processes, of which one after the other is stopped, or all are slow: make stalls ARGS="--every 0.5 --longest 4", ARGS="--speed 0.4"
	$(BIN)/python -m tests.support.stalls $(ARGS) -- $(BIN)/python -m pytest $(addprefix tests/,$(STALLED)) $(SPREAD)

soak: $(STAMP)   ## half an hour of load with a fault every 10 s: make soak ARGS="--minutes 5 --seed 7 --tp", ARGS=--memory
	$(BIN)/python -m tests.support.soak $(ARGS)

stamps: $(STAMP) ## 1,000 weight updates under load, with kills; each token's version: make stamps ARGS="--only experts --updates 100"
	$(BIN)/python -m tests.support.stamps $(ARGS)

soak-service: $(STAMP)  ## 20 minutes of clients that leave, wrong bodies and killed daemons: make soak-service ARGS="--minutes 5 --seed 7"
	$(BIN)/python -m tests.support.service_soak $(ARGS)

check: $(STAMP)  ## lint, types, dependency directions, spelling
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/codespell

fmt: $(STAMP)    ## format and fix
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(STAMP)  ## measure the wire and, on a GPU, all else; update docs/performance.*: make bench ARGS="--only e2e --models llama-8b"
	$(BIN)/python -m benchmarks $(ARGS)

fuzz: $(STAMP)   ## hostile input, 10 minutes a fuzzer: make fuzz ARGS="--only patterns --seconds 600"
	$(BIN)/python -m tests.support.fuzz $(ARGS)

schemas: $(STAMP)         ## the public JSON schema suite against our grammars: make schemas ARGS="--outputs 100 --seed 7"
	$(BIN)/python -m pip download -q --no-deps --no-binary jsonschema -c constraints.txt -d build/schemas jsonschema
	$(BIN)/python -m tests.support.schema_suite build/schemas/jsonschema-*.tar.gz $(ARGS)

matrix:          ## run the tests on each Python and torch: make matrix ARGS=tests/contract PYTHONS=3.13 TORCHES=newest
	.ci/matrix $(ARGS)

test-vllm: $(STAMP) $(if $(filter build/vllm-venv,$(VLLM_VENV)),$(VLLM_STAMP))  ## vLLM's scheduler and server on our daemons: make test-vllm ARGS=tests/vllm/test_parity.py
	DAEMON_PYTHON=$(BIN)/python $(VLLM_VENV)/bin/python -m pytest -p no:asyncio $(or $(ARGS),tests/vllm)

$(VLLM_STAMP): tests/vllm/constraints.txt tests/vllm/make_environment.sh
	@echo "making build/vllm-venv: vLLM is downloaded and built, once; this takes minutes and prints nothing"
	tests/vllm/make_environment.sh $(PYTHON) build/vllm-venv
	touch $(VLLM_STAMP)

test-vllm-upstream: $(STAMP) $(if $(filter build/vllm-venv,$(VLLM_VENV)),$(VLLM_STAMP))  ## vLLM's own tests on our daemons, against tests/vllm/upstream.toml: make test-vllm-upstream ARGS=completion
	DAEMON_PYTHON=$(BIN)/python $(VLLM_VENV)/bin/python -m tests.vllm.upstream build/vllm/vllm-0.33.0.tar.gz $(ARGS)

test-clients: $(STAMP) $(if $(filter build/clients-venv,$(CLIENTS_VENV)),$(CLIENTS_STAMP))  ## openai, langchain, litellm, instructor and pydantic-ai on worker-client serve
	SERVER_PYTHON=$(BIN)/python $(CLIENTS_VENV)/bin/python -m pytest -p no:anyio -p no:unraisableexception $(or $(ARGS),tests/clients)

$(CLIENTS_STAMP): tests/clients/constraints.txt tests/clients/make_environment.sh
	@echo "making build/clients-venv: clients of OpenAI's API are downloaded, once; this takes minutes and prints nothing"
	tests/clients/make_environment.sh $(PYTHON) build/clients-venv
	touch $(CLIENTS_STAMP)

test-gpu: $(STAMP)        ## tests that need one GPU: kernels and daemons side by side, then those that need it alone
	$(MAKE) -j2 --output-sync=target test-gpu-kernels test-gpu-daemons
	$(BIN)/python -m pytest tests/gpu -m whole_gpu -p no:xdist

test-gpu-kernels: $(STAMP)
	$(BIN)/python -m pytest tests/gpu -m "kernels and not whole_gpu" -n 12 --dist worksteal

test-gpu-daemons: $(STAMP)
	$(BIN)/python -m pytest tests/gpu -m "not kernels and not whole_gpu" -n 5 --dist loadfile

test-multi-gpu: $(STAMP)  ## tests that need several GPUs
	$(BIN)/python -m pytest tests/multi_gpu

clean:           ## remove the environment and everything built
	rm -rf $(VENV) build
