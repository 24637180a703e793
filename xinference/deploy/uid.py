"""How commands are told which model they are about."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import click

R = TypeVar("R")


def uid_argument(command: Callable[..., R]) -> Callable[..., R]:
    """Adds the model's uid, as an argument or as upstream's ``--model-uid``; the command gets ``model_uid``."""

    @click.argument("uid", required=False)
    @click.option("-u", "--model-uid", "uid_option", metavar="UID", help="The model, instead of the argument.")
    @functools.wraps(command)
    def wrapped(*args: Any, uid: str | None, uid_option: str | None, **kwargs: Any) -> R:
        if uid is not None and uid_option is not None:
            raise click.UsageError("name the model either as argument or with --model-uid")
        model_uid = uid or uid_option
        if not model_uid:
            raise click.UsageError("name the model: its uid, as `xinference list` shows it")
        return command(*args, model_uid=model_uid, **kwargs)

    return wrapped
