"""Tests of the runner over the list of guards: each starts pytest."""
