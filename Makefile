# One command each; `make` alone lists them.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PROFILE ?= full
MODELS ?= organisms
RESULTS ?= runs
JOBS ?=
READY := $(VENV)/.kvprobe-ready
BENCH_READY := $(VENV)/.kvprobe-bench-ready
DOCS_READY := $(VENV)/.kvprobe-docs-ready

.DEFAULT_GOAL := help
SECTIONS := $(addprefix reproduce-section-,3 4 5 6)
.PHONY: help install $(SECTIONS) reproduce-pretrained calibrate released report bench docs docs-serve test test-slow notebooks lint types check organisms clean

help: ## list the targets
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 24

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	@touch $@

install: $(READY) ## set up .venv with kvprobe and its tools

reproduce-section-3: $(READY) ## section 3 of the paper (the mechanism) on four model families: figure and verdict table
reproduce-section-4: $(READY) ## section 4 (editing): cost against correctness of all edits, errata, weight editing
reproduce-section-5: $(READY) ## section 5 (composing): reuse schemes, seams, offsets, latency, libraries of skills
reproduce-section-6: $(READY) ## section 6 (both): edits inside composed skills, the agent, long trajectories
$(SECTIONS): reproduce-section-%:
	$(BIN)/kvprobe run section$* --models $(MODELS) --profile $(PROFILE) --results $(RESULTS) \
	  $(if $(JOBS),--jobs $(JOBS))

# Sections 3 to 5 as far as a small pretrained model can be asked; each line of results is on it alone.
PRETRAINED := locality suffix_concentration knockout erratum_controls transplant
reproduce-pretrained: $(READY) ## the core of the paper on Qwen2.5-Coder-1.5B-Instruct (1.1 GB to fetch; under an hour on two cores)
	$(BIN)/kvprobe models pull qwen2.5-coder-1.5b
	$(BIN)/kvprobe run $(PRETRAINED) --profile pretrained --results $(RESULTS)-pretrained

calibrate: $(READY) ## the same probes on models whose mechanism is known: notes on one, none on the other
	$(BIN)/kvprobe run section3 cot_gate erratum_controls erratum_phrasing removal eviction transplant --profile calibration --results $(RESULTS)-calibration

released: $(READY) ## our own runs of all sections, as kept in results/released (about 50 minutes on two cores)
	for section in 3 4 5 6; do \
	  $(BIN)/kvprobe run section$$section --results results/released $(if $(JOBS),--jobs $(JOBS)) || exit 1; done
	$(BIN)/kvprobe release results/released

report: $(READY) ## draw figures and write summaries of finished runs again
	$(BIN)/kvprobe report $(RESULTS)

$(DOCS_READY): $(READY)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[docs]'
	@touch $@

docs: $(DOCS_READY) ## the documentation, into site/
	$(BIN)/mkdocs build --strict --quiet

docs-serve: $(DOCS_READY) ## the documentation, shown while it is written
	$(BIN)/mkdocs serve

$(BENCH_READY): $(READY)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[bench]'
	@touch $@

bench: $(BENCH_READY) ## speed beside other tools and the machine's limit (QUICK=1: a first look; ONLY=position,head: parts)
	$(BIN)/kvprobe models pull smollm2-135m
	$(BIN)/python -m benchmarks $(if $(QUICK),--quick) $(if $(ONLY),--only $(ONLY))

test: $(READY) ## the test suite, warnings as errors
	$(BIN)/python -m pytest -q -n auto --dist worksteal

test-slow: $(READY) ## the slow tests
	$(BIN)/python -m pytest -q -m slow

notebooks: $(READY) ## run every notebook, each in a Python of its own
	$(BIN)/python -m pytest -q --nbmake --nbmake-timeout=600 --timeout=0 notebooks

lint: $(READY) ## ruff, and the layers of the package
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-logo

types: $(READY) ## mypy
	$(BIN)/mypy

check: lint types test ## everything CI checks

organisms: $(READY) ## train the shipped organisms again (hours)
	for kind in note-taker reader; do for family in qwen3 llama gemma2 mistral; do \
	  $(BIN)/kvprobe organisms train --family $$family --kind $$kind; done; done

clean: ## remove the virtual environment and caches
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
