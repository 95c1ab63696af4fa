.PHONY: bench-placement

bench-placement: ## 200 resources against 1,000 kwok nodes in a real cluster (docs/benchmarks/placement.json)
	@py=$(OPS); export DDTREE_CLUSTER=bench-placement; dev/cluster/cluster down >/dev/null 2>&1; \
	trap 'dev/cluster/cluster down >/dev/null' EXIT; $$py/bin/python dev/bench/placement.py docs/benchmarks
