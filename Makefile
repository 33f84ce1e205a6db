SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= $(firstword $(foreach name,python3.11 python3.12 python3.13 python3,$(shell command -v $(name))))
VENV := .venv
TREE := $(VENV)/collections/ansible_collections/llamacpp
INVENTORY ?= inventories/local
PLAYBOOK := $(VENV)/bin/ansible-playbook

.PHONY: help venv demo down plan build

help: ## Show the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

venv: $(VENV)/ready ## Make the virtual environment with ansible-core and what the collection needs

$(VENV)/ready: requirements.txt
	@[ -n "$(PYTHON)" ] || { echo "No Python was found: install Python 3.11 or newer, or name one with make PYTHON=/path/to/python3"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "$(PYTHON) is older than Python 3.11: name a newer one with make PYTHON=/path/to/python3"; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { echo "$(PYTHON) cannot make virtual environments: install its venv module (Debian: apt install python3-venv)"; exit 1; }
	@echo "Installing ansible-core into $(VENV) ..."
	@$(VENV)/bin/pip install --quiet --disable-pip-version-check --requirement requirements.txt
	@mkdir -p $(TREE) && ln -sfn ../../../.. $(TREE)/cluster
	@touch $@

demo: venv ## Build, run and verify a cluster on this machine
	@$(PLAYBOOK) site.yml -i inventories/local
	@printf '\nIt answers now. Ask it:\n  curl -s http://127.0.0.1:8080/v1/completions -d '"'"'{"prompt": "", "temperature": 0}'"'"'\nStop and remove it: make down\n'

down: venv ## Stop the cluster of make demo and remove what it installed
	@$(PLAYBOOK) playbooks/teardown.yml -i inventories/local

plan: venv ## Show what site.yml would do with INVENTORY, touching no host
	@$(PLAYBOOK) playbooks/plan.yml -i $(INVENTORY)

build: venv ## Make the Galaxy archive
	@$(VENV)/bin/ansible-galaxy collection build --force
