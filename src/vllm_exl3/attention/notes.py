"""Saying once a process what every layer, or every batch, would say again."""

import functools
import logging

__all__ = ["note_once", "say_once"]

_logger = logging.getLogger("vllm.exl3")


@functools.cache
def say_once(text: str) -> None:
    """A warning."""
    _logger.warning("vllm-exl3: %s", text)


@functools.cache
def note_once(text: str) -> None:
    """Something that is as it should be."""
    _logger.info("vllm-exl3: %s", text)
