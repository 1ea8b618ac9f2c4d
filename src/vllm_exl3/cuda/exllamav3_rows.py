"""exllamav3's own decoder of n-gram rows as a backend of the n-gram op, where that package is installed.

Its extension function is called directly: the class around it reads tables by itself. It writes float16.
"""

from typing import Any

import torch

from vllm_exl3.cuda import exllamav3
from vllm_exl3.ops.ngram import NgramTable
from vllm_exl3.ops.rings import ring_bits
from vllm_exl3.pack.assemble import RING_NGRAM

__all__ = ["ngram", "unavailable"]


def unavailable() -> str | None:
    """Why exllamav3 cannot decode rows in this process, or None."""
    reason = exllamav3.unavailable()
    if reason is None and not hasattr(_extension(), "ngram_dequant"):
        return "exllamav3's extension has no ngram_dequant"
    return reason


def ngram(
    ids: torch.Tensor, index: torch.Tensor | None, rows: torch.Tensor, table: NgramTable, out: torch.Tensor
) -> None:
    """The n-gram op by exllamav3; arguments as `vllm_exl3.ops.ngram.ngram_rows`, rows on the device only.

    Raises:
        ValueError: the rows are in host memory.
    """
    if rows.device != ids.device:
        raise ValueError(
            f"rows: found on {rows.device}, expected on {ids.device}: exllamav3's kernel gathers nothing itself. "
            "Set VLLM_EXL3_NGRAM_TABLE to resident or disk, or VLLM_EXL3_NGRAM_KERNEL to native."
        )
    flat = ids.reshape(-1)
    packed = rows.index_select(0, flat if index is None else index.reshape(-1))
    heads = (torch.searchsorted(table.offsets, flat + table.first_row, right=True) - 1).int()
    halves = torch.empty((len(flat), RING_NGRAM), dtype=torch.float16, device=ids.device)
    _extension().ngram_dequant(packed, ring_bits(rows.shape[1], RING_NGRAM), heads, table.bias, halves, False)
    out.view(-1, RING_NGRAM).copy_(halves)


def _extension() -> Any:
    from exllamav3.ext import exllamav3_ext

    return exllamav3_ext
