.PHONY: images wheelhouse

images: ## build the images that are missing into the dev cluster's registry (IMAGES="operator …" for some)
	@dev/images $(or $(IMAGES),all)

wheelhouse: ## fetch SGLang's wheel (checked) and build the plugin wheels into the wheelhouse
	@dev/wheelhouse

.PHONY: test-images typecheck-images
test-images: ## the small images, built twice and run (about 3 minutes)
	py=$(OPS); $$py/bin/pytest tests/integration/test_images.py -q

lint: typecheck-images
typecheck-images:
	py=$(OPS); cd dev && MYPYPATH=.:../images/engine-cpu:../images/operator $$py/bin/mypy --strict --config-file= imagetool engine_env.py ../images/engine-cpu/trim.py ../images/operator/python_only.py
