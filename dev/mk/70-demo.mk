.PHONY: demo bench-demo test-e2e

MODEL ?= smollm2

demo: ## set everything up and run the six cases (MODEL=tiny for a quick one)
	py=$(OPS); PYTHONPATH=$(CURDIR)/dev:$$PYTHONPATH $$py/bin/python -m demo --model $(MODEL)

bench-demo: ## the demo from nothing, again, and with the tiny pair: seconds and disk (docs/benchmarks/demo.json)
	py=$(OPS); PYTHONPATH=$(CURDIR)/dev:$$PYTHONPATH $$py/bin/python -m demo.bench

test-e2e: ## the demo's cases on real engines with the tiny pair, in a cluster of their own
	export DDTREE_CLUSTER=$${DDTREE_CLUSTER:-e2e}; py=$(OPS); trap "dev/cluster/cluster purge >/dev/null" EXIT; \
	$$py/bin/pytest tests/e2e -q -s
