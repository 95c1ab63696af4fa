.PHONY: bench-operator

# A short run: make bench-operator COUNTS=60 REST=20 CHANGES=20 OUT=build/bench
bench-operator: ## the operator with 200 and 1,000 resources on kwok nodes: reaction, rest, restart, memory (docs/benchmarks/operator.json)
	@py=$(OPS); export DDTREE_CLUSTER=bench; trap 'dev/cluster/cluster purge >/dev/null 2>&1' EXIT; failed=0; \
	for n in $(or $(COUNTS),200 1000); do \
	  dev/cluster/cluster down >/dev/null 2>&1; \
	  $$py/bin/python dev/bench/operator_scale.py --rest=$(or $(REST),600) --changes=$(or $(CHANGES),100) $(or $(OUT),docs/benchmarks) $$n || failed=1; \
	done; exit $$failed
