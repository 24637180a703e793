"""Python client of the REST API: one core, a synchronous and an asynchronous face."""
