"""Tests of the package as a whole that need nothing."""
