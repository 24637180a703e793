"""What the platform can serve, by kind of model."""
