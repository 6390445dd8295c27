# Needs Python 3.11 or newer and make. Everything is installed from the lock files in requirements/, hashes checked,
# into .venv. Paths are relative, so that a checkout may lie in a directory with spaces in its name.

PYTHON ?= python3
VENV ?= .venv
NEWER_PYTHONS := 3.14 3.13 3.12

BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip --disable-pip-version-check --quiet install
DEMO := plan train llama3-70b --on v5p:16x16x16 --batch-tokens 4Mi --seq 4096 --tokens 15T
DEMO_COMPILED := plan train llama3.2-1b --on v5e:2x2 --mesh fsdp=2,tensor=2 --batch-seqs 8 --seq 2048 -o build/plan.json

# A module's tests stay in one process, which compiles their programs once; tests/conftest.py begins with the longest.
# One process more than there are cores: some tests wait for other processes.
WORKERS = $(shell $(BIN)/python -c 'import os; print(os.cpu_count() + 1)')
PYTEST = $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

# Tests start hundreds of processes: each would compile rooftop's sources again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo test test-durations test-all test-gpu test-guests test-newest habits soak lint bench docs site lock \
    release-check clean
.DELETE_ON_ERROR:

help:
	@echo 'make demo            plan a LLaMA-3 70B run on 4,096 TPU v5p chips; plan and compile a 1B one for four v5e'
	@echo 'make test            the quick tests'
	@echo 'make test-durations  the same, and the 50 slowest'
	@echo 'make test-all        all tests'
	@echo 'make test-gpu        the tests of programs for GPUs, with the compiler for GPUs; no GPU is needed'
	@echo 'make test-guests     programs of other libraries, compiled as they are, each in an environment of its own'
	@echo 'make test-newest     make test, and every kind of program on every chip, with the newest Python and JAX'
	@echo 'make habits LIBTPU=0.0.52  read the schedules of a release of XLA:TPU from small programs, and what changed'
	@echo 'make soak            serving and training under faults for an hour; MINUTES=1440: for a day'
	@echo 'make lint            ruff, mypy, import-linter'
	@echo 'make bench           how long a plan, and an hour of serving simulated, take on this machine'
	@echo 'make docs            run the transcripts in the documentation again, and write its reference pages'
	@echo 'make site            the documentation as a site with search, in build/site; it needs no network'
	@echo 'make release-check   build wheel and sdist into dist, install them bare on each Python here, and use every extra'
	@echo 'make lock            write the lock files again, pins kept (LOCK_FLAGS=--upgrade: newest releases)'
	@echo 'make clean           remove what the other targets made'

# The compiler of TPUs exists for Linux only.
demo: $(VENV)/demo.installed
	$(BIN)/rooftop $(DEMO)
	@mkdir -p build
	$(BIN)/rooftop $(DEMO_COMPILED)
	@if $(BIN)/python -c 'import libtpu' 2>/dev/null; then \
	    echo '$(BIN)/rooftop compile build/plan.json'; $(BIN)/rooftop compile build/plan.json; \
	else \
	    echo 'rooftop compile build/plan.json: SKIPPED: no libtpu for this machine (Linux on x86-64 has it)'; \
	fi

test: $(VENV)/dev.installed
	$(PYTEST) -m "not slow" $(PYTEST_FLAGS)

test-durations:
	@$(MAKE) --no-print-directory test PYTEST_FLAGS=--durations=50

test-all: $(VENV)/dev.installed
	$(PYTEST)
	@$(MAKE) --no-print-directory test-gpu

# In an environment of its own: wherever JAX's plugin for GPUs is installed, JAX looks for some. No package of the lock
# is missing in it, but cuDNN's dependencies, which compiling does not need, are left out.
test-gpu:
	@[ "$$(uname -s)" = Linux ] || { echo 'make test-gpu: SKIPPED: the compiler for GPUs exists for Linux only'; exit 0; } && \
	    $(MAKE) --no-print-directory VENV=.venv-gpu INSTALL_FLAGS=--no-deps .venv-gpu/gpu.installed && \
	    .venv-gpu/bin/python -m pytest tests/compiler/test_targets.py

# An environment sees the packages of $(VENV), and has those of its library in front of them. Guests without one are
# skipped, and the closing lines say why.
GUESTS := $(basename $(notdir $(wildcard tests/guests/requirements/*.txt)))

test-guests: $(VENV)/dev.installed
	@for name in $(GUESTS); do $(MAKE) --no-print-directory "build/guests/$$name/installed"; done; true
	$(BIN)/python -m pytest -n 1 -rs tests/guests

build/guests/%/installed: tests/guests/requirements/%.txt $(VENV)/dev.installed
	@mkdir -p build/guests
	$(BIN)/python -m venv build/guests/$*
	@$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
	    > "$$(build/guests/$*/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/rooftop.pth"
	build/guests/$*/bin/python -m pip --disable-pip-version-check --quiet install --no-deps --require-hashes -r $<
	@touch $@

test-newest:
	@for version in $(NEWER_PYTHONS); do \
	    for python in "python$$version" "$${PYENV_ROOT:-$$HOME/.pyenv}/versions/$$version".*/bin/python; do \
	        if "$$python" -c 'import venv' 2>/dev/null; then \
	            $(MAKE) --no-print-directory test VENV=.venv-newest PYTHON="$$python" && \
                exec .venv-newest/bin/python -m pytest -n 2 -m slow tests/compiler/test_releases.py; \
            exit 1; \
	        fi; \
	    done; \
	done; \
	echo 'make test-newest: SKIPPED: no Python of $(NEWER_PYTHONS) on the PATH or in pyenv'

# Half an hour on two cores; a second call goes on where the first one ended.
habits: $(VENV)/demo.installed
	@[ -n "$(LIBTPU)" ] || { echo 'make habits: name a release of libtpu: make habits LIBTPU=0.0.52'; exit 1; }
	$(BIN)/python bench/compiler/habits.py $(LIBTPU)

# A load of a server and training runs, with faults of both; figures and plots go to build/soak.
MINUTES ?= 60
SEED ?= 0
soak: $(VENV)/dev.installed
	$(BIN)/python -m tests.faults.soak --seed $(SEED) --minutes $(MINUTES) --output build/soak

lint: $(VENV)/dev.installed
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

bench: $(VENV)/demo.installed
	$(BIN)/python bench/speed/plan.py
	$(BIN)/python bench/speed/simulate.py --runs 1

docs: $(VENV)/demo.installed
	$(BIN)/python docs/transcripts.py
	$(BIN)/python docs/reference.py
	$(BIN)/python docs/picture.py
	$(BIN)/python docs/notebooks.py

# In an environment of its own, which has no rooftop: pages are text.
site:
	@$(MAKE) --no-print-directory VENV=.venv-site .venv-site/bin/python
	.venv-site/bin/python -m pip --disable-pip-version-check --quiet install --require-hashes -r requirements/site.txt
	.venv-site/bin/mkdocs build --strict --quiet
	@echo 'build/site/index.html'

# Of the Pythons 3.11 to 3.14 those that are here; dependencies come from the index that uv is configured for.
release-check: $(VENV)/dev.installed
	$(BIN)/python -m tests.release

# One lock file serves every Python from 3.11 on: where releases differ, each pin says for which Python it is. Nothing
# in it names a package index: pip asks the one that it is configured for, and the hashes decide.
COMPILE := $(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes \
    --no-header --no-emit-index-url --no-emit-find-links --annotation-style line $(LOCK_FLAGS)

lock: $(VENV)/dev.installed
	$(COMPILE) pyproject.toml --group dev --extra jax --extra compile --extra train --extra serve --extra parquet --extra tensorboard --extra embed --extra ui --output-file requirements/dev.txt
	$(COMPILE) pyproject.toml --group build --extra compile --constraints requirements/dev.txt --output-file requirements/demo.txt
	$(COMPILE) pyproject.toml --group build --group dev --extra gpu-compile --constraints requirements/dev.txt \
	    --no-emit-package nvidia-cublas-cu12 --no-emit-package nvidia-cuda-nvrtc-cu12 --output-file requirements/gpu.txt
	$(COMPILE) --group site --output-file requirements/site.txt
	@! grep -n '://' requirements/*.txt

clean:
	rm -rf .venv .venv-gpu .venv-newest .venv-site .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis build dist
	find rooftop tests -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/bin/python:
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	    echo 'rooftop needs Python 3.11 or newer, and "$(PYTHON)" is not one. Name one: make PYTHON=python3.11 ...'; \
	    exit 1; }
	"$(PYTHON)" -m venv $(VENV)

$(VENV)/%.installed: requirements/%.txt pyproject.toml | $(VENV)/bin/python
	$(PIP_INSTALL) $(INSTALL_FLAGS) --require-hashes -r $<
	$(PIP_INSTALL) --no-deps --no-build-isolation --editable .
	@touch $@
