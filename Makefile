# Every target is documented by the text after "##"; `make` alone lists them. Areas live in dev/mk/*.mk.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
export DDTREE_CACHE ?= $(HOME)/.cache/ddtree
# Environments are made on first use and keyed by the content of their lock files.
export PYTHONPATH := $(CURDIR)/operator:$(CURDIR)/cli
# What hangs fails in the end, and is named (seconds for one test with its fixtures); most tests have limits of their own.
export PYTEST_TIMEOUT ?= 2400
OPS = $$(dev/env.sh ops)
ENGINE = $$(dev/env.sh engine)

include $(sort $(wildcard dev/mk/*.mk))

.PHONY: help
help: ## list the targets
	@awk -F':.*## ' '/^[a-z][a-zA-Z0-9_-]*:.*## /{printf "  \033[1m%-18s\033[0m %s\n", $$1, $$2}' $(MAKEFILE_LIST)
