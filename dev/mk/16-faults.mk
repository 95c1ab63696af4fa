.PHONY: test-faults test-rules

test-faults: ## the operator killed, refused and lied to at every write; storms of alerts (SAMPLE=7: every seventh write only)
	py=$(OPS); DDTREE_FAULTS_EVERY=$(or $(SAMPLE),1) $$py/bin/pytest tests/faults -q

test-rules: ## promtool on the shipped Prometheus rules: syntax, and when each alert fires
	@tools=$$(dev/cluster/build-binaries prometheus) && \
	$$tools/promtool check rules --lint=all --lint-fatal charts/ddtree-operator/files/ddtree-rules.yaml && \
	$$tools/promtool test rules tests/alerts/rules_test.yaml
