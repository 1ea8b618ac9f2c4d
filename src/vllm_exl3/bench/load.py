"""Measures how fast vLLM loads a model, from the page cache and from disk."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from vllm_exl3.bench.memory import from_log
from vllm_exl3.bench.served import label_of, local_folder, served
from vllm_exl3.tools.compare import measured

__all__ = ["STATES", "drop_from_cache", "measure_loading", "weight_files"]

STATES = ("cached", "dropped")
"""Whether the files are in the page cache when the server starts."""


def weight_files(model: str) -> list[Path]:
    """The safetensors files of a model, downloaded if it is a repository that is not here yet."""
    folder = local_folder(model)
    if folder is None:
        from huggingface_hub import snapshot_download

        folder = Path(snapshot_download(model))
    return sorted(folder.glob("*.safetensors"))


def drop_from_cache(files: Sequence[Path]) -> None:
    """Ask the system to drop these files' pages, for which reading them is permission enough."""
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fdatasync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def _read(files: Sequence[Path]) -> None:
    for file in files:
        with file.open("rb", buffering=0) as stream:
            while stream.read(1 << 24):
                pass


def measure_loading(
    model: str,
    state: str,
    *,
    rounds: int,
    options: Sequence[str],
    port: int | None,
    console: Console,
) -> dict[str, Any]:
    """Start a server ``rounds`` times and see how long it loads.

    Args:
        model: a folder or a repository.
        state: one of `STATES`.
        rounds: starts.
        options: more options of ``vllm serve``.
        port: where to listen; any free one, if None.
        console: where to say what is done.

    Returns:
        One row: ``weights_s`` (vLLM's own "Loading weights took" of the slowest rank), ``gbps`` (the bytes of the
        safetensors files by it, where there are any), ``ready_s`` (until the server answers), ``read_share_each`` (how
        much of the files came from disk).

    Raises:
        ServerError: the server did not start.
    """
    files = weight_files(model)
    nbytes = sum(file.stat().st_size for file in files)
    ready, weights, hosts, read = [], [], [], []
    for _ in range(rounds):
        if state == "dropped":
            drop_from_cache(files)
        else:
            _read(files)
        with served(model, console=console, options=options, port=port) as running:
            running.sample()
            facts = from_log(running.server.log_text())
        ready.append(running.ready)
        hosts.append(running.peak.host)
        read.append(running.peak.read / max(nbytes, 1))
        if "weights_s" in facts:
            weights.append(facts["weights_s"])
    row = {"subject": "load", "model": label_of(model), "state": state, "file_bytes": nbytes}
    row |= measured("ready_s", ready) | measured("host_peak_bytes", hosts)
    row["read_share_each"] = [round(share, 3) for share in read]
    if len(weights) == rounds:
        row |= measured("weights_s", weights)
    if len(weights) == rounds and nbytes:
        # vLLM logs hundredths of a second.
        row |= measured("gbps", (nbytes / 1e9 / max(seconds, 0.005) for seconds in weights))
    return row
