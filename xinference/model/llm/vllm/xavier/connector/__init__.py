"""Where the shared cache meets the engine: the scheduler half, the worker half, and what both share."""
