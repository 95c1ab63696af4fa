.PHONY: test-integration

test-integration: ## the operator, builds, CRD and chart in a real cluster with simulated engines; brings the cluster up if it is not
	@py=$(OPS); export DDTREE_CLUSTER=$${DDTREE_CLUSTER:-it}; ours=; \
	if [ -z "$${KUBECONFIG:-}" ] && ! dev/cluster/cluster env >/dev/null 2>&1; then ours=1; dev/cluster/cluster up >/dev/null; fi; \
	trap '[ -z "$$ours" ] || dev/cluster/cluster down' EXIT; \
	$$py/bin/pytest tests/integration -q -m integration $(ARGS)
