.PHONY: crd lint-chart

crd: ## write the CRD into the chart, and its reference page, from the models
	py=$(OPS); $$py/bin/python -m ddtree_operator.api.crd > charts/ddtree-operator/crds/ddtreedeployments.yaml && \
	$$py/bin/python dev/docs/crd_reference.py

lint-chart: ## helm lint
	helm=$${DDTREE_HELM:-$$(dev/cluster/build-binaries tools)/helm}; digest=r/i@sha256:$$(printf '0%.0s' {1..64}); \
	$$helm lint --strict --quiet charts/ddtree-operator --set image=$$digest,builder.image=$$digest
