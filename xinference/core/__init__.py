"""Supervisor, workers and replicas: what is launched where, and what happens to it."""
