.PHONY: bench-decisions

bench-decisions: ## error budgets and pairs needed of the canary decision, by simulation (docs/benchmarks/decisions.json)
	py=$(OPS); $$py/bin/python dev/bench/decisions.py docs/benchmarks $$(ls docs/benchmarks/records/*.jsonl.gz 2>/dev/null)
