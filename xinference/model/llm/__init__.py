"""Language models: families, engine processes, and the engines themselves."""
