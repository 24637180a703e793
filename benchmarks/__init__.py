"""Every published figure, with the command that makes it again. See README.md here."""
