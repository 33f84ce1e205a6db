SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= $(firstword $(foreach name,python3.11 python3.12 python3.13 python3,$(shell command -v $(name))))
VENV := .venv
TREE := $(VENV)/collections/ansible_collections/llamacpp
OLDEST ?= $(firstword $(foreach path,$(shell command -v python3.9) $(wildcard $(HOME)/.pyenv/versions/3.9.*/bin/python3.9),$(shell $(path) -c 'import ensurepip; print("$(path)")' 2>/dev/null)))
INVENTORY ?= inventories/local
PLAYBOOK := $(VENV)/bin/ansible-playbook
# Through a pipe (make demo | tee log) Python would keep the progress of a build until the end.
export PYTHONUNBUFFERED := 1

BIN := $(CURDIR)/$(VENV)/bin
# Compiling the tests, and for each program that they start the collection, is a tenth of the time of the unit tests; the tree stays as it is.
CACHED := env -u PYTHONDONTWRITEBYTECODE PYTHONPYCACHEPREFIX=$(CURDIR)/$(VENV)/bytecode
PYTEST_UNIT = $(CACHED) PYTHONPATH=$(VENV)/collections $(VENV)/bin/pytest -q --numprocesses auto --maxprocesses 8 --dist worksteal \
  -p no:anyio -p no:pytest11.testinfra tests/unit
SANITY := $(VENV)/sanity
SITE := $(VENV)/site
# What make lint looks at with newer tools, ruff and ansible-lint.
LINTED := pep8 pylint yamllint
ARGS ?=
TESTS ?= not slow
SCENARIO ?= default
ACTION ?= test

.PHONY: help venv dev demo down plan build docs site lint sanity unit plans unit-long integration molecule test ci test-full

help: ## Show the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

venv: $(VENV)/ready ## Create the virtual environment with ansible-core and the collection's requirements

$(VENV)/ready: requirements.txt
	@[ -n "$(PYTHON)" ] || { echo "No Python is installed: install Python 3.11 or newer, or name one with make PYTHON=/path/to/python3"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "$(PYTHON) is older than Python 3.11: name a newer one with make PYTHON=/path/to/python3"; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { echo "$(PYTHON) cannot make virtual environments: install its venv module (Debian: apt install python3-venv)"; exit 1; }
	@echo "Installing ansible-core into $(VENV) ..."
	@$(VENV)/bin/pip install --quiet --disable-pip-version-check --requirement requirements.txt
	@mkdir -p $(TREE) && ln -sfn ../../../.. $(TREE)/cluster
	@touch $@

demo: venv ## Build, run and verify a cluster on this machine
	@$(PLAYBOOK) site.yml -i inventories/local $(ARGS)
	@$(if $(findstring llama_server_ui,$(ARGS)),,printf '\nIf there is no chat page, run: make demo ARGS="%s" (needs Node.js 20 or newer)\n' "$(strip $(ARGS) -e llama_server_ui=true)")
	@echo "To stop and remove the cluster, run: make down"

down: venv ## Stop the cluster of make demo and remove what it installed
	@$(PLAYBOOK) playbooks/teardown.yml -i inventories/local $(ARGS)

plan: venv ## Show what site.yml would do with INVENTORY, without changing anything
	@$(PLAYBOOK) playbooks/plan.yml -i $(INVENTORY) $(ARGS)

build: venv ## Build the Galaxy archive
	@$(VENV)/bin/ansible-galaxy collection build --force

dev: $(VENV)/dev ## Add the test tools to the virtual environment

$(VENV)/dev: $(VENV)/ready requirements-dev.txt
	@echo "Installing test tools into $(VENV) ..."
	@$(VENV)/bin/pip install --quiet --disable-pip-version-check --constraint requirements.txt --requirement requirements-dev.txt
	@touch $@

docs: venv ## Write the generated documentation
	@PYTHONPATH=$(VENV)/collections $(VENV)/bin/python docs/generate.py

site: dev ## Build the documentation site in .venv/site/html
	@rm -rf $(SITE) && mkdir -p -m 755 $(SITE) $(SITE)/source
	@cp --parents README.md CONTRIBUTING.md docs/*.md docs/images/*.png roles/*/README.md inventories/*/README.md $(SITE)/source && cp docs/docsite/index.md $(SITE)/source
	@PATH=$(BIN):$$PATH ANSIBLE_COLLECTIONS_PATH=$(CURDIR)/$(VENV)/collections antsibull-docs collection --use-current --no-indexes --fail-on-error \
	  --dest-dir $(SITE)/source llamacpp.cluster
	@$(VENV)/bin/sphinx-build -q -W --keep-going -c docs/docsite $(SITE)/source $(SITE)/html
	@echo "$(CURDIR)/$(SITE)/html/index.html"

lint: dev ## Run ruff, tests/lint, ansible-lint, mypy, antsibull-docs and the changelog check
	@$(VENV)/bin/ruff check --quiet . && $(VENV)/bin/ruff format --quiet --check .
	@$(VENV)/bin/python tests/lint/names.py plugins
	@PYTHONPATH=$(VENV)/collections $(VENV)/bin/python tests/lint/repository.py
	@cd $(TREE)/cluster && PATH=$(BIN):$$PATH ansible-lint --offline -q
	@cd $(VENV)/collections && $(BIN)/mypy --config-file $(CURDIR)/pyproject.toml ansible_collections/llamacpp/cluster/plugins
	@cd $(VENV)/collections && $(BIN)/mypy --config-file $(CURDIR)/pyproject.toml --strict $(addprefix ansible_collections/llamacpp/cluster/plugins/module_utils/,llamacpp planner lifecycle)
	@cd $(VENV)/collections && PYTHONPATH=. $(BIN)/lint-imports --config $(CURDIR)/pyproject.toml --no-cache > $(CURDIR)/$(VENV)/imports.txt || { cat $(CURDIR)/$(VENV)/imports.txt; false; }
	@$(CACHED) PYTHONPATH=$(VENV)/collections $(VENV)/bin/pytest -q -p no:anyio -p no:pytest11.testinfra --no-summary tests/lint
	@$(VENV)/bin/antsibull-changelog lint
	@cd $(TREE)/cluster && PATH=$(BIN):$$PATH ANSIBLE_COLLECTIONS_PATH=$(CURDIR)/$(VENV)/collections antsibull-docs lint-collection-docs --plugin-docs --validate-collection-refs self .

# ansible-test wants a real tree, not a link, and a pip bootstrap that it would download: the interpreter has one.
sanity: dev ## Run ansible-test sanity
	@rm -rf $(SANITY)/ansible_collections && mkdir -p $(SANITY)/ansible_collections/llamacpp/cluster $(SANITY)/.ansible/test/cache
	@git ls-files -z --cached --others --exclude-standard | xargs -0 cp --parents -t $(SANITY)/ansible_collections/llamacpp/cluster
	@echo 'import ensurepip; ensurepip.bootstrap(default_pip=True)' > $(SANITY)/.ansible/test/cache/get_pip_24_2.py
	@cd $(SANITY)/ansible_collections/llamacpp/cluster && git init -q && git add -A && \
	  export PIP_CONFIG_FILE=$${PIP_CONFIG_FILE:-$$HOME/.config/pip/pip.conf} HOME=$(CURDIR)/$(SANITY) PATH=$(BIN):$$PATH PIP_QUIET=1 && \
	  ansible-test sanity $(addprefix --skip-test ,$(LINTED)) --python $$(python -c 'import sys; print("%d.%d" % sys.version_info[:2])') && \
	  $(if $(OLDEST),PATH=$(BIN):$(dir $(OLDEST)):$$PATH ansible-test sanity --python 3.9 --python-interpreter $(OLDEST) --test compile --test import,\
	  echo "Not run: sanity on Python 3.9, the oldest version for hosts. Install it, or name it with OLDEST=/path/to/python3.9")

unit: dev ## Run the unit tests, except those of unit-long
	@$(PYTEST_UNIT) -m "not programs"

plans: dev ## Record the plans in tests/unit/data/plans for test_inventories.py: review each changed line
	@$(PYTEST_UNIT) --record-plans -k as_it_was_recorded

unit-long: dev ## Run the unit tests that start programs or wait for something
	@$(PYTEST_UNIT) -m programs

integration: dev ## Run the playbooks on real llama.cpp
	@PYTHONPATH=$(VENV)/collections $(VENV)/bin/pytest -v --timeout 1800 --numprocesses 3 --dist loadfile --no-loadscope-reorder --durations 30 -m "$(TESTS)" --deselect tests/integration/test_demo.py tests/integration

molecule: dev ## Run SCENARIO in systemd containers; ACTION is test, converge, verify, destroy, ...
	@$(VENV)/bin/python molecule/run.py $(SCENARIO) $(ACTION)

test: dev ## Run the unit tests, then build, query, break, heal and remove a cluster on this machine
	@echo "1 of 2: the unit tests (one minute). 2 of 2: make demo, a killed worker, make demo again, make down (two minutes, or more if llama.cpp must be compiled)."
	@$(MAKE) --no-print-directory unit
	@PYTHONPATH=$(VENV)/collections $(VENV)/bin/pytest -q --capture no --timeout 3600 tests/integration/test_demo.py
	@echo "Passed: the unit tests, and a cluster on real llama.cpp that was built, queried, broken, healed, run again without a change, and removed."

ci: test ## Run make test, lint, sanity, the longer unit tests, and the playbooks on llama.cpp; as root, also run the scenario default
	@$(MAKE) --no-print-directory --jobs=2 unit-long lint sanity
	@$(MAKE) --no-print-directory integration
	@if [ "$$(id -u)" = 0 ]; then $(MAKE) --no-print-directory molecule SCENARIO=default ACTION=test; \
	else echo "Not run: molecule, whose containers need root. Run: sudo make molecule"; fi

test-full: ci ## Run all tests, including slow tests, all scenarios and the benchmarks
	@$(MAKE) --no-print-directory integration TESTS=slow
	@$(MAKE) --no-print-directory molecule SCENARIO=source ACTION=test
	@$(MAKE) --no-print-directory molecule SCENARIO=prebuilt ACTION=test
	@$(MAKE) --no-print-directory molecule SCENARIO=hip ACTION=test
	@$(MAKE) --no-print-directory molecule SCENARIO=upgrade ACTION=test
	@$(MAKE) --no-print-directory molecule SCENARIO=models ACTION=test
	@$(MAKE) --no-print-directory molecule SCENARIO=transport ACTION=test
	@$(MAKE) --no-print-directory molecule SCENARIO=benchmark ACTION=test
	@$(MAKE) --no-print-directory molecule SCENARIO=failure ACTION=test
	@$(MAKE) --no-print-directory molecule SCENARIO=replicas ACTION=test
	@$(MAKE) --no-print-directory molecule SCENARIO=monitoring ACTION=test
	@PYTHONPATH=$(VENV)/collections $(VENV)/bin/python tests/benchmarks/no_change_run.py
	@PYTHONPATH=$(VENV)/collections $(VENV)/bin/python tests/benchmarks/first_run.py
