"""vLLM as the engine: which build is installed, its arguments, its command line."""
