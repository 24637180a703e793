"""Read a vLLM source tree's command line: `python3 scripts/engine_arguments.py DIR...` with unpacked wheels, named after their version.

Prints `xinference/model/llm/test/engine_arguments.json`: what each version of the range knows, as changes from the one before.
Standard library only, and nothing of the tree is imported: versions that do not run on this machine can be read too.
"""

import ast
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

FLAG = re.compile(r'"--([a-z][a-z0-9-]*)"')
FIELD = re.compile(r"^    ([a-z_]+):", re.MULTILINE)


def arguments(tree: Path) -> set[str]:
    """Names of all arguments of the OpenAI server: fields of its argument classes, and flags written out."""
    found: set[str] = set()
    for path in [tree / "vllm/engine/arg_utils.py", *(tree / "vllm/entrypoints").rglob("cli_args.py")]:
        text = path.read_text()
        found |= {flag.replace("-", "_") for flag in FLAG.findall(text)}
        found |= {name for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ClassDef) for name in _fields(node)}
    return found


def _fields(node: ast.ClassDef) -> Iterator[str]:
    if node.name.endswith("Args"):
        for statement in node.body:
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                yield statement.target.id


def executors(tree: Path) -> list[str]:
    """Names that distributed_executor_backend takes."""
    text = (tree / "vllm/config/parallel.py").read_text()
    return sorted(name for name in ("ray", "mp", "uni", "external_launcher") if f'"{name}"' in text)


def main() -> None:
    """Print the table of the given trees, oldest first."""
    table, before = {}, set[str]()
    for tree in sorted(map(Path, sys.argv[1:]), key=lambda path: [int(part) for part in path.name.split(".")]):
        names = arguments(tree)
        table[tree.name] = {
            "added": sorted(names - before),
            "removed": sorted(before - names),
            "executors": executors(tree),
            "kv_transfer": sorted(
                name for name in FIELD.findall((tree / "vllm/config/kv_transfer.py").read_text()) if name.startswith("kv_")
            ),
            "module": (tree / "vllm/entrypoints/openai/api_server.py").is_file(),
        }
        before = names
    print(json.dumps(table, indent=1))


if __name__ == "__main__":
    main()
