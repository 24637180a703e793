"""From the options of ``launch`` to the fields of a launch specification. Pure.

Options that click does not know arrive as plain words. Those that name an engine argument become one (``--max-model-len 4096``, as
upstream's users write it); anything else is a spelling mistake and gets the nearest name.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import click

from xinference.core.engine_arguments import ALLOWED, DENIED, canonical, nearest
from xinference.core.spec import Engine

Fields = dict[str, Any]


def parse_pairs(pairs: Iterable[str], option: str) -> Fields:
    """``k=v`` words as a dictionary. Raises click.BadParameter."""
    found: Fields = {}
    for pair in pairs:
        name, sign, value = pair.partition("=")
        if not sign or not name:
            raise click.BadParameter(f"'{pair}' is not of the form NAME=VALUE", param_hint=option)
        if name in found:
            raise click.BadParameter(f"'{name}' is given twice", param_hint=option)
        found[name] = value
    return found


def environment_variables(words: Iterable[str], own: Mapping[str, str]) -> Fields:
    """``--env`` words: NAME=VALUE, or NAME alone for the value that it has here, which keeps secrets out of the list of processes.

    Args:
        own: this process's environment.

    Raises:
        click.BadParameter: a name that is given twice, or is not set here.
    """
    pairs = []
    for word in words:
        if "=" not in word and word not in own:
            raise click.BadParameter(f"'{word}' is not of the form NAME=VALUE, nor a variable that is set here", param_hint="--env")
        pairs.append(word if "=" in word else f"{word}={own[word]}")
    return parse_pairs(pairs, "--env")


def engine_arguments(pairs: Iterable[str]) -> Fields:
    """``--engine-arg k=v`` words; a value that is JSON (numbers, true, objects) is taken as such, anything else as text."""
    return {canonical(name): json_or_text(value) for name, value in parse_pairs(pairs, "--engine-arg").items()}


def json_or_text(value: str) -> Any:
    """A value as typed on a command line."""
    if value in ("True", "False"):
        return value == "True"
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def read_replica_config(text: str | None) -> Any:
    """``--replica-config``: JSON, or ``@file`` with JSON. Raises click.BadParameter."""
    if text is None:
        return None
    try:
        return json.loads(Path(text[1:]).read_text() if text.startswith("@") else text)
    except OSError as error:
        raise click.BadParameter(f"cannot read {text[1:]}: {error.strerror}", param_hint="--replica-config") from None
    except ValueError as error:
        raise click.BadParameter(f"not JSON: {error}", param_hint="--replica-config") from None
    except RecursionError:
        raise click.BadParameter("not JSON that can be read: nested too deep", param_hint="--replica-config") from None


def unknown_options(words: list[str], engine: str | None, known: Iterable[str]) -> Fields:
    """Engine arguments among the words that click did not know: ``--k v``, ``--k=v``, and ``--k`` alone for true.

    Args:
        words: what was left over, in order.
        engine: the chosen engine; the fake one has arguments that only the server knows.
        known: the command's own options, for suggestions.

    Raises:
        click.UsageError: a word without an option before it.
        click.NoSuchOption: neither an option nor an engine argument, with the nearest names.
    """
    found: Fields = {}
    position = 0
    while position < len(words):
        option, sign, value = words[position].partition("=")
        position += 1
        if not option.startswith("--"):
            raise click.UsageError(f"Got unexpected argument ({option})")
        _check_option(option, engine, known)
        if not sign and position < len(words) and not words[position].startswith("--"):
            sign, value = "=", words[position]
            position += 1
        found[canonical(option)] = json_or_text(value) if sign else True
    return found


def _check_option(option: str, engine: str | None, known: Iterable[str]) -> None:
    name = canonical(option)
    if name in ALLOWED or name in DENIED or (engine or "").lower() == Engine.FAKE:
        return
    spellings = {canonical(spelling): spelling for spelling in known}
    guess = nearest(name, {*spellings, *ALLOWED})
    raise click.NoSuchOption(option, possibilities=[spellings.get(guess, "--" + guess.replace("_", "-"))] if guess else None)


def model_path_from_here(path: str | None, server_is_here: bool) -> str | None:
    """A relative path means the user's directory, not the server's; on another machine it is the server's business."""
    if path is None or not server_is_here or "://" in path:
        return path
    return str(Path(path).expanduser().absolute())
