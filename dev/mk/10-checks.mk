.PHONY: lint format test test-unit

lint: lint-chart ## ruff, mypy --strict, import-linter, helm lint
	py=$(OPS); $$py/bin/ruff check . && $$py/bin/ruff format --check . && $$py/bin/mypy && $$py/bin/lint-imports && \
	cd dev/cluster && $$py/bin/mypy --strict --config-file= -p ddcluster

format: ## format the Python code
	py=$(OPS); $$py/bin/ruff format . && $$py/bin/ruff check --fix-only .

test-unit: ## fast tests: no processes but helm, no network
	py=$(OPS); $$py/bin/pytest tests/unit -q

test: ## all tests, as CI runs them: unit, a sample of the faults, rules, kernels, engine, integration, end to end
	$(MAKE) --no-print-directory test-unit
	$(MAKE) --no-print-directory test-faults SAMPLE=15
	$(MAKE) --no-print-directory test-rules
	$(MAKE) --no-print-directory test-kernels
	$(MAKE) --no-print-directory test-engine
	$(MAKE) --no-print-directory test-integration
	$(MAKE) --no-print-directory test-e2e
