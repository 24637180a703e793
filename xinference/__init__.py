"""Serve language models with vLLM replicas that share their KV cache."""
