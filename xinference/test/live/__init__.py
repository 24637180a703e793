"""The whole product on real vLLM."""
