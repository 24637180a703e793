"""Text that must have a form: JSON for a schema, and the tool calls of a chat."""

import json
from dataclasses import dataclass
from typing import Any

MAX_DEPTH = 16


@dataclass(frozen=True)
class ToolCall:
    name: str
    arguments: str  # JSON


def instance_of(schema: Any, root: Any = None, depth: int = 0) -> Any:
    """A small value that satisfies a JSON schema: types, enum, const, required, references, alternatives, simple bounds."""
    root = schema if root is None else root
    if not isinstance(schema, dict) or depth > MAX_DEPTH:
        return None
    if "$ref" in schema:
        return instance_of(_resolve(schema["$ref"], root), root, depth + 1)
    for keyword in ("const", "default"):
        if keyword in schema:
            return schema[keyword]
    if schema.get("enum"):
        return schema["enum"][0]
    for keyword in ("anyOf", "oneOf", "allOf"):
        if schema.get(keyword):
            return instance_of(schema[keyword][0], root, depth + 1)
    kind = schema.get("type", "object" if "properties" in schema else "string")
    kind = kind[0] if isinstance(kind, list) and kind else kind
    if kind == "object":
        properties = schema.get("properties", {})
        names = schema.get("required", list(properties))
        return {name: instance_of(properties.get(name, {}), root, depth + 1) for name in names}
    if kind == "array":
        return [instance_of(schema.get("items", {}), root, depth + 1) for _ in range(max(1, schema.get("minItems", 1)))]
    return _scalar(kind, schema)


def _scalar(kind: Any, schema: dict[str, Any]) -> Any:
    if kind in ("integer", "number"):
        return schema.get("minimum", schema.get("exclusiveMinimum", 0) + 1)
    if kind == "boolean":
        return True
    if kind == "null":
        return None
    text = "river stone"
    return text.ljust(schema.get("minLength", 0), "a")[: schema.get("maxLength", len(text) + schema.get("minLength", 0))]


def _resolve(reference: str, root: Any) -> Any:
    node = root
    for part in reference.removeprefix("#").strip("/").split("/"):
        node = node.get(part, {}) if isinstance(node, dict) and part else node
    return node


def tool_calls(tools: list[dict[str, Any]], choice: Any, last_text: str) -> list[ToolCall]:
    """The calls the fake makes.

    A named choice calls that tool, "required" one tool, "auto" every tool whose name occurs in the last message, "none" nothing.
    """
    functions = [tool["function"] for tool in tools]
    if isinstance(choice, dict):
        wanted = [f for f in functions if f["name"] == choice["function"]["name"]]
    else:
        mentioned = [f for f in functions if f["name"] in last_text]
        wanted = {"auto": mentioned, "required": mentioned or functions[:1]}.get(choice, [])
    return [ToolCall(f["name"], json.dumps(instance_of(f.get("parameters") or {"type": "object"}))) for f in wanted]
