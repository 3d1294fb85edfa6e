# `make help` explains the targets. A bare checkout needs make and Python 3.11 or later, no more.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
MAKEFLAGS += --no-builtin-rules

# Version managers install shims that exist and fail, so each candidate has to run.
PYTHON ?= $(shell for candidate in python3.11 python3.12 python3.13 python3 python; do \
	if "$$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; \
	then echo "$$candidate"; break; fi; done)
VENV := .venv
RUN := $(VENV)/bin/python

# onnxruntime's wheels write to the user's cache folder as soon as they are imported, but for this.
export ORT_DISABLE_TELEMETRY := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1

STAMP := $(VENV)/.installed

.PHONY: help
help: ## this text
	@echo "Tessera. Every target makes its environment ($(VENV)) by itself when it needs one."
	@echo
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-17s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo
	@echo "Variables: PYTHON (the interpreter that makes $(VENV)), TESSERA_DATA (folder of data"
	@echo "sets), ARGS (more arguments for bench-* and demo, as in make demo ARGS=--help)."

.PHONY: venv
venv: $(STAMP) ## the environment with every extra, at the versions in constraints.txt

$(STAMP): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "No Python 3.11 or later found: install one, or name it with" \
		"make PYTHON=/path/to/python3.11" >&2; exit 1; }
	test -x $(RUN) || "$(PYTHON)" -m venv $(VENV)
	$(RUN) -m pip install --quiet --constraint constraints.txt \
		--editable '.[aggregator,cluster,console,export,demo,simulate,tensorboard,docs,dev]'
	touch $@

# What the demo needs, in a fraction of the time: no torch, no tools.
DEMO := $(VENV)/.installed-demo

$(DEMO): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "No Python 3.11 or later found: install one, or name it with" \
		"make PYTHON=/path/to/python3.11" >&2; exit 1; }
	test -x $(RUN) || "$(PYTHON)" -m venv $(VENV)
	test $(STAMP) -nt pyproject.toml -a $(STAMP) -nt constraints.txt || $(RUN) -m pip install \
		--quiet --constraint constraints.txt --editable '.[aggregator,demo]'
	touch $@

.PHONY: test test-all
# The tests start hundreds of processes: each would compile our modules again.
test test-all: export PYTHONDONTWRITEBYTECODE :=
# Types are checked beside the tests. One process collects before there are several: what pytest makes
# of each test file is then on the disk for all, and an error in any is said before the first test.
test: lint ## linters, type checker, and tests of every promise
	$(MAKE) --no-print-directory --jobs 2 types tested WHICH="not exhaustive"
test-all: lint ## the same with every test: all cases of what `make test` takes some of
	$(MAKE) --no-print-directory --jobs 2 types tested

.PHONY: tested
tested: $(STAMP)
	@said="$$($(RUN) -m pytest --collect-only -qq $(ARGS))" || { echo "$$said"; exit 1; }
	$(RUN) -m pytest -m "$(WHICH)" -n auto --dist worksteal --hypothesis-profile=ci --durations=15 \
		$(ARGS)

.PHONY: fuzz
fuzz: $(STAMP) ## every decoder against coverage-guided bytes (MINUTES=5, or ARGS=--help)
	$(RUN) -m tests.fuzz --minutes $(or $(MINUTES),5) $(ARGS)

.PHONY: fuzz-export
fuzz-export: $(STAMP) ## random train steps, exported and trained beside torch (MINUTES=10, or ARGS=--help)
	$(RUN) -m tests.fuzz.train_steps --minutes $(or $(MINUTES),10) $(ARGS)

.PHONY: fuzz-export-power
fuzz-export-power: $(STAMP) ## which defects of the exporter random train steps find (ARGS=--help)
	$(RUN) -m tests.fuzz.train_steps.power $(ARGS)

.PHONY: models
models: ## the protocol's models searched by spin, old rules and new (ARGS=--quick, ARGS=--trails)
	"$(PYTHON)" docs/models/check.py $(ARGS)

.PHONY: lint
lint: $(STAMP) ## ruff: rules and format
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .

.PHONY: types
types: $(STAMP) ## mypy --strict on the three packages
	$(RUN) -m mypy --strict

.PHONY: format
format: $(STAMP) ## let ruff mend what it can
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

.PHONY: demo
demo: $(DEMO) ## 48 unequal devices learn one model over MQTT, with a report (ARGS=--recommender: films)
	$(RUN) -m examples.demo $(ARGS)

.PHONY: artifact
artifact: $(STAMP) ## rebuild the artifacts that the wheel carries: the factorisation, the demo's ladder
	$(VENV)/bin/tessera-export mf -o device_sdk/artifacts/mf
	$(RUN) -c "from export.models.digits import export_digits as e; e('device_sdk/artifacts/digits')"

.PHONY: docs
docs: $(STAMP) ## the documentation as a site, in site/
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --quiet --strict

.PHONY: screenshots
screenshots: $(STAMP) ## pictures of the console for docs/operating/console.md (needs chromium and mosquitto)
	$(RUN) -m tests.screenshots

.PHONY: wheel
wheel: $(STAMP) ## build the wheel into dist/
	$(RUN) -m build --wheel --no-isolation

.PHONY: release
release: $(STAMP) ## sdist and wheel, attested, tried on each Python with each extra (ARGS=--help)
	$(RUN) -m benchmarks.distributions $(ARGS)
	$(RUN) -m benchmarks.device_wheels

# PYTHON makes the environments: `make newest PYTHON=python3.13`.
.PHONY: newest
newest: $(STAMP) ## the wheel with the newest and the lowest releases it takes: survey and demo (ARGS=--help)
	$(RUN) -m benchmarks.releases --python "$(PYTHON)" $(ARGS)

.PHONY: wheels-check
wheels-check: $(STAMP) ## every device dependency has a binary wheel on every device platform
	$(RUN) -m benchmarks.device_wheels $(ARGS)

.PHONY: arm64
arm64: $(STAMP) ## the device's install on an emulated aarch64, its train steps beside ours (ARGS=--help)
	$(RUN) -m benchmarks.arm64 $(ARGS)

.PHONY: bench-device
bench-device: $(STAMP) ## train steps, memory and install size against torch
	$(RUN) -m benchmarks.device $(ARGS)

.PHONY: bench-memory
bench-memory: $(STAMP) ## models of large state: peak memory and step time in place, in two banks, with torch
	$(RUN) -m benchmarks.device.large_state $(ARGS)

.PHONY: export-survey
export-survey: $(STAMP) ## models written by others: exported, verified, trained beside torch
	$(RUN) -m benchmarks.export_survey $(ARGS)

# torch with CUDA, of the version that the exporter is tested with, and onnxruntime's CUDA build in
# place of the device's onnxruntime: they would overwrite each other in $(VENV).
GPU_VENV := .venv-gpu
.PHONY: bench-gpu
bench-gpu: ## train steps on a CUDA GPU against torch's, row by row, 9 minutes at a time (ARGS=--parity)
	@command -v nvidia-smi >/dev/null && nvidia-smi -L || { echo "bench-gpu: no NVIDIA GPU here:" \
		"nvidia-smi is missing or finds none. The same without one: python -m" \
		"benchmarks.device_gpu --provider cpu" >&2; exit 2; }
	@test -e $(GPU_VENV)/.installed || { "$(PYTHON)" -m venv $(GPU_VENV) && \
		$(GPU_VENV)/bin/python -m pip install --quiet \
			"torch===$$(sed -n 's/^torch==//p' constraints.txt)" \
			"onnxruntime-gpu[cuda,cudnn]==$$(sed -n 's/^onnxruntime==//p' constraints.txt)" \
			onnx sympy tabulate numpy cryptography 'paho-mqtt>=2,<3' && \
		$(GPU_VENV)/bin/python -m pip install --quiet --no-deps --editable . && \
		touch $(GPU_VENV)/.installed; }
	$(GPU_VENV)/bin/python -m benchmarks.device_gpu --write-docs $(ARGS)

.PHONY: trace-round
trace-round: $(STAMP) ## files and functions that a round runs through on a device (ARGS=--list)
	$(RUN) -m benchmarks.device.trace_round $(ARGS)

.PHONY: bench-size
bench-size: $(STAMP) ## size and import time of the device install, held to their budget
	$(RUN) -m benchmarks.install_size --check $(ARGS)

.PHONY: bench-scatter
bench-scatter: $(STAMP) ## accuracy of scatter aggregation on MovieLens, equal and unequal fleets
	$(RUN) -m benchmarks.scatter $(ARGS)

.PHONY: bench-baselines
bench-baselines: $(STAMP) ## popularity, EASE and iALS on MovieLens, what scatter is compared with
	$(RUN) -m benchmarks.recommendation $(ARGS)

.PHONY: bench-privacy
bench-privacy: $(STAMP) ## which likes a curious aggregator reads out of scatter's updates
	$(RUN) -m benchmarks.privacy $(ARGS)

.PHONY: bench-robust
bench-robust: $(STAMP) ## what hostile devices do to a model on MovieLens 100K, and what helps
	$(RUN) -m benchmarks.robust $(ARGS)

.PHONY: bench-attention
bench-attention: $(STAMP) ## attention-based aggregation and its baselines on V-MNIST and Beijing air
	$(RUN) -m benchmarks.attention $(ARGS)

.PHONY: bench-distill
bench-distill: $(STAMP) ## attentive federated distillation on MovieLens 1M beside FedAvg
	$(RUN) -m benchmarks.distill $(ARGS)

.PHONY: bench-submodels
bench-submodels: $(STAMP) ## fleets that train parts of one model beside equal ones, on seven tasks
	$(RUN) -m benchmarks.submodels $(ARGS)

.PHONY: bench-async
bench-async: $(STAMP) ## rounds that wait for all, close early, or count what is late, in virtual time
	$(RUN) -m benchmarks.staleness $(ARGS)

.PHONY: bench-personalisation
bench-personalisation: $(STAMP) ## models of devices' own on PFLlib's split of Fashion-MNIST, nine ways
	$(RUN) -m benchmarks.personalisation $(ARGS)

.PHONY: bench-mutual
bench-mutual: $(STAMP) ## mutual learning and its baselines on Rotated MNIST and PACS
	$(RUN) -m benchmarks.mutual $(ARGS)

.PHONY: bench-recipe
bench-recipe: $(STAMP) ## what devices with a few rows of a table learn by the defaults
	$(RUN) -m benchmarks.recipe $(ARGS)

.PHONY: bench-aggregator
bench-aggregator: $(STAMP) ## updates a second through the aggregator
	$(RUN) -m benchmarks.aggregator $(ARGS)

.PHONY: bench-console
bench-console: $(STAMP) ## what open pages of the console cost the aggregator, by turns
	$(RUN) -m benchmarks.console $(ARGS)

.PHONY: bench-cluster
bench-cluster: $(STAMP) ## what a worker, a coordinator and a device cost (ARGS='--postgres URL')
	$(RUN) -m benchmarks.cluster $(ARGS)

SEED ?= 1
DEVICES ?= 500
chaos: MINUTES ?= 3
soak: MINUTES ?= 30

.PHONY: chaos
chaos: $(STAMP) ## faults of every kind, judged by an oracle (SEED=n MINUTES=m ARGS=--cluster)
	$(RUN) -m tests.faults --seed $(SEED) --minutes $(MINUTES) $(ARGS)

.PHONY: soak
soak: $(STAMP) ## memory, files and threads of a fleet over time (MINUTES=30 DEVICES=500)
	$(RUN) -m tests.faults.soak --minutes $(MINUTES) --devices $(DEVICES) $(ARGS)

.PHONY: brokers
brokers: $(STAMP) ## a fleet's whole life with each broker, near and far away, as a table
	$(RUN) -m tests.faults.matrix $(ARGS)

.PHONY: mutants
mutants: $(STAMP) ## change code that must not be wrong: does a test notice? (ARGS=envelope)
	$(RUN) -m tests.mutants $(ARGS)

.PHONY: bench-attack
bench-attack: $(STAMP) ## honest throughput under floods; the aggregator's return after kill -9
	$(RUN) -m benchmarks.aggregator.attack $(ARGS)

.PHONY: bench-peers
bench-peers: $(STAMP) ## the same rounds in other simulators, each in an environment of its own
	$(RUN) -m benchmarks.peers $(ARGS)

.PHONY: shape
shape: $(STAMP) ## files, lines and class names of the product (ARGS='. ../another/checkout')
	$(RUN) -m benchmarks.shape $(ARGS)

.PHONY: clean
clean: ## remove the environment, caches and built distributions
	rm -rf $(VENV) build dist out .mypy_cache .pytest_cache .ruff_cache .hypothesis
