# Two commands on a fresh Debian or Ubuntu machine: `make demo` and `make test`.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
RUN_TESTS := $(BIN)/python -m pytest

.PHONY: demo test slow nightly simulate browser clients cgroup-v2 check unit lock bench soak docs clean

demo: $(VENV)/.ready-demo ## a real model behind an OpenAI-compatible endpoint, until Ctrl-C
	@scripts/system-packages demo
	@$(BIN)/python scripts/demo.py $(if $(ONESHOT),--oneshot) $(if $(MODEL),--model '$(MODEL)')

test: $(VENV)/.ready-check ## lint, types, import contracts, and the tests, in some ten minutes on two cores
	@scripts/system-packages test
	$(MAKE) --no-print-directory check
	$(RUN_TESTS) --ignore=tests/browser --ignore=tests/clients -m "not slow" -n 2 --dist loadfile $(PYTEST)

slow: $(VENV)/.ready-check ## the tests that take minutes each
	@scripts/system-packages test
	$(RUN_TESTS) --ignore=tests/browser --ignore=tests/clients -m slow -n 2 --dist loadfile $(PYTEST)

simulate: $(VENV)/.ready-check ## seeds of the simulation: SEED=N replays one with its trace, SEEDS=N runs so many
	cd tests && PYTHONPATH=. ../$(BIN)/python -m simulation $(if $(SEED),--seed $(SEED),--seeds $(or $(SEEDS),200)) $(SIMULATE)

nightly: slow browser ## every client, 10,000 seeds of the simulation, ten minutes of fuzzing the header reader
	$(MAKE) --no-print-directory clients ALL=1
	$(BIN)/python scripts/clients_page.py
	$(MAKE) --no-print-directory simulate SEEDS=10000
	$(MAKE) --no-print-directory soak
	$(BIN)/pip install --quiet atheris==3.0.0
	$(BIN)/python tests/fuzz/gguf.py .cache/fuzz-gguf -max_total_time=600

browser: $(VENV)/.ready-check ## the console in a real browser
	@scripts/system-packages browser
	$(RUN_TESTS) tests/browser $(PYTEST)

clients: $(VENV)/.ready-check ## OpenAI's clients against a running installation, ALL=1: others too
	@scripts/system-packages clients
	$(RUN_TESTS) tests/clients $(if $(ALL),,-m clients_ci) $(PYTEST)

check: $(VENV)/.ready-check ## lint, types, import contracts
	$(BIN)/ruff format --check src tests scripts bench
	$(BIN)/ruff check src tests scripts bench
	$(BIN)/mypy
	$(BIN)/lint-imports

unit: $(VENV)/.ready-check ## the quick tests alone
	$(RUN_TESTS) tests/unit tests/docs $(PYTEST)

cgroup-v2: $(VENV)/.ready-check ## sandboxes on pure cgroup v2 and without root, in a machine of their own
	@scripts/system-packages machine
	PYTHONPATH=tests $(BIN)/python -m machine $(PYTEST)

bench: $(VENV)/.ready-check ## what the relay costs, side by side with a direct connection
	@scripts/system-packages bench
	$(BIN)/python -m bench $(BENCH)

soak: $(VENV)/.ready-check ## MINUTES (10) of every kind of request, and whether anything is left of them
	@scripts/system-packages bench
	PYTHONPATH=tests $(BIN)/python -m bench.soak --minutes $(or $(MINUTES),10)

docs: $(VENV)/.ready-check ## pages that are made from the code
	$(BIN)/python scripts/lifecycle_diagrams.py
	$(BIN)/python scripts/reference.py
	$(BIN)/python scripts/openapi.py
	$(BIN)/python scripts/contract_page.py

lock: $(VENV)/.ready-check ## resolve the dependencies anew
	$(BIN)/pip install --quiet uv
	scripts/lock $(BIN)/uv

clean:
	rm -rf $(VENV) .cache dist build

$(VENV)/.ready-demo: requirements/demo.lock pyproject.toml scripts/virtual-environment
	@scripts/virtual-environment $(PYTHON) $(VENV) requirements/demo.lock
	@touch $@

$(VENV)/.ready-check: requirements/check.lock requirements/model.lock pyproject.toml scripts/virtual-environment
	@scripts/virtual-environment $(PYTHON) $(VENV) requirements/check.lock requirements/model.lock
	@touch $@
