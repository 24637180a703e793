"""Tests of the list of guards and of the runner over it."""
