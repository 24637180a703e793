"""Tests of engines and models."""
