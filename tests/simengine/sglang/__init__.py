"""A simulated SGLang for tests: same command line and HTTP, scripted behaviour. See tests/simengine/README.md."""
