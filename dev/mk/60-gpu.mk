.PHONY: test-kernels oracle test-gpu test-gpu-faults bench-gpu

KERNEL_PATH = $(CURDIR)/patches/sglang_ddtree/src:$(CURDIR)/tests
# pytest lives in the operator's environment, torch in the engine's
KERNEL_PYTEST = $$py/bin/python -c 'import sys, glob; sys.path += glob.glob(sys.argv.pop(1)); import pytest; sys.exit(pytest.main(sys.argv[1:]))' "$$ops/lib/python3*/site-packages" -q -p no:cacheprovider
GPU_PYTHON ?= python3
HAS_GPU = $(GPU_PYTHON) -c 'import torch, sys; sys.exit(not torch.cuda.is_available())' 2>/dev/null
NEEDS_GPU = echo "$@ needs an NVIDIA GPU and a Python with PyTorch, Triton and SGLang 0.5.23 (GPU_PYTHON=...); this machine has none" >&2; exit 2

test-kernels: ## the Triton kernels in Triton's interpreter, and compiled for sm_80 to sm_120 (no GPU)
	py=$(ENGINE); ops=$(OPS); TRITON_INTERPRET=1 PYTHONPATH=$(KERNEL_PATH) $(KERNEL_PYTEST) tests/unit/test_kernels_*.py

oracle: ## a larger sample of random trees against the heap, in the interpreter (CASES=400)
	py=$(ENGINE); ops=$(OPS); TRITON_INTERPRET=1 PYTHONPATH=$(KERNEL_PATH) DDTREE_KERNEL_CASES=$(or $(CASES),400) DDTREE_SEED=$(or $(SEED),1) \
	  $(KERNEL_PYTEST) tests/unit/test_kernels_build.py -k heap_on_random

test-gpu: ## kernels on a GPU against their references, 100,000 random trees
	@$(HAS_GPU) || { $(NEEDS_GPU); }
	PYTHONPATH=$(KERNEL_PATH) $(GPU_PYTHON) -m pytest -q tests/unit/test_kernels_build.py tests/unit/test_kernels_verify.py tests/unit/test_kernels_attention.py tests/unit/test_kernels_penalties.py tests/unit/test_kernels_backend.py
	PYTHONPATH=$(KERNEL_PATH) $(GPU_PYTHON) dev/gpu/kernels.py build/gpu-kernels.json
	PYTHONPATH=$(KERNEL_PATH) $(GPU_PYTHON) dev/gpu/attention.py build/gpu-attention.json

test-gpu-faults: ## faulty plugins on a GPU: each must be refused, write another text or accept less (ATTENTION=+fa3)
	@$(HAS_GPU) || { $(NEEDS_GPU); }
	pair=$$(ENGINE_PYTHON=$(GPU_PYTHON) models/prepare smollm2); mkdir -p build; PYTHONPATH=$(KERNEL_PATH) $(GPU_PYTHON) dev/gpu/mutants.py build/gpu-mutants.json \
	  --pair "$$pair" --prompts operator/ddtree_operator/data/prompts/smollm2.jsonl --engine tree15$(ATTENTION)

bench-gpu: ## the engine on a GPU: step cost, parity and throughput of plain, chain and trees, on the real pair and in an 8B shape
	@$(HAS_GPU) || { $(NEEDS_GPU); }
	pair=$$(ENGINE_PYTHON=$(GPU_PYTHON) models/prepare smollm2); wide=$$pair-8b; export PYTHONPATH=$(KERNEL_PATH); mkdir -p build; \
	[ -f "$$wide/drafter/config.json" ] || $(GPU_PYTHON) dev/gpu/pad_pair.py "$$pair" "$$wide"; \
	for at in "$$pair" "$$wide"; do \
	  $(GPU_PYTHON) dev/gpu/engine.py "build/gpu-engine-$$(basename "$$at").json" --pair "$$at" \
	    --prompts operator/ddtree_operator/data/prompts/smollm2.jsonl --phase steps,parity,sample,requests,speed,profile --profiled chain16,tree15,tree63 \
	    --engines plain,chain16,chain8,tree7,tree15,tree31,tree63; \
	done
