"""Sphinx settings. The same sources are translated later, so message catalogues follow the pages one to one."""

import sys
from importlib.metadata import version as installed_version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

project = "xinference"
author = "the xinference developers"
copyright = author
release = installed_version("xinference")
version = release
extensions = ["generated"]
html_theme = "pydata_sphinx_theme"
html_title = "xinference"
html_show_sourcelink = False
exclude_patterns: list[str] = []
nitpicky = True
gettext_compact = False
gettext_uuid = False
gettext_location = False
locale_dirs = ["locale/"]
