.PHONY: demo bench-demo

MODEL ?= smollm2

demo: ## set everything up and run the five rollouts (MODEL=tiny for a quick one)
	py=$(OPS); PYTHONPATH=$(CURDIR)/dev:$$PYTHONPATH $$py/bin/python -m demo --model $(MODEL)
