"""Tests of the shared cache, sorted by what they need."""
