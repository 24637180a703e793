"""Prometheus text of many replicas merged into one: pure.

A metric's samples must stand together below one HELP and one TYPE line, so the texts cannot simply be put one after the other.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

_SUFFIXES: Final = ("_bucket", "_sum", "_count", "_created", "_total", "_info")


@dataclass(frozen=True)
class Family:
    """One sample of our own, with what its family is. ``suffix`` tells the samples of a histogram apart."""

    name: str
    kind: str
    help: str
    labels: Mapping[str, str]
    value: float
    suffix: str = ""


class Merger:
    """Collects samples of several sources, each with labels of its own."""

    def __init__(self) -> None:
        self._heads: dict[str, list[str]] = {}
        self._samples: dict[str, list[str]] = {}

    def add(self, text: str, labels: Mapping[str, str]) -> None:
        """Take one source's text; ``labels`` are put before each sample's own, which they win over."""
        for line in text.splitlines():
            if line.startswith("#"):
                self._add_head(line)
            elif line.strip():
                self._add_sample(line, labels)

    def add_family(self, family: Family) -> None:
        """Take one sample."""
        self._heads.setdefault(family.name, [f"# HELP {family.name} {family.help}", f"# TYPE {family.name} {family.kind}"])
        inside = ",".join(f'{key}="{escape(value)}"' for key, value in family.labels.items())
        self._samples.setdefault(family.name, []).append(f"{family.name}{family.suffix}{{{inside}}} {family.value}")

    def lines(self) -> Iterator[str]:
        """The merged text, family by family."""
        for family, samples in self._samples.items():
            yield from self._heads.get(family, ())
            yield from samples

    def _add_head(self, line: str) -> None:
        words = line.split(" ", 3)
        if len(words) < 3 or words[1] not in ("HELP", "TYPE"):
            return
        heads = self._heads.setdefault(words[2], [])
        if not any(head.startswith(f"# {words[1]} ") for head in heads):
            heads.append(line)

    def _add_sample(self, line: str, labels: Mapping[str, str]) -> None:
        name, own, rest = _split(line)
        kept = [pair for pair in _pairs(own) if pair.partition("=")[0] not in labels]
        both = [f'{key}="{escape(value)}"' for key, value in labels.items()] + kept
        self._samples.setdefault(self._family(name), []).append(f"{name}{{{','.join(both)}}} {rest}")

    def _family(self, name: str) -> str:
        if name in self._heads:
            return name
        for suffix in _SUFFIXES:
            if name.endswith(suffix) and name.removesuffix(suffix) in self._heads:
                return name.removesuffix(suffix)
        return name


def escape(value: str) -> str:
    """A label value as the text format wants it."""
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def _split(line: str) -> tuple[str, str, str]:
    """Name, inside of the braces, and the value with what follows it."""
    brace = line.find("{")
    if brace < 0 or " " in line[:brace]:
        name, _, rest = line.partition(" ")
        return name, "", rest
    end = line.rfind("}")
    return line[:brace], line[brace + 1 : end], line[end + 1 :].strip()


def _pairs(inside: str) -> Iterator[str]:
    """The ``key="value"`` parts; commas inside quotation marks do not separate."""
    start, quoted, escaped = 0, False, False
    for index, char in enumerate(inside):
        if escaped:
            escaped = False
        elif char == "\\":
            escaped = True
        elif char == '"':
            quoted = not quoted
        elif char == "," and not quoted:
            yield inside[start:index].strip()
            start = index + 1
    if inside[start:].strip():
        yield inside[start:].strip()
