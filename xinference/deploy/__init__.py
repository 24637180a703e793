"""Everything that starts with a command line: the tool, the server processes, quick start and doctor."""
