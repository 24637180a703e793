"""Tests of the command line and the server processes."""
