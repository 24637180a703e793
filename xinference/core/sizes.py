"""Sizes in bytes as people write them. Pure."""

import re
from decimal import Decimal
from typing import Any

EXAMPLES = "give a number of bytes, or a number with a unit such as 256MiB, 1.5GiB or 4GB"
# One number, then at most one unit, and nothing else: a pattern that is content with a prefix once read 1.5.2GiB as 1 byte.
_SIZE = re.compile(r"([0-9]{1,20}(?:\.[0-9]{1,20})?) *([a-z]{0,3})", re.IGNORECASE | re.ASCII)
_LETTERS = "kmgtp"
UNITS: dict[str, int] = {
    "": 1,
    "b": 1,
    **{letter: 1000**power for power, letter in enumerate(_LETTERS, 1)},
    **{f"{letter}b": 1000**power for power, letter in enumerate(_LETTERS, 1)},
    **{f"{letter}ib": 1024**power for power, letter in enumerate(_LETTERS, 1)},
}


def read_bytes(value: Any) -> int:
    """A size in bytes from a whole number or text such as ``256MiB``; a part of a byte is dropped.

    Raises:
        ValueError: it is neither.
    """
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise ValueError(EXAMPLES)  # noqa: TRY004 (pydantic lets only ValueErrors through)
    if isinstance(value, int):
        if value < 0:
            raise ValueError("a size cannot be negative")
        return value
    found = _SIZE.fullmatch(value.strip(" "))
    unit = UNITS.get(found[2].lower()) if found else None
    if found is None or unit is None or (unit == 1 and "." in found[1]):
        raise ValueError(f"{value[:40]!r} is not a size; {EXAMPLES}")
    return int(Decimal(found[1]) * unit)
