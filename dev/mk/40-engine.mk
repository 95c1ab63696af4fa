.PHONY: test-engine models typecheck-engine

models: ## make the tiny and the SmolLM2 model pair (once) and print their folders
	@models/prepare tiny
	@models/prepare smollm2

test-engine: ## real SGLang on a CPU: plain, NGRAM, DFLASH, DDTree against Transformers, mutations, server
	py=$(OPS); $$py/bin/pytest tests/engine -q

lint: typecheck-engine
typecheck-engine: ## mypy --strict on the engine wheels (SGLang and torch stay untyped)
	py=$(OPS); MYPYPATH=patches/sglang_ddtree/src:patches/sglang_cpu/src $$py/bin/mypy --config-file patches/mypy.ini patches/sglang_ddtree/src/sglang_ddtree patches/sglang_cpu/src/sglang_cpu patches/sglang_cpu/src/sgl_kernel

.PHONY: faults
faults: ## rewrite the faulty patches of the tests and the demo after an edit of the lines they are about
	py=$(OPS); $$py/bin/python tests/engine/mutations/make.py

.PHONY: bench-engine
bench-engine: ## the engine on a CPU: plain, chain and trees on the SmolLM2 pair
	py=$(OPS); $$py/bin/python dev/bench/engine_cpu.py docs/benchmarks

.PHONY: bench-equality
bench-equality: ## text of 24 DDTree engines against Transformers, 1,000 prompts each (PROMPTS=n; hours on a busy machine)
	py=$(OPS); ENGINE_TIMEOUT=14400 $$py/bin/python dev/bench/equality.py docs/benchmarks $(PROMPTS)
