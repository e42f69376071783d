# Every target makes the environment that it needs in .venv, and is quick when it is run again.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help demo gpu-check hosted-check check test quick matrix lint style contracts typecheck docs dist bench house lab clean
.DELETE_ON_ERROR:

# The first of these that is Python 3.10 or newer; `make PYTHON=...` overrides.
PYTHON ?= $(shell for candidate in python3.11 python3 python3.13 python3.12 python3.10; do \
	if "$$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; \
	then echo "$$candidate"; break; fi; done)
VENV := .venv
BIN := $(VENV)/bin
TSC := $(VENV)/node_modules/.bin/tsc
SIDE_BY_SIDE := $(BIN)/python -m pytest -n logical --maxprocesses 4 --dist loadfile -m
MATRIX ?= build/matrix
RELEASE := build/release
HOSTED := .cache/hosted
COLAB_PYTHON ?= $(or $(shell python3.12 -c 'import sys; print(sys.executable)' 2>/dev/null),$(PYTHON))
COLAB := notebook==6.5.7 ipykernel==6.17.1 ipython==7.34.0 ipywidgets==7.7.1
KAGGLE := ipykernel==6.17.1 ipython==7.34.0 ipywidgets==8.1.5 nbconvert==6.4.5 papermill==2.7.0 \
	jupyter_server==2.12.5 jupyterlab matplotlib
RUNNERS := papermill==2.7.0 nbconvert==7.17.2 voila==0.5.13
VSCODE := @vscode/jupyter-ipywidgets8@1.0.9 requirejs@2.3.8
PAGE := benchmarks/performance_page.py
CORE := tests/foundations/test_config.py tests/settings/test_settings.py tests/travel \
	tests/kernel/test_results.py tests/processes/test_crashes.py tests/training/accumulation/test_exact.py
PACKAGE_FILES := $(filter-out %/__pycache__,$(wildcard notebook_launcher/*))

help:  ## show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | awk -F '\t' '{printf "make %-12s %s\n", $$1, $$2}'

demo: $(VENV)/installed-notebooks  ## run the first tutorial in a real Jupyter kernel (under a minute)
	@$(BIN)/python notebooks/demo.py

gpu-check: $(VENV)/installed-test  ## try on GPUs what can only be tried there (5 minutes; writes gpu-check-<date>.json)
	@$(BIN)/python -m notebook_launcher check
	@$(BIN)/python -m pytest -q tests/gpu

hosted-check: $(addprefix $(HOSTED)/,colab/installed kaggle/installed runners/installed vscode/installed)  ## try the package with Colab's and Kaggle's versions, VS Code's widgets, papermill, nbconvert and Voila
	@$(BIN)/python -m pytest -q tests/hosted

test: style $(TSC)  ## check everything and run the tests; SLOW=1, as in CI: with tutorials, documentation and JupyterLab
	@$(BIN)/python tests/everything.py $(if $(SLOW),--slow)

check: lint $(TSC)  ## check everything and run the tests of what changed since main (under two minutes)
	@$(BIN)/python tests/changed.py

quick: lint $(TSC)  ## check everything and run the tests that start no kernel and are not slow (a few minutes)
	@$(SIDE_BY_SIDE) "not alone and not slow"

matrix:  ## run the core of the tests on the oldest and newest Python and torch (MATRIX=folder ONLY=names)
	@$(PYTHON) tests/matrix.py --folder "$(MATRIX)" --only "$(ONLY)"

lint: style typecheck  ## ruff, import-linter, mypy, notebooks without outputs

style: contracts
	@echo "==> ruff"
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@echo "==> notebooks hold no outputs"
	@$(BIN)/nbstripout --verify notebooks/*.ipynb

# mypy and import-linter do not know package-dir, so they get the package in the layout of an installation.
contracts: $(VENV)/installed-test
	@rm -rf build/typed && mkdir -p build/typed/notebook_launcher
	@ln -s $(addprefix ../../../,$(PACKAGE_FILES) widgets) build/typed/notebook_launcher/
	@echo "==> import-linter"
	@cd build/typed && PYTHONPATH=. ../../$(BIN)/lint-imports --no-cache ../../pyproject.toml | sed 1,/Analyzed/d

typecheck: contracts  ## import-linter and mypy alone
	@echo "==> mypy"
	@$(BIN)/mypy | sed -e 's|^build/typed/notebook_launcher/widgets|widgets|' -e 's|^build/typed/||'

docs: $(VENV)/installed-docs  ## build the documentation; EXECUTE=force runs the tutorials for it (a slow test builds it, too)
	@EXECUTE=$(EXECUTE) $(BIN)/python -m sphinx -W --keep-going -q -d docs/_build/doctrees docs docs/_build/html
	@echo "==> docs/_build/html/index.html"

# The package is taken out of the unpacked sources, so that the tutorial and the tests import the installed wheel.
dist: $(VENV)/installed-dist  ## build wheel and sdist, check them, and try them in an empty environment (10 minutes)
	@rm -rf dist $(RELEASE) && mkdir -p $(RELEASE)
	@echo "==> wheel and source distribution"
	@$(BIN)/python -m build --quiet --no-isolation --outdir dist
	@$(BIN)/python -m twine check --strict dist/*
	@tar -xf dist/*.tar.gz --strip-components=1 -C $(RELEASE)
	@rm -r $(RELEASE)/notebook_launcher $(RELEASE)/widgets
	@echo "==> the first tutorial, with the wheel in an empty environment"
	@$(PYTHON) -m venv $(RELEASE)/$(VENV)
	@$(RELEASE)/$(BIN)/pip install -q -c constraints-tests.txt "$$(echo dist/*.whl)[notebooks]"
	@cd $(RELEASE) && $(BIN)/python notebooks/demo.py
	@echo "==> the core of the tests"
	@$(RELEASE)/$(BIN)/pip install -q -c constraints-tests.txt "$$(echo dist/*.whl)[test]"
	@cd $(RELEASE) && $(BIN)/python -m pytest -q -m "not slow" $(CORE)
	@ls -l dist

bench: $(VENV)/installed-bench  ## measure, side by side with other launchers, and write docs/performance.md
	@for program in $(filter-out $(PAGE),$(wildcard benchmarks/*.py)) $(PAGE); do \
		echo "==> $$program"; $(BIN)/python "$$program"; done

house:  ## print the size of the package and of its tests
	@$(PYTHON) tests/house.py

$(addprefix $(HOSTED)/,$(addsuffix /installed,colab kaggle runners)): $(HOSTED)/%/installed: Makefile $(VENV)/installed-test
	@echo "==> environment in $(@D) (torch is large: it takes minutes)"
	@$(if $(filter runners,$*),$(PYTHON),$(COLAB_PYTHON)) -m venv $(@D)
	@$(@D)/bin/pip install -q "$$(grep '^torch==' constraints.txt)" -e . $($(shell echo $* | tr a-z A-Z))
	@touch $@

$(HOSTED)/vscode/installed: Makefile
	@echo "==> VS Code's bundle of widgets in $(@D)"
	@mkdir -p $(@D)
	@if ! command -v npm >/dev/null; then echo "Without npm, the test of VS Code's bundle skips." >&2; else \
		npm install --silent --no-audit --no-fund --prefix $(@D) $(VSCODE) && touch $@; fi

lab: $(VENV)/installed-lab  ## open the tutorials in JupyterLab
	@$(BIN)/jupyter lab $(if $(filter 0,$(shell id -u)),--allow-root) notebooks

clean:  ## remove everything that these targets have made, .venv included
	rm -rf $(VENV) .cache build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis docs/_build
	find . -name __pycache__ -prune -exec rm -rf {} +

$(VENV)/pyvenv.cfg:
	@test -n "$(PYTHON)" || { echo "No Python 3.10 or newer found. Install one, or name it: make PYTHON=/path/to/python3"; exit 1; }
	@echo "==> environment in $(VENV), with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV)

$(VENV)/installed-%: $(VENV)/pyvenv.cfg pyproject.toml constraints.txt constraints-tests.txt
	@echo "==> packages for '$*' (torch is large: the first time takes minutes)"
	@$(BIN)/python -m pip install --no-compile -c constraints-tests.txt -e '.[$*]'
	@echo "==> compiling the packages" # on all cores; pip takes one, some files are templates, and half are never read
	@$(BIN)/python -m compileall -qq -j 0 -x '/(tests|pip|torch/testing/_internal)/|/transformers/models/(?!auto|bert|bloom|encoder_decoder|gpt2|llama|__init__)' $(VENV)/lib || true
	@$(BIN)/python -m compileall -qq notebook_launcher widgets # where PYTHONDONTWRITEBYTECODE is set, each process would need 0.4 s for it
	@touch $@

# TypeScript's checker reads the types of the widgets' scripts. Without npm, the test that calls it skips and says so.
$(TSC): | $(VENV)/pyvenv.cfg
	@if command -v npm >/dev/null; then timeout 60 npm install --no-audit --no-fund --fetch-retries 1 \
		--prefix $(VENV) typescript@7.0.2 || \
	echo "TypeScript could not be installed: the types of the widgets' scripts will not be checked." >&2; fi
