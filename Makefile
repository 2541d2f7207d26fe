# Everything a checkout needs. `make` alone lists the targets; all work with `make -C FOLDER`.
VARIANT ?= cpu
PORT ?= 8000
# Extra flags for `gti serve`, `gti demo` or pytest: make run ARGS="--engine reference"
ARGS ?=
PYTHON ?= python3
TEST_THREADS ?= $(shell nproc 2>/dev/null || echo 2)
IMAGE ?= gti-serve:$(VARIANT)
BASE_IMAGE ?= docker.io/library/python:3.11-slim-bookworm
# Extra flags for the image build, such as --secret id=pip.conf,src=/etc/pip.conf
IMAGE_FLAGS ?=

BIN := .venv/bin
# The environment's own interpreter starts faster than a version manager's shim.
SETUP = $$(test -x $(BIN)/python && echo $(BIN)/python || echo $(PYTHON)) \
	-S -E scripts/setup.py --variant $(VARIANT)
# Model code reads local files only and reports to nobody.
export HF_HUB_OFFLINE ?= 1
export VLLM_NO_USAGE_STATS ?= 1

.DEFAULT_GOAL := help
.PHONY: help setup run test contract check format bench demo openapi lock image clean clean-all

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-10s %s\n", $$1, $$2 }' Makefile

setup: ## Make .venv from the locks, if they changed (VARIANT=cpu or gpu)
	@$(SETUP)

run: setup ## Serve the demo bundle on PORT (8000)
	@exec $(BIN)/gti serve --port $(PORT) $(ARGS)

test: setup ## Run all tests
	@OMP_NUM_THREADS=$(TEST_THREADS) $(BIN)/python -m pytest -q $(ARGS)

contract: setup ## Hold a service to its OpenAPI document (ARGS="--examples 5000")
	$(BIN)/python -m tests.contract $(ARGS)

check: setup ## Check format, lint and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/mypy scripts/*.py

format: setup ## Format the code and fix what ruff can fix
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: setup ## Measure decoding, the constraint and training; JSON in runs/bench (ARGS=--quick)
	@mkdir -p runs/bench
	$(BIN)/python -m bench.decode --json runs/bench/decode.json $(ARGS)
	$(BIN)/python -m bench.constraint --json runs/bench/constraint.json $(ARGS)
	$(BIN)/python -m bench.training --json runs/bench/training.json $(ARGS)

demo: setup ## Train the demo bundle again, from nothing (hours); result in runs/demo/bundle
	$(BIN)/gti demo $(ARGS)

openapi: setup ## Write openapi.yaml from the code
	@$(BIN)/gti openapi

lock: ## Recompile requirements/*.lock (ARGS=--upgrade, or names: ARGS=dev)
	$(PYTHON) -E scripts/lock.py $(ARGS)

image: ## Build the container image with docker or buildah (VARIANT, BASE_IMAGE, IMAGE_FLAGS)
	@if docker info >/dev/null 2>&1; then build="docker build"; \
	elif command -v buildah >/dev/null; then build="buildah bud --format docker"; \
	else echo "make image needs a running docker, or buildah" >&2; exit 1; fi; set -x; \
	$$build --build-arg BASE_IMAGE=$(BASE_IMAGE) --build-arg VARIANT=$(VARIANT) \
		$(IMAGE_FLAGS) -t $(IMAGE) .

clean: ## Remove caches and build output
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis *.egg-info
	find . -path ./.venv -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

clean-all: clean ## Remove also .venv and the service's data (.gti)
	rm -rf .venv .gti
