"""The file of routing statistics: how many slots (token, choice) the router has sent to each expert of each layer.

JSON: ``{"format": "vllm-exl3 expert usage", "version": 1, "layers": {"model.layers.0.mlp": [n, ...], ...}}``, one count
for each expert of the model. Counts of several processes and of one server after another are added up.
"""

import fcntl
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from vllm_exl3.pack.errors import Exl3PackError

__all__ = ["Usage", "add_usage", "check_usage", "read_usage"]

Usage = dict[str, list[int]]

_FORMAT, _VERSION = "vllm-exl3 expert usage", 1


def read_usage(path: Path) -> Usage | None:
    """The counts of a file; None where there is none yet.

    Raises:
        Exl3PackError: the file holds something else, or cannot be read.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise _refusal(path, str(error)) from None
    if not isinstance(content, dict) or content.get("format") != _FORMAT or content.get("version") != _VERSION:
        raise _refusal(path, "a file of another format or version")
    layers = content.get("layers")
    if not isinstance(layers, dict) or not all(
        isinstance(counts, list) and all(type(count) is int and count >= 0 for count in counts)
        for counts in layers.values()
    ):
        raise _refusal(path, "layers that are not lists of counts")
    return layers


def check_usage(path: Path, usage: Mapping[str, Sequence[int]], experts: Mapping[str, int]) -> None:
    """Refuse statistics of another model.

    Args:
        path: the file, for the error.
        usage: its counts.
        experts: how many experts each layer of the model has.

    Raises:
        Exl3PackError: a layer is missing, or has another number of experts.
    """
    for key, count in experts.items():
        if key not in usage or len(usage[key]) != count:
            found = f"{len(usage[key])} experts in {key}" if key in usage else f"no layer {key}"
            raise _refusal(path, f"{found}, where the pack has {count}")


def add_usage(path: Path, counts: Mapping[str, Sequence[int]]) -> None:
    """Add counts to a file, which may not exist yet; other processes may do so at the same time.

    Raises:
        OSError: the folder cannot be written.
        Exl3PackError: the file holds something else, or other numbers of experts.
    """
    with path.with_name(f"{path.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        layers = read_usage(path) or {}
        for key, added in counts.items():
            before = layers.get(key) or [0] * len(added)
            if len(before) != len(added):
                raise _refusal(path, f"{len(before)} experts in {key}, where the model has {len(added)}")
            layers[key] = [old + new for old, new in zip(before, added, strict=True)]
        unfinished = path.with_name(f"{path.name}.part")
        content = {"format": _FORMAT, "version": _VERSION, "layers": dict(sorted(layers.items()))}
        unfinished.write_text(json.dumps(content), encoding="utf-8")
        os.replace(unfinished, path)


def _refusal(path: Path, found: str) -> Exl3PackError:
    return Exl3PackError(
        found=found,
        expected="routing statistics that this package wrote for this model",
        where=f"VLLM_EXL3_EXPERTS_STATS={path}",
        remedy="Name another file, or remove this one: it is made anew.",
    )
