"""An engine ends when the process that started it is gone, as vLLM's workers do when their engine is.

vLLM 0.32's engine core does not notice that its API server was killed: it waits for requests for ever, and holds the
memory of its weights and cache.
"""

import logging
import multiprocessing
import os
import signal
import threading
import time
from multiprocessing.connection import wait

__all__ = ["end_with_parent"]

logger = logging.getLogger("vllm.exl3")

GRACE = 20.0
"""Seconds that an engine has to end, after which it is killed."""


def end_with_parent() -> None:
    """Watch the parent of an engine core's process. Does nothing in processes of other kinds."""
    parent = multiprocessing.parent_process()
    if parent is None or not multiprocessing.current_process().name.startswith("EngineCore"):
        return
    threading.Thread(target=_watch, args=(parent.sentinel,), name="vllm-exl3-parent", daemon=True).start()


def _watch(sentinel: int) -> None:
    wait([sentinel])
    logger.error("vllm-exl3: the process that started this engine is gone; the engine ends")
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE)
    os.kill(os.getpid(), signal.SIGKILL)
