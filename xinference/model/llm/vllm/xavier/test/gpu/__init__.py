"""Tests that need a GPU: run by hand."""
