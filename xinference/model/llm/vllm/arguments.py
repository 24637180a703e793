"""Engine arguments: names and kinds known to the installed vLLM, values checked, flags written.

The list comes from vLLM's own parser, asked once in a subprocess and kept by version, so that a spelling mistake is an error at launch
with the nearest name in it, not an engine that dies half a minute later.
"""

import asyncio
import difflib
import json
import os
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xinference.model.llm.vllm.flavour import Flavour

DUMP_SECONDS = 180.0  # importing vLLM without compiled bytecode on a busy machine takes up to a minute
MAX_ERROR_CHARS = 600
FORMAT = 1  # of the cached file


class ArgumentRefused(ValueError):
    """An engine argument is unknown, or its value does not fit. ``name`` is the argument."""

    def __init__(self, message: str, name: str = "") -> None:
        super().__init__(message, name)
        self.name = name

    def __str__(self) -> str:
        return str(self.args[0])


class ArgumentsUnknown(RuntimeError):
    """vLLM's parser could not be asked. The message holds the end of its output."""


@dataclass(frozen=True)
class Argument:
    """One argument of the server.

    ``kind`` is switch, int, float, str or any (JSON or a form of vLLM's own). ``many`` takes several values.
    """

    name: str
    flags: tuple[str, ...]
    kind: str
    many: bool = False
    choices: tuple[str, ...] | None = None


class KnownArguments:
    """The arguments of one vLLM version.

    Args:
        arguments: by name, the name being the flag with underscores.
    """

    def __init__(self, arguments: Mapping[str, Argument]) -> None:
        self._by_name = dict(arguments)

    def __contains__(self, name: str) -> bool:
        return name in self._by_name

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._by_name)

    def flags(self, values: Mapping[str, Any]) -> list[str]:
        """Command-line flags for argument values, in the order given; None values are left out.

        Raises:
            ArgumentRefused: unknown name or value of the wrong kind.
        """
        written: list[str] = []
        for name, value in values.items():
            if value is not None:
                written += self._flag(name, value)
        return written

    def _flag(self, name: str, value: Any) -> list[str]:
        argument = self._by_name.get(name)
        if argument is None:
            close = difflib.get_close_matches(name, self._by_name, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise ArgumentRefused(f"the installed vLLM has no argument {name!r}{hint}", name)
        flag = argument.flags[0]
        if argument.kind == "switch":
            return self._switch(argument, value)
        items = list(value) if argument.many and isinstance(value, list | tuple) else [value]
        return [flag, *(_written(argument, item) for item in items)]

    def _switch(self, argument: Argument, value: Any) -> list[str]:
        if not isinstance(value, bool):
            raise ArgumentRefused(f"{argument.name} is true or false, not {value!r}", argument.name)
        if value:
            return [argument.flags[0]]
        negative = [flag for flag in argument.flags if flag.startswith("--no-")]
        return negative[:1]  # a switch without a negative form is off unless given

    @classmethod
    def from_dump(cls, dump: Mapping[str, Mapping[str, Any]]) -> "KnownArguments":
        """From what ``argument_dump`` prints."""
        arguments = {}
        for name, entry in dump.items():
            flags = sorted(entry["flags"], key=lambda flag: (not flag.startswith("--"), flag.startswith("--no-")))
            choices = entry["choices"]
            arguments[name] = Argument(name, tuple(flags), entry["kind"], entry["many"], tuple(choices) if choices else None)
        return cls(arguments)


def _written(argument: Argument, value: Any) -> str:
    """One value as text, checked against the argument's kind and choices."""
    name, kind = argument.name, argument.kind
    if isinstance(value, bool):
        raise ArgumentRefused(f"{name} takes a value, not true or false", name)
    if isinstance(value, dict | list | tuple):
        if kind in ("int", "float"):
            raise ArgumentRefused(f"{name} is a number, not {type(value).__name__}", name)
        return json.dumps(value)
    text = str(value)
    if not text or "\0" in text:
        raise ArgumentRefused(f"{name} must not be empty", name)
    if text.startswith("-") and not (kind in ("int", "float") and _is_number(text)):
        raise ArgumentRefused(f"the value of {name} must not start with '-': {text!r}", name)
    if kind == "float" and not _is_number(text):
        raise ArgumentRefused(f"{name} is a number, not {text!r}", name)
    if kind == "int" and not (
        text.lstrip("-").isdigit() or (text[:-1].replace(".", "", 1).isdigit() and text[-1] in "kKmMgG") or text == "auto"
    ):
        raise ArgumentRefused(f"{name} is a whole number, not {text!r}", name)
    if argument.choices and text not in argument.choices:
        close = difflib.get_close_matches(text, argument.choices, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else f"; one of {', '.join(argument.choices)}"
        raise ArgumentRefused(f"{name} cannot be {text!r}{hint}", name)
    return text


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


async def known_arguments(home: Path, flavour: Flavour, python: str = sys.executable) -> KnownArguments:
    """The arguments of the installed vLLM, from the cache under ``home`` or else from vLLM itself (seconds).

    Raises:
        ArgumentsUnknown: vLLM cannot be imported; its error is in the message.
    """
    file = home / "cache" / f"arguments-{flavour.distribution}-{flavour.text}.json"
    cached = await asyncio.to_thread(_read_cache, file)
    if cached is not None:
        return KnownArguments.from_dump(cached)
    dump = await _ask(python)
    await asyncio.to_thread(_write_cache, file, dump)
    return KnownArguments.from_dump(dump)


async def _ask(python: str) -> dict[str, Any]:
    process = await asyncio.create_subprocess_exec(
        python, "-m", "xinference.model.llm.vllm.argument_dump",
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"},
    )  # fmt: skip
    try:
        output, errors = await asyncio.wait_for(process.communicate(), DUMP_SECONDS)
    except BaseException as error:
        process.kill()
        await process.wait()
        if isinstance(error, TimeoutError):
            raise ArgumentsUnknown(f"vLLM did not load within {DUMP_SECONDS:g} s") from error
        raise
    try:
        dump = json.loads(output)
    except ValueError as error:
        raise ArgumentsUnknown(f"vLLM cannot be loaded: {errors.decode(errors='replace')[-MAX_ERROR_CHARS:].strip()}") from error
    if not isinstance(dump, dict):
        raise ArgumentsUnknown("vLLM's parser gave no list of arguments")
    return dump


def _read_cache(file: Path) -> dict[str, Any] | None:
    """None if there is no cache or it is of another format; a damaged cache is made anew."""
    try:
        value = json.loads(file.read_bytes())
        return value["arguments"] if value["format"] == FORMAT else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write_cache(file: Path, dump: dict[str, Any]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=file.parent, delete=False) as temporary:
        json.dump({"format": FORMAT, "arguments": dump}, temporary)
    os.replace(temporary.name, file)
