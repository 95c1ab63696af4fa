.PHONY: images wheelhouse

images: ## build the images that are missing into the dev cluster's registry (IMAGES="operator …" for some)
	@dev/images $(or $(IMAGES),all)

wheelhouse: ## fetch SGLang's wheel (checked) and build the plugin wheels into the wheelhouse
	@dev/wheelhouse
