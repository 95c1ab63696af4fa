.PHONY: bench-placement

bench-placement: ## matching 200 resources against 1,000 nodes (docs/benchmarks/placement.json)
	py=$(OPS); $$py/bin/python dev/bench/placement.py docs/benchmarks
