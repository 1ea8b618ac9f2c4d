"""The doctor's check of embeddings and n-gram rows: every kernel against the PyTorch reference, bit for bit."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

__all__ = ["compare_rows"]

_ROWS = 64
_WIDTHS = (576, 127)
"""One that kernels read eight columns at a time, and one that they cannot."""


def compare_rows(device: "torch.device") -> str:
    """Compare the native kernels of a device with the reference on the CPU.

    Raises:
        RuntimeError: a kernel gives other bits, naming the kind of table.
    """
    import torch

    from vllm_exl3.ops import backends
    from vllm_exl3.ops.embedding import embedding_reference
    from vllm_exl3.ops.ngram import NgramTable, ngram_reference

    native = {}
    for op, reference in (("embedding", embedding_reference), ("ngram", ngram_reference)):
        backends.select(op, device.type, reference)  # registers what there is for this device
        found = backends.find(op, device.type, "native")
        if found is None or (reason := found.unavailable()) is not None:
            raise RuntimeError(f"no native kernels for {op}" + (f": {reason}" if found is not None else ""))
        native[op] = found.function
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, _ROWS, (3, 7), generator=generator)
    for name, table, scales, width in _tables(generator):
        ours = native["embedding"](ids.to(device), table.to(device), scales.to(device), width, torch.float32)
        if not torch.equal(ours.cpu(), embedding_reference(ids, table, scales, width, torch.float32)):
            raise RuntimeError(f"{name}, {width} columns: other bits than the reference")
    for bits in range(1, 9):
        rows = _rings(generator, 1, 160, bits)
        bias = torch.rand((2, 160), generator=generator).half()
        host = NgramTable(bias, torch.tensor([0, 40]), 0)
        there = NgramTable(bias.to(device), host.offsets.to(device), 0)
        ours, theirs = torch.empty((*ids.shape, 160), device=device), torch.empty((*ids.shape, 160))
        native["ngram"](ids.to(device), None, rows.to(device), there, ours)
        ngram_reference(ids, None, rows, host, theirs)
        if not torch.equal(ours.cpu(), theirs):
            raise RuntimeError(f"n-gram rows, K = {bits}: other bits than the reference")
    return "int8, int4, row codes and n-gram rows of K = 1 to 8, bit for bit"


def _tables(generator: "torch.Generator") -> Any:
    import torch

    for width in _WIDTHS:
        for name, low, high, columns, groups, dtype in (
            ("int8", -127, 128, width, 1, torch.int8),
            ("int4", 0, 256, -(-width // 2), -(-width // 128), torch.uint8),
        ):
            codes = torch.randint(low, high, (_ROWS, columns), generator=generator, dtype=dtype)
            yield name, codes, torch.rand((_ROWS, groups), generator=generator), width
        groups = -(-width // 256)
        signs = torch.randint(0, 2, (groups, 256), generator=generator).half() * 2 - 1
        for bits in range(1, 9):
            yield f"row code, K = {bits}", _rings(generator, groups, 256, bits), signs, width


def _rings(generator: "torch.Generator", groups: int, width: int, bits: int) -> "torch.Tensor":
    import torch

    rings = torch.randint(
        -(2**15), 2**15, (_ROWS, groups, 1 + width * bits // 16), generator=generator, dtype=torch.int16
    )
    rings[..., 0] = (torch.rand((_ROWS, groups), generator=generator) + 0.1).half().view(torch.int16)
    return rings.view(_ROWS, -1)
