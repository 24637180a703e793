"""Tests that need processes or torch."""
