.PHONY: crd

crd: ## write the CRD into the chart from the models
	py=$(OPS); $$py/bin/python -m ddtree_operator.api.crd > charts/ddtree-operator/crds/ddtreedeployments.yaml
