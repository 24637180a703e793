"""Numbers of seconds and the like: click takes ``nan`` for one that is within every range, and ``inf``."""

import math
from typing import Any

import click


class Finite(click.FloatRange):
    """A finite float in a range."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return number
