# Every target makes .venv first if it is missing, and again when pyproject.toml or requirements.lock change.
#
#   make train ARGS="env=ant seed=1"      pass arguments on (also: make test ARGS="-k gae -x")
#   make train PYTHON=python3.12          choose the interpreter that makes .venv (3.11 or newer)
#   make race MINUTES=90                  limit the time (also: make gpu MINUTES=30)

PYTHON ?= python3
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PLAYGROUND := .venv-playground
RIVALS := $(patsubst %,.rivals/%/installed,brax sb3 sbx)
PIP_INSTALL := -m pip install --quiet --disable-pip-version-check

# A shell command, not a sub-make: a recipe line with $(MAKE) would run under `make -n` too.
define CHECK_PYTHON
{ command -v $(PYTHON) >/dev/null || \
  { echo "rlstable: $(PYTHON) not found; say which Python to use: make PYTHON=/path/to/python3" >&2; exit 1; }; } && \
{ $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
  { echo "rlstable: needs Python 3.11 or newer, but $(PYTHON) is $$($(PYTHON) --version 2>&1);" \
         "say for example: make PYTHON=python3.11" >&2; exit 1; }; }
endef

.DEFAULT_GOAL := help
.PHONY: help train test playground newest slow survival demo guarded glitch stability harm tasks gallery learn bench race gpu docs lint format lock wheel clean check-python

help: ## Show this list
	@echo "rlstable: make <target> [ARGS=\"...\"] [PYTHON=python3]"
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  %-10s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

train: $(STAMP) ## Train; choose what with ARGS="env=ant seed=1"
	@$(BIN)/python -m rlstable.train $(ARGS)

# Files are not split among processes: their tests share programs and finished runs. Those with the fewest tests, which
# the reordering would put last, take longest.
test: lint ## Run lint, then the tests
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder $(ARGS)

playground: $(PLAYGROUND)/.installed ## Run the tests of MuJoCo Playground, in a virtual environment of its own
	$(PLAYGROUND)/bin/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder tests/playground $(ARGS)

newest: ## Run lint and the tests on the newest Python and JAX; SHORT=1 for a quarter of an hour
	@.ci/newest $(if $(SHORT),--short)

slow: $(STAMP) ## Run the tests marked slow
	$(BIN)/python -m pytest -m slow $(ARGS)

survival: $(STAMP) ## Train through every fault, beside Brax's PPO; hours on a CPU, goes on where it stopped
	$(BIN)/python -m scripts.survival $(ARGS)

demo: $(STAMP) ## Train and pack the policies of rlstable demo, or draw the README's films with ARGS=--films
	$(BIN)/python -m scripts.demo $(ARGS)

guarded: $(STAMP) .rivals/rejax/installed ## Compare guarded optimizers with others, and train rejax's PPO with the guards; minutes on a CPU
	$(BIN)/python -m scripts.guarded $(ARGS)

glitch: $(STAMP) ## Train with rewards that are wrong but finite, with default guards and none; hours on a CPU, resumes
	$(BIN)/python -m scripts.glitch $(ARGS)

stability: $(STAMP) ## Train every task far beyond solved: do policies stay good? Hours on a CPU, resumes where it stopped
	$(BIN)/python -m scripts.stability $(ARGS)

harm: $(STAMP) ## Train small environments with default guards and with none; an hour on a CPU, resumes where it stopped
	$(BIN)/python -m scripts.harm $(ARGS)

# With MINUTES a new race starts; without it the newest sitting is continued.
LIMIT = $(if $(MINUTES),--minutes $(MINUTES))

tasks: $(PLAYGROUND)/.installed ## Train every task by its plain command, five seeds, into docs/tasks.md; hours on a CPU, resumes where it stopped
	$(PLAYGROUND)/bin/python -m scripts.tasks $(ARGS)

gallery: $(PLAYGROUND)/.installed ## Draw the films of docs/gallery.md again, from the policies of make tasks
	$(PLAYGROUND)/bin/python -m scripts.tasks --films $(ARGS)

learn: $(PLAYGROUND)/.installed ## Train some tasks against thresholds before a change of learning, half an hour; SHORT=1 for two of them
	$(PLAYGROUND)/bin/python -m scripts.tasks --learn $(if $(SHORT),--short) $(ARGS)

bench: $(STAMP) $(RIVALS) ## Measure times to a return, starts, speed and guards beside rivals, into docs/benchmarks.md; hours, resumes
	$(BIN)/python -m scripts.bench $(LIMIT) $(ARGS)

race: $(STAMP) $(RIVALS) ## Measure whole processes beside Brax's, SB3's, SBX's PPO in one sitting: make race MINUTES=90; without, hours
	$(BIN)/python -m scripts.bench --only threshold --only start $(LIMIT) $(if $(MINUTES),--new) $(ARGS)

gpu: MINUTES ?= 60
gpu: $(STAMP) .rivals/brax/installed ## Measure an NVIDIA GPU with CUDA 12 within an hour, most telling first; again continues after a cut
	$(BIN)/python $(PIP_INSTALL) -e ".[cuda12]"
	.rivals/brax/bin/python $(PIP_INSTALL) "$$(sed -n 's/^jax==/jax[cuda12]==/p' scripts/rivals/requirements-brax.txt)"
	$(BIN)/python -m scripts.bench --gpu $(LIMIT) $(ARGS)

docs: $(STAMP) ## Write the page of all configuration keys, and the site to site/
	$(BIN)/python -m scripts.reference
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "rlstable: open site/index.html"

# import-linter without its cache, which does not notice a deleted module.
lint: $(STAMP) ## Check style, format, types and the direction of imports
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache --no-logo

format: $(STAMP) ## Format the code and repair what ruff can repair
	$(BIN)/ruff check --fix --exit-zero
	$(BIN)/ruff format

wheel: $(STAMP) ## Build the wheel into dist/
	$(BIN)/python -m build --wheel

# uv resolves for every Python and system at once; a distribution that left Python 3.11 behind has two pins.
lock: check-python ## Pin requirements.lock anew from pyproject.toml, for every Python
	@echo "rlstable: resolving in a temporary environment, a minute or two"
	@tmp=$$(mktemp -d) && trap 'rm -rf "$$tmp"' EXIT && \
	$(PYTHON) -m venv "$$tmp/venv" && \
	"$$tmp/venv/bin/python" $(PIP_INSTALL) "uv>=0.9,<1" && \
	{ echo "# Every distribution that rlstable[dev] needs, for each Python and system."; \
	  echo "# Written by \`make lock\`: do not edit, change pyproject.toml and run it again."; } > "$$tmp/lock" && \
	"$$tmp/venv/bin/uv" pip compile --quiet --universal --python-version 3.11 --extra dev --no-header --no-annotate \
	  --output-file "$$tmp/pins" pyproject.toml > /dev/null && \
	cat "$$tmp/lock" "$$tmp/pins" > requirements.lock
	@echo "rlstable: requirements.lock has $$(grep -c == requirements.lock) pins"

clean: ## Remove virtual environments, .rivals, caches and build products (runs/ stays)
	rm -rf $(VENV) $(PLAYGROUND) .rivals build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache .jax_cache
	@for d in rlstable tests scripts; do \
	  if [ -d $$d ]; then find $$d -name __pycache__ -type d -prune -exec rm -rf {} +; fi; done

check-python:
	@$(CHECK_PYTHON)

$(STAMP): pyproject.toml requirements.lock
	@if ! $(BIN)/python -m pip --version >/dev/null 2>&1; then \
	  $(CHECK_PYTHON) && \
	  echo "rlstable: making $(VENV) with $$($(PYTHON) --version)" && \
	  $(PYTHON) -m venv --clear $(VENV); fi
	@echo "rlstable: installing into $(VENV), about a minute"
	@$(BIN)/python $(PIP_INSTALL) -r requirements.lock
	@$(BIN)/python $(PIP_INSTALL) -e . --no-deps
	@touch $@

# The lock, so that both environments have the same JAX, Brax and MuJoCo, and Playground on top of them.
$(PLAYGROUND)/.installed: pyproject.toml requirements.lock
	@if ! $(PLAYGROUND)/bin/python -m pip --version >/dev/null 2>&1; then \
	  $(CHECK_PYTHON) && $(PYTHON) -m venv --clear $(PLAYGROUND); fi
	@echo "rlstable: installing MuJoCo Playground into $(PLAYGROUND), about a minute"
	@$(PLAYGROUND)/bin/python $(PIP_INSTALL) -r requirements.lock
	@$(PLAYGROUND)/bin/python $(PIP_INSTALL) -c requirements.lock -e ".[playground,menagerie]"
	@touch $@

.rivals/%/installed: scripts/rivals/requirements-%.txt
	@$(CHECK_PYTHON) && $(PYTHON) -m venv --clear .rivals/$*
	@echo "rlstable: installing the rival $* into .rivals/$*, some minutes"
	@.rivals/$*/bin/python $(PIP_INSTALL) -r $<
	@touch $@
