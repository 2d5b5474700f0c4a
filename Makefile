# `make serve` and `make test` need only Python (3.11 or newer) and make. See `make help`.

PYTHON ?= python3
ARGS ?=
export PYTHON
BIN := .venv/bin
RUNTIME := .venv/.installed-runtime
DEV := .venv/.installed-dev

.DEFAULT_GOAL := help
.PHONY: help setup serve test test-all test-processors test-arm test-gpu test-compile test-interpreter test-browser test-clients test-oldest-ray test-cluster check bench bench-gpu monitor dashboards lock clean distclean

help: ## Show this list
	@sed -n 's/^\([a-z-]*\):.*## /  make \1|/p' $(firstword $(MAKEFILE_LIST)) | awk -F'|' '{ printf "%-20s %s\n", $$1, $$2 }'
	@echo "  Options: ARGS='...' goes to the command, PYTHON=python3.12 chooses the interpreter."

serve: $(RUNTIME) ## Serve the demo model (ARGS='--port 9000')
	@exec $(BIN)/transom serve smollm2 $(ARGS)

setup: $(DEV) ## Install everything, tests and checks included

# PYTHONDONTWRITEBYTECODE is emptied: where an environment sets it, each of the many processes that tests start would compile every module anew.
test: $(DEV) ## Run the daily tests (ARGS='-k sampling')
	@OMP_WAIT_POLICY=PASSIVE PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder $(ARGS)

test-all: $(DEV) ## Run the daily and the exhaustive tests, and the groups interpreter, compile, browser, gpu and cluster; those that cannot run here say why
	@scripts/test_all $(ARGS)

test-processors: $(DEV) ## Run the numeric tests as other processors and numbers of threads would (ARGS='tests/kernels -k route')
	@scripts/test_processors $(ARGS)

test-arm: $(DEV) ## Run a small case of every CPU operator as ARM processors, in an emulator (Debian; scripts/test_arm says what it needs)
	@scripts/test_arm $(ARGS)

test-gpu: $(DEV) ## Run the tests that need a CUDA device
	@$(BIN)/python -m pytest -m gpu $(ARGS)

test-compile: $(DEV) ## Compile every kernel in every configuration for GPUs that need not be there (TRITON=3.6.0: torch 2.11's)
	@folder=$$(mktemp -d) && trap 'rm -rf "$$folder"' EXIT && \
		{ [ -z "$(TRITON)" ] || $(BIN)/python -m pip install --quiet --no-deps --target "$$folder" triton==$(TRITON); } && \
		PYTHONPATH="$$folder" $(BIN)/python -m pytest -m compile -s $(ARGS)

test-interpreter: $(DEV) ## Run small models of every family through Triton's kernels on the CPU
	@OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m pytest -m interpreter -n auto --maxprocesses 4 $(ARGS)

test-browser: $(DEV) ## Run the tests that need Chromium (Debian: apt-get install chromium)
	@for name in chromium chromium-browser google-chrome google-chrome-stable; do command -v $$name >/dev/null && exit; done; \
		echo "No Chromium on PATH, so these tests skip. Debian: apt-get install chromium. Playwright's own download is not used."
	@$(BIN)/python -m pytest -m browser tests/browser $(ARGS)

test-clients: $(DEV) ## Run Codex, agents, benchmarks and client libraries of other makers against a server (needs npm; downloads 400 MB)
	@scripts/test_clients $(ARGS)

OLDEST_RAY = 2.58.0
test-oldest-ray: $(DEV) ## Run the serving tests with the oldest Ray that pyproject.toml names
	@folder=$$(mktemp -d) && trap 'rm -rf "$$folder"' EXIT && \
		$(BIN)/python -m pip install --quiet --no-deps --target "$$folder" ray==$(OLDEST_RAY) && export PYTHONPATH="$$folder" && \
		$(BIN)/python -m pytest tests/cluster/serve tests/cluster/commands && \
		OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m pytest -m serve tests/end_to_end/test_serve.py $(ARGS)

test-cluster: $(DEV) ## Run the tests that need root and network namespaces
	@OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m pytest -m cluster $(ARGS)

check: $(DEV) ## Format, lint, types, import rules, tests (ARGS=--no-tests)
	@scripts/check $(ARGS)

bench-gpu: ## Check and measure on a GPU (ARGS='kernels'; docs/gpu.md)
	@benchmarks/gpu.sh $(ARGS)

bench: $(RUNTIME) ## Benchmark the demo model, offline and over HTTP (ARGS='URL --concurrency 1,4' for a server that runs)
	@$(if $(findstring ://,$(ARGS)),true,$(BIN)/transom bench offline smollm2)
	@$(BIN)/python -m benchmarks.serving.load $(ARGS)

monitor: $(RUNTIME) ## Watch a running server: Prometheus, and Grafana if installed (ARGS='--url URL --api-key-file FILE')
	@exec $(BIN)/python -m scripts.monitor $(ARGS)

dashboards: $(DEV) ## Write Grafana's dashboards from their code
	@$(BIN)/python -m dashboards.build

lock: $(DEV) ## Pin what is installed now in constraints.txt
	@$(BIN)/python scripts/lock

clean: ## Remove caches and local results
	@rm -rf .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache .coverage build dist benchmarks/results/local
	@find . -name __pycache__ -type d -not -path './.venv/*' -prune -exec rm -rf {} +

distclean: clean ## Remove the environment as well
	@rm -rf .venv

$(RUNTIME): pyproject.toml constraints.txt
	@scripts/setup runtime

$(DEV): $(RUNTIME)
	@scripts/setup dev
