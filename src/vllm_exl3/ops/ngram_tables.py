"""Where the rows of an n-gram table lie while they are served: in memory, or in the pack's files."""

import weakref

import torch

from vllm_exl3.ops.ngram import NgramTable, ngram_rows
from vllm_exl3.pack.ngram_rows import NgramRows

__all__ = ["DiskTable", "MemoryTable", "PinnedRows", "fill"]

_REGISTER_FLAGS = 3
"""cudaHostRegisterPortable | cudaHostRegisterMapped."""


class MemoryTable(NgramTable):
    """Rows on the device, or in host memory that it reads.

    Args:
        rows: int16 ``[n, words]``.
        bias: as `NgramTable`.
        offsets: as `NgramTable`.
        first_row: as `NgramTable`.
    """

    def __init__(self, rows: torch.Tensor, bias: torch.Tensor, offsets: torch.Tensor, first_row: int) -> None:
        super().__init__(bias, offsets, first_row)
        self.rows = rows

    def __call__(self, ids: torch.Tensor, out: torch.Tensor) -> None:
        """Decode rows ``ids`` into ``out`` ``[*ids.shape, 160]``."""
        ngram_rows(ids, None, self.rows, self, out)


class DiskTable(NgramTable):
    """Rows in the pack's files: each distinct one is read once a look-up, and sent to the device as stored.

    Waits for the ids to arrive on the host, so it cannot run inside a CUDA graph.

    Args:
        reader: the files.
        bias: as `NgramTable`.
        offsets: as `NgramTable`.
        first_row: as `NgramTable`.
    """

    def __init__(self, reader: NgramRows, bias: torch.Tensor, offsets: torch.Tensor, first_row: int) -> None:
        super().__init__(bias, offsets, first_row)
        self.reader = reader

    def __call__(self, ids: torch.Tensor, out: torch.Tensor) -> None:
        """Read and decode rows ``ids`` into ``out`` ``[*ids.shape, 160]``.

        Raises:
            RuntimeError: the device is capturing a CUDA graph.
        """
        on_gpu = ids.device.type == "cuda"
        if on_gpu and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "An n-gram table on disk was looked up inside a CUDA graph, which cannot read files. "
                'Use --compilation-config \'{"cudagraph_mode": "NONE"}\' or VLLM_EXL3_NGRAM_TABLE=pinned.'
            )
        distinct, index = torch.unique(ids.reshape(-1).cpu(), return_inverse=True)
        rows = torch.from_numpy(self.reader.gather((distinct + self.first_row).numpy()))
        if on_gpu:
            # Pinned, so that both copies are ordered on the stream and nothing waits for them here.
            rows = rows.pin_memory().to(ids.device, non_blocking=True)
            index = index.pin_memory().to(ids.device, non_blocking=True)
        ngram_rows(ids, index.view(ids.shape), rows, self, out)


class PinnedRows:
    """Host memory of exactly the table's size that the GPU reads where it lies.

    torch's own pinned memory comes in powers of two: 39 GB would take 64 GiB.

    Args:
        rows: how many.
        words: 16-bit words of each.

    Attributes:
        tensor: int16 ``[rows, words]``, which must not outlive this object.
    """

    def __init__(self, rows: int, words: int) -> None:
        self.tensor = torch.empty((rows, words), dtype=torch.int16, device="cpu")
        if torch.cuda.is_available():
            runtime = torch.cuda.cudart()
            status = runtime.cudaHostRegister(self.tensor.data_ptr(), self.tensor.nbytes, _REGISTER_FLAGS)
            if int(status) != 0:
                raise RuntimeError(
                    f"{self.tensor.nbytes / 2**30:.1f} GiB of host memory for the n-gram table could not be pinned "
                    f"({status}). Free memory or raise the container's limit, or set VLLM_EXL3_NGRAM_TABLE=disk."
                )
            # Before the memory goes: a page that stays registered cannot be registered again.
            weakref.finalize(self, runtime.cudaHostUnregister, self.tensor.data_ptr())


def fill(target: torch.Tensor, reader: NgramRows, first_row: int) -> None:
    """Copy rows from the files into memory, a bounded number at a time.

    Args:
        target: int16 ``[n, words]``, on any device.
        reader: the files.
        first_row: which of the table's rows comes first; rows beyond the table are left as they are.
    """
    last = min(first_row + target.shape[0], reader.rows)
    for row, part in reader.chunks(first_row, last):
        at = row - first_row
        target[at : at + len(part)].copy_(torch.from_numpy(part.copy()))
