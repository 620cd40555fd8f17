# Each target installs what it needs, once: into the active virtual environment, or else into .venv.
# PYTHON=... chooses the interpreter of a new .venv, ARGS=... is passed on to the program.

PYTHON ?= python3
# $(wildcard) leaves out an environment that is gone, or whose path has a space, which make cannot handle.
ENV := $(or $(wildcard $(VIRTUAL_ENV)),.venv)
RUN := $(ENV)/bin/python
# A stamp says which extra of this checkout is installed; it lies in the environment and ends with it.
STAMP := $(ENV)/.detr_bf
REQUIREMENTS := $(wildcard requirements/*.txt)
KERNELS := ops/compiled/build.json

too_old = sys.version_info < (3, 10) and "Python 3.10 or newer is needed, $(1) is " + sys.version.split()[0] + ". $(2)"
check_version = @$(1) -c 'import sys; sys.exit($(too_old))'

.DEFAULT_GOAL := help
.PHONY: help demo demo-panoptic experiments test test-full browser lint docs bench kernels clean other-checkout

help: ## show this list
	@sed -n 's/^\([a-z-]*\):.* ## \(.*\)/  make \1\t\2/p' Makefile

demo: $(STAMP)-demo ## build the digits data, train a detector with batch attention, evaluate, write a report
	@$(MAKE) --no-print-directory kernels
	$(RUN) tools/make_sample_data.py digits --output .cache/digits
	$(RUN) tools/train_net.py --config configs/demo.yaml $(or $(ARGS),--auto-resume)

demo-panoptic: $(STAMP)-demo ## build the scenes data, train boxes of things and stuff, then masks, evaluate, write a report
	@$(MAKE) --no-print-directory kernels
	$(RUN) tools/make_sample_data.py scenes --output .cache/scenes
	$(RUN) tools/train_net.py --config configs/demo_panoptic.yaml --auto-resume
	$(RUN) tools/train_net.py --config configs/demo_panoptic_masks.yaml --auto-resume

experiments: $(STAMP)-demo ## compare the plug-ins of classifiers on Fashion-MNIST with five seeds each (an hour)
	@$(MAKE) --no-print-directory kernels
	$(RUN) tools/compare.py run configs/compare/long_tail_fashion_mnist.yaml $(ARGS)
	$(RUN) tools/compare.py run configs/compare/small_data_fashion_mnist.yaml $(ARGS)

# A process for each core, each with one thread: OpenMP's threads wait by spinning, on the cores of the others.
test test-full: export OMP_NUM_THREADS ?= 1
# pytest would take DIR of "--golden DIR" for the folder of the tests, because it does not know the option yet.
test test-full: PYTEST_ARGS = $(subst --golden ,--golden=,$(strip $(ARGS)))
test: $(STAMP)-dev ## run the default tier of the tests, in 10 to 19 minutes (ARGS="-m slow" for the long ones)
	@$(MAKE) --no-print-directory kernels
	$(RUN) -m pytest -q -n logical --maxprocesses 4 --dist worksteal $(PYTEST_ARGS)

test-full: $(STAMP)-dev ## run all tests but the slow ones; half an hour
	@$(MAKE) --no-print-directory kernels
	$(RUN) -m pytest -q -n logical --maxprocesses 4 --dist worksteal -m "not slow" $(PYTEST_ARGS)

browser: $(STAMP)-dev $(STAMP)-browser ## test the report pages in Chromium; screenshots in build/screenshots
	@mkdir -p build/screenshots
	DETR_BF_SCREENSHOTS=build/screenshots $(RUN) -m pytest -q -m slow tests/report/test_browser.py $(ARGS)

lint: $(STAMP)-dev ## check style, format and types
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

docs: $(STAMP)-docs ## build the documentation site; warnings are errors: build/docs/index.html
	$(RUN) -m sphinx -b html -W --keep-going -q -c docs -d build/doctrees . build/docs

bench: $(STAMP)-dev ## measure training steps, inference and matching
	@$(MAKE) --no-print-directory kernels
	$(RUN) benchmarks/run.py --output runs/bench.json $(ARGS)

kernels: $(KERNELS) ## compile the operators against the installed torch (STRICT=--strict: warnings are errors)

# Without a compiler everything runs on the plain PyTorch reference, and says so; STRICT makes that an error.
$(KERNELS): ops/build.py $(wildcard ops/csrc/*.* ops/csrc/*/*.*)
	$(RUN) -m detr_bf.ops build $(STRICT) $(if $(STRICT),,|| true)

clean: ## remove build products and tool caches, never data, runs or environments
	rm -rf build dist *.egg-info ops/compiled .mypy_cache .pytest_cache .ruff_cache
	find . -path ./.venv -prune -o -name __pycache__ -prune -exec rm -rf {} +

# An active environment may hold another checkout of this project: then its stamps do not count.
ifneq ($(shell cat $(STAMP)-source 2>/dev/null),$(CURDIR))
$(STAMP)-demo $(STAMP)-dev $(STAMP)-docs $(STAMP)-browser: other-checkout
endif

other-checkout:
	@rm -f $(STAMP)-*

$(STAMP)-%: pyproject.toml setup.py $(REQUIREMENTS) | $(RUN)
	$(call check_version,$(RUN),Activate an environment with a newer one or deactivate this one.)
	@$(RUN) -m pip --version >/dev/null 2>&1 || $(RUN) -m ensurepip
	$(RUN) -m pip install --editable '.[$*]'
	$(RUN) -m pip install --no-deps --require-hashes $(REQUIREMENTS:%=--requirement=%)
	@echo '$(CURDIR)' > $(STAMP)-source
	@touch $@

$(RUN):
	$(call check_version,$(PYTHON),Name a newer one: make PYTHON=python3.12)
	$(PYTHON) -m venv $(ENV) || { rm -rf $(ENV); false; }
