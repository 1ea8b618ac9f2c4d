"""Host memory of exactly the size that is asked for, which a GPU reads where it lies.

torch's own pinned memory comes in powers of two: 39 GB would take 64 GiB.
"""

import contextlib
import mmap
import weakref

import torch

from vllm_exl3.pack.errors import Exl3PackError
from vllm_exl3.pack.wording import byte_size

__all__ = ["PinnedWords"]

_REGISTER_FLAGS = 3
"""cudaHostRegisterPortable | cudaHostRegisterMapped."""


class PinnedWords:
    """Zeroed 16-bit words in whole pages, pinned and mapped where there is a GPU.

    Args:
        words: how many; at least one.
        what: contents, for the error.
        remedy: what to do if there is too little memory.

    Attributes:
        words: int16 ``[words]`` on the CPU, which must not outlive this object.

    Raises:
        Exl3PackError: the memory cannot be had or pinned.
    """

    def __init__(self, words: int, what: str, remedy: str) -> None:
        nbytes = 2 * words

        def refusal(reason: object) -> Exl3PackError:
            return Exl3PackError(
                found=f"no {byte_size(nbytes)} of host memory that could be pinned ({reason})",
                expected=f"as much for {what}",
                where="host memory",
                remedy=remedy,
            )

        try:
            memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, ValueError) as error:
            raise refusal(error) from None
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a kernel without them
                memory.madvise(mmap.MADV_HUGEPAGE)  # fewer pages to pin, and to translate when CPUs read
        # The tensor keeps the mapping alive.
        self.words = torch.frombuffer(memory, dtype=torch.int16, count=words)
        self._runtime = torch.cuda.cudart() if torch.cuda.is_available() else None
        if self._runtime is not None:
            status = self._runtime.cudaHostRegister(self.words.data_ptr(), nbytes, _REGISTER_FLAGS)
            if int(status) != 0:
                raise refusal(status)
            # Before the memory goes: a page that stays registered cannot be registered again.
            weakref.finalize(self, self._runtime.cudaHostUnregister, self.words.data_ptr())

    @property
    def device_address(self) -> int:
        """The words' address as the current GPU's kernels read them; without a GPU, that of the CPU."""
        if self._runtime is None:
            return self.words.data_ptr()
        from vllm_exl3.cuda.driver import mapped_address

        return mapped_address(self.words.data_ptr())
