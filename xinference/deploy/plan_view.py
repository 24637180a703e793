"""A plan in words: devices, bytes a block, and how a budget becomes blocks and tokens."""

import shlex
from typing import Any

from rich.markup import escape

from xinference.deploy.output import bytes_text

Json = dict[str, Any]


def plan_rows(plan: Json) -> list[tuple[str, str]]:
    """Names and values for ``facts_table``; the arithmetic of each budget is spelled out."""
    kv = plan["kv"]
    rows = [("KV of a token", bytes_text(kv["bytes_per_token"]))]
    rows.append(
        (
            "KV of a block",
            f"{kv['block_size']} tokens x {bytes_text(kv['bytes_per_token'])} = {bytes_text(kv['bytes_per_block'])}",
        )
    )
    if plan.get("kv_cache_bytes"):
        blocks = plan["kv_cache_bytes"] // kv["bytes_per_block"]
        tokens = blocks * kv["block_size"]
        rows.append(("engine KV cache", f"{bytes_text(plan['kv_cache_bytes'])} = {blocks:,} blocks = {tokens:,} tokens, each replica"))
    return rows + _xavier_rows(plan.get("xavier"))


def _xavier_rows(xavier: Json | None) -> list[tuple[str, str]]:
    if xavier is None:
        return [("xavier", "off")]
    budget = f"{bytes_text(xavier['cpu_cache_bytes'])} = {xavier['blocks']:,} blocks = {xavier['tokens']:,} tokens, each replica"
    rows = [("xavier cache", budget), ("", f"{bytes_text(xavier['host_total_bytes'])} on the host in all")]
    return [*rows, ("", escape(xavier["arithmetic"]))] if xavier.get("arithmetic") else rows


def placement_rows(plan: Json) -> list[tuple[str, str]]:
    """Where each replica would run, and with which command."""
    rows = []
    for place in plan["replicas"]:
        devices = ", ".join(str(device) for device in place["devices"]) or "CPU"
        share = f", {place['gpu_memory_utilization']:.0%} of its memory" if place.get("gpu_memory_utilization") else ""
        rows.append((escape(place["replica_uid"]), f"{escape(str(place['worker_id']))}: {escape(devices)}{share}"))
    return [*rows, ("command", escape(shlex.join(plan["command"])))]
