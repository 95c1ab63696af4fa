.PHONY: bench-decisions

bench-decisions: ## error budgets and pairs needed of the canary decision, by simulation (docs/benchmarks/decisions.json)
	py=$(OPS); $$py/bin/python dev/bench/decisions.py docs/benchmarks $$(ls docs/benchmarks/records/*.jsonl.gz 2>/dev/null)

.PHONY: record-pairs
record-pairs: ## pairs of real engines on the SmolLM2 pair for bench-decisions (docs/benchmarks/records; about 14 minutes)
	py=$(OPS); for pair in "chain tree 400" "tree tree 300"; do \
	  $$py/bin/python dev/bench/record_pairs.py docs/benchmarks/records $$pair || exit 1; done
