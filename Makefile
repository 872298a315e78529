# Everything a newcomer types: `make run` and `make test`. Both build .venv when it is missing or stale.
PYTHON ?= $(shell command -v python3.11 || command -v python3.12 || command -v python3.13 || command -v python3)
BIN := .venv/bin
STAMP := .venv/.built

# Bytecode is kept even where the environment says otherwise: the tests start many processes.
PYTEST := env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m pytest -n auto --dist worksteal -q

# Of the tests of the TRL integration, those that need TRL; `make test` runs the others.
TRL_TESTS := $(filter-out tests/test_integrations_trl_parts.py, $(wildcard tests/test_integrations_trl*.py))

.PHONY: run test test-all test-results test-kill test-trl test-sweep test-docs test-browser test-install test-gpu mutants check format clean

run: $(STAMP)
	$(BIN)/scoregram replicate --preset quick --out runs/quick

test: $(STAMP)
	$(PYTEST)

# Writes benchmarks/results/sweep-all.json.
test-all: $(STAMP)
	$(PYTEST) -p tests.sweep_record --sweep-record sweep-all.json -m "not gpu"

# The newest version of TRL that was tested, then the oldest.
test-trl: $(STAMP)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev,trl]'
	$(PYTEST) -m "integration or not slow" $(TRL_TESTS)
	$(BIN)/python -m pip install --quiet --no-deps --upgrade --target .trl/oldest trl==1.0.0
	PYTHONPATH=.trl/oldest $(PYTEST) -m "integration or not slow" $(TRL_TESTS)

# The architectures of transformers that `make test` leaves out: all but the 18 of `QUICK`.
# Writes benchmarks/results/sweep-ci.json.
test-sweep: $(STAMP)
	$(PYTEST) -p tests.sweep_record --sweep-record sweep-ci.json -m slow -k "every_axis or is_replayed or fused_experts" tests/test_gram_sweep.py

# The committed results, recomputed from their Grams, and advice on runs of noise and on runs with a fault, made again.
# Here and below, `make test` runs the tests that are not slow.
test-results: $(STAMP)
	$(PYTEST) -m "slow and not gpu" tests/test_results*.py tests/test_advice*.py tests/test_planted_faults.py

# Runs and measurements killed at some moments; `make test-all` kills them at every moment.
KILL_TESTS := tests/test_runs_kill.py::test_killed_at_every_third_operation_and_at_random_moments \
	tests/test_measure_kill.py::test_a_measurement_killed_at_some_operations_is_completed \
	tests/test_replication_kill.py::test_a_killed_parent_takes_its_runs_along_after_their_step
test-kill: $(STAMP)
	$(PYTEST) -m slow $(KILL_TESTS)

# The slow commands and snippets of the pages, run as printed, and the whole ledger of claims.
test-docs: $(STAMP)
	$(PYTEST) -m "(slow or integration) and not gpu" tests/test_docs.py tests/test_contributing.py tests/test_cli.py::test_the_whole_ledger_is_strict_json

test-browser: $(STAMP)
	$(PYTEST) -m browser tests/test_report_browser.py tests/test_report_view.py

# Wheel and sdist in clean environments, and every extra against constraints.txt.
test-install:
	.ci/install

# On a machine with a CUDA device: needs the tree and an interpreter with torch, Triton, transformers, peft and pytest.
# Writes benchmarks/results/gpu-tests.json.
GPU_PYTHON ?= $(if $(wildcard $(STAMP)),$(BIN)/python,python3)
test-gpu:
	$(GPU_PYTHON) tests/gpu.py $(GPU_FLAGS)

# Breaks one rule of the code at a time and expects a test to fail. An area alone: make mutants ONLY=estimators.
# Writes benchmarks/results/mutants.json.
mutants: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.mutants --only "$(ONLY)" $(MUTANT_FLAGS)

check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("scoregram needs Python 3.11 or newer, got %d.%d; run make PYTHON=/path/to/python3.11" % sys.version_info[:2])'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $(STAMP)

clean:
	rm -rf .venv .trl build dist .pytest_cache .ruff_cache .hypothesis
