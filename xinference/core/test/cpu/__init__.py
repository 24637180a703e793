"""Tests of the control plane with actors and processes."""
