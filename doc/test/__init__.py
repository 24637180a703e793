"""Tests of the documentation: what it names exists."""
