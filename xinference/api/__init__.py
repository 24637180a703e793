"""The HTTP face: an OpenAI-compatible proxy to the replicas, and the REST routes that administer them."""
