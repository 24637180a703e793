"""Prints, as JSON, every argument that the installed vLLM's server parser knows. Run as a process of its own: importing vLLM is heavy."""

import argparse
import contextlib
import importlib
import json
import sys
from typing import Any

# The parser moved between versions (0.28 at the latest); the newest place first.
PARSER_MODULES = ("vllm.entrypoints.launchers.cli_args", "vllm.entrypoints.openai.cli_args")


def server_parser() -> argparse.ArgumentParser:
    """The parser of ``python -m vllm.entrypoints.openai.api_server``. Raises ImportError."""
    utils = importlib.import_module("vllm.utils.argparse_utils")
    for name in PARSER_MODULES:
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError:
            continue
        parser: argparse.ArgumentParser = module.make_arg_parser(utils.FlexibleArgumentParser())
        return parser
    raise ImportError(f"vLLM's argument parser is in none of {', '.join(PARSER_MODULES)}")


def describe(action: argparse.Action) -> dict[str, Any]:
    """One argument: its name, its flags, the kind of its value, its choices."""
    kind = getattr(action.type, "__name__", "str") if action.type is not None else "str"
    if action.nargs == 0:
        kind = "switch"
    elif kind in ("human_readable_int", "human_readable_int_or_auto"):
        kind = "int"
    elif kind not in ("int", "float", "str"):
        kind = "any"
    return {
        "flags": list(action.option_strings),
        "kind": kind,
        "many": action.nargs in ("+", "*"),
        "choices": [str(choice) for choice in action.choices] if action.choices else None,
    }


def main() -> None:
    with contextlib.redirect_stdout(sys.stderr):  # vLLM logs to standard output while it is imported
        parser = server_parser()
    json.dump({a.dest: describe(a) for a in parser._actions if a.option_strings and a.dest != "help"}, sys.stdout)


if __name__ == "__main__":
    main()
