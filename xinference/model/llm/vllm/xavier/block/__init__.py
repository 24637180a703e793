"""What a cached block is called: its key, and the namespace in which that key means something."""
