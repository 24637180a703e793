"""``python -m xinference.deploy``: the command line without the console script."""

from xinference.deploy.cli import main

main()
