"""The commands of the tool, one file per group; each is imported only when it is used."""
