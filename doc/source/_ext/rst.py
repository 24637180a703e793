"""reStructuredText made from values: tables and literal blocks whose cells are escaped."""

import re
from collections.abc import Iterable, Sequence

_MARKUP = re.compile(r"([\\*`|])")
# A word that ends in an underscore is a reference.
_REFERENCE = re.compile(r"(?<=\w)_(?=\W|$)")


def text(value: object) -> str:
    """A value as running text on one line."""
    joined = " ".join(str(value).split())
    return _REFERENCE.sub(r"\\_", _MARKUP.sub(r"\\\1", joined))


def code(value: object) -> str:
    """A value as written in code; a dash for nothing."""
    joined = " ".join(str(value).split())
    return f"``{joined}``" if joined else "-"


def table(header: Sequence[str], rows: Iterable[Sequence[str]], widths: Sequence[int]) -> str:
    """A list table. Cells are finished reStructuredText on one line each."""
    lines = [".. list-table::", "   :header-rows: 1", f"   :widths: {' '.join(map(str, widths))}", ""]
    for row in (header, *rows):
        lines += [f"   {'* -' if index == 0 else '  -'} {cell}".rstrip() for index, cell in enumerate(row)]
    return "\n".join([*lines, ""])


def block(content: str, language: str = "text") -> str:
    """A literal block."""
    indented = "\n".join(f"   {line}".rstrip() for line in content.rstrip("\n").splitlines())
    return f".. code-block:: {language}\n\n{indented}\n"


def section(title: str, mark: str = "-") -> str:
    """A heading."""
    return f"\n{title}\n{mark * len(title)}\n"
