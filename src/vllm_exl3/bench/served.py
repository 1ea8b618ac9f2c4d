"""Stock ``vllm serve`` for one model, started, watched and ended."""

import contextlib
import fcntl
import itertools
import os
import shlex
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from vllm_exl3.bench.memory import Peak
from vllm_exl3.demo.server import Server, ServerError, choose_port, vllm_command
from vllm_exl3.env import user_cache
from vllm_exl3.pack.errors import Exl3PackError
from vllm_exl3.pack.metadata import parse_object, text_config
from vllm_exl3.plan.shapes import number
from vllm_exl3.processors import allowed_set

__all__ = ["NAME", "Served", "label_of", "local_folder", "model_config", "served", "vocabulary_of"]

NAME = "bench"
"""The name that every model is served under."""


@dataclass
class Served:
    """A server that answers.

    Attributes:
        server: its process.
        ready: seconds from its start until it answered.
        peak: the memory so far.
    """

    server: Server
    ready: float
    peak: Peak = field(repr=False)

    def sample(self) -> None:
        """Take its memory now."""
        self.peak.sample(self.server.processes())


def local_folder(model: str) -> Path | None:
    """The folder that a model's name stands for, or None where it is a repository."""
    folder = Path(os.path.expanduser(model))
    return folder if folder.exists() else None


def model_config(model: str) -> dict[str, Any]:
    """A model's ``config.json``.

    Raises:
        Exl3PackError: there is no such model.
    """
    folder = local_folder(model)
    if folder is not None:
        path = folder / "config.json"
    else:
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

        try:
            path = Path(hf_hub_download(model, "config.json"))
        except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError) as error:
            raise _no_model(model, f"no such folder, and no such repository ({type(error).__name__})") from error
    try:
        return parse_object(path.read_bytes(), str(path))
    except OSError as error:
        raise _no_model(model, f"no config.json ({error.strerror})") from error


def vocabulary_of(model: str, config: dict[str, Any]) -> int:
    """The number of token ids.

    Raises:
        Exl3PackError: the configuration does not say it.
    """
    size = number(config, "vocab_size") or number(text_config(config), "vocab_size")
    if not size:
        raise _no_model(model, "a config.json without vocab_size")
    return size


def _no_model(model: str, found: str) -> Exl3PackError:
    return Exl3PackError(
        found=found,
        expected="a model that vLLM can serve: a folder, or a repository of the Hub",
        where=model,
        remedy="Check the path; for a repository, check its id and that the Hub can be reached.",
    )


def label_of(model: str) -> str:
    """How a model is called in results: its folder's name, or its repository."""
    folder = local_folder(model)
    return model if folder is None else folder.resolve().name


@contextlib.contextmanager
def served(
    model: str,
    *,
    console: Console,
    options: Sequence[str] = (),
    port: int | None = None,
    patience: float = 1800,
) -> Iterator[Served]:
    """Serve a model; whatever ends the block, nothing of the server stays.

    Args:
        model: a folder or a repository.
        console: where to say what is done.
        options: more options of ``vllm serve``.
        port: where to listen; any free one, if None.
        patience: seconds to wait for it.

    Raises:
        ServerError: the port is taken, or the server did not start; says what the server last logged.
    """
    chosen = choose_port(port)
    if port is not None and chosen != port:
        raise ServerError(f"port {port} is in use: give another --port, or none to take any that is free.")
    folder = local_folder(model)
    address = ["--host", "127.0.0.1", "--port", str(chosen), "--served-model-name", NAME]
    command = [*vllm_command(), "serve", model if folder is None else str(folder), *address, *options]
    console.print(f"vllm {shlex.join(command[1:])}", style="dim", markup=False, highlight=False, soft_wrap=True)
    peak = Peak()
    chips = allowed_set() if peak.gpu is None else None  # see `Server`
    with (
        _own_log(user_cache() / "bench", label_of(model)) as log,
        _environment(on_cpu=chips is not None) as environment,
        Server(command, port=chosen, log=log, environment=environment, processors=chips) as server,
    ):
        start = time.monotonic()
        with _waiting(console, label_of(model)) as show:

            def watch(line: str) -> None:
                peak.sample(server.processes())
                show(line)

            server.wait_healthy(patience, watch)
        yield Served(server, time.monotonic() - start, peak)


@contextlib.contextmanager
def _own_log(folder: Path, label: str) -> Iterator[Path]:
    """A file for a server's log, which stays; a second server of that label at the same time gets a numbered one."""
    folder.mkdir(parents=True, exist_ok=True)
    name = os.fsdecode(os.fsencode(label.replace("/", "--"))[:200])
    for place in itertools.count(1):
        path = folder / (f"{name}.log" if place == 1 else f"{name}-{place}.log")
        with path.open("ab") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            yield path
            return


@contextlib.contextmanager
def _environment(on_cpu: bool) -> Iterator[dict[str, str]]:
    from vllm_exl3.tools import vllm_cpu

    environment = {**os.environ, "VLLM_NO_USAGE_STATS": "1"}
    if on_cpu:
        # Without it vLLM reserves nearly all memory of the machine, or refuses to start where others use some.
        environment.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")
    with tempfile.TemporaryDirectory() as folder:
        if vllm_cpu.needed():
            vllm_cpu.write_metadata(Path(folder))
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH")]))
        yield environment


@contextlib.contextmanager
def _waiting(console: Console, label: str) -> Iterator[Any]:
    start = said = time.monotonic()
    if console.is_terminal:
        with console.status(f"starting {label}") as status:
            yield lambda line: status.update(f"starting {label}: {time.monotonic() - start:.0f} s")
        return

    def show(line: str) -> None:
        nonlocal said
        if time.monotonic() - said >= 15:
            said = time.monotonic()
            console.out(f"starting {label}: {said - start:.0f} s", highlight=False)

    yield show
