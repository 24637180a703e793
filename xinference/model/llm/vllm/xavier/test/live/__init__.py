"""Tests that start real vLLM engines."""
