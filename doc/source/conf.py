"""Sphinx settings. The same sources are translated later, so message catalogues follow the pages one to one."""

from importlib.metadata import version as installed_version

project = "xinference"
author = "the xinference developers"
copyright = author  # noqa: A001  (Sphinx's name)
release = installed_version("xinference")
version = release
extensions = ["sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "pydata_sphinx_theme"
html_title = "xinference"
html_show_sourcelink = False
exclude_patterns: list[str] = []
nitpicky = True
gettext_compact = False
gettext_uuid = False
gettext_location = False
locale_dirs = ["locale/"]
autodoc_typehints = "description"
