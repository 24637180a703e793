"""An engine server without a model: vLLM's interface, deterministic tokens, faults on command."""
