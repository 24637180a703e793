"""Tests that need nothing but this package."""
