.PHONY: cluster-up cluster-down cluster-status kubectl clean-cache

cluster-up: ## start the dev cluster (DDTREE_CLUSTER names it; several can run side by side)
	@dev/cluster/cluster up

cluster-down: ## stop the dev cluster; nothing but caches and logs remains
	@dev/cluster/cluster down

cluster-status: ## what runs, since when, and what the node offers
	@dev/cluster/cluster status

kubectl: ## kubectl against the dev cluster: make kubectl ARGS="get nodes"
	@dev/cluster/cluster kubectl $(ARGS)

clean-cache: ## remove all caches (programs, images, environments) and say how much that gave back
	@dev/cluster/cluster clean-cache

.PHONY: test-cluster
test-cluster: ## the dev cluster's own tests: it leaves nothing behind (about 2 minutes)
	py=$(OPS); $$py/bin/pytest tests/integration/test_cluster_clean.py -q
