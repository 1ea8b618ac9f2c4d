"""An engine ends when the process that started it is gone, as vLLM's workers do when their engine is.

vLLM 0.32's engine core does not notice that its API server was killed: it waits for requests for ever, and holds the
memory of its weights and cache; while both start, it waits five minutes.
"""

import logging
import multiprocessing
import os
import signal
import threading
import time

__all__ = ["end_with_parent"]

logger = logging.getLogger("vllm.exl3")

INTERVAL = 1.0
"""Seconds between two looks at the parent."""

GRACE = 20.0
"""Seconds that an engine has to end, after which it is killed."""


_watched: set[int] = set()


def end_with_parent(sender: int | None = None) -> None:
    """Watch the parent of an engine core's process. Idempotent; does nothing in processes of other kinds.

    Args:
        sender: the process that sent the arguments which this one unpickles now, if it does.
    """
    if not multiprocessing.current_process().name.startswith("EngineCore") or os.getpid() in _watched:
        return
    # Not set yet while a process unpickles its arguments, when its parent may be gone already: imports take seconds.
    parent = multiprocessing.parent_process()
    pid = parent.pid if parent is not None else sender
    if pid is None:
        return
    _watched.add(os.getpid())
    threading.Thread(target=_watch, args=(pid,), name="vllm-exl3-parent", daemon=True).start()


def _gone(parent: int) -> bool:
    """True where the process that started this one has ended; a fork server's processes have another parent."""
    starter = multiprocessing.parent_process()
    return os.getppid() != parent and not (starter is not None and starter.is_alive())


def _watch(parent: int) -> None:
    while not _gone(parent):
        time.sleep(INTERVAL)
    logger.error("vllm-exl3: the process that started this engine is gone; the engine ends")
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE)
    os.kill(os.getpid(), signal.SIGKILL)
