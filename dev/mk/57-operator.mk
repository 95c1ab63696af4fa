.PHONY: bench-operator

bench-operator: ## the operator with 200 and 1,000 resources on kwok nodes: reaction, rest, restart, memory (docs/benchmarks/operator.json)
	@py=$(OPS); export DDTREE_CLUSTER=bench; trap 'dev/cluster/cluster down >/dev/null' EXIT; failed=0; \
	for n in $(or $(COUNTS),200 1000); do \
	  dev/cluster/cluster down >/dev/null 2>&1; $$py/bin/python dev/bench/operator_scale.py docs/benchmarks $$n $(REST) || failed=1; \
	done; exit $$failed
