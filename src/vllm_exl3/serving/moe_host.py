"""The trellises of a layer's experts that lie in host memory, and how kernels find them.

They are no parameters: vLLM would count them to the GPU's memory, move them to the device, and forget them at sleep.
"""

import torch

from vllm_exl3.ops.experts import shift_trellises
from vllm_exl3.ops.pinned import PinnedWords
from vllm_exl3.serving.moe_layout import ExpertLayout

__all__ = ["HostExperts"]

_REMEDY = (
    "Keep more experts on the GPU (VLLM_EXL3_EXPERTS_GPU_GIB), free host memory, or raise the container's limit of it."
)


class HostExperts:
    """Host memory of one layer.

    Args:
        layout: of the layer; some of its experts are in host memory.

    Attributes:
        words: flat int16 words by parameter name, ``w13`` and ``w2``, as the layout's offsets count.

    Raises:
        Exl3PackError: there is too little memory.
    """

    def __init__(self, layout: ExpertLayout) -> None:
        what = f"{len(layout.in_host)} routed experts of {layout.where}"
        self._memory = {name: PinnedWords(layout.sizes[name].host, what, _REMEDY) for name in ("w13", "w2")}
        self.words = {name: memory.words for name, memory in self._memory.items()}
        self._experts, self._where = layout.in_host, layout.where
        self._bases: dict[torch.device, tuple[int, int]] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of the trellises."""
        return sum(words.nbytes for words in self.words.values())

    def check_bases(self, layer: torch.nn.Module, device: torch.device) -> None:
        """Note where a layer's parameters are, from which kernels on a device count; they must stay there.

        Raises:
            RuntimeError: they have moved.
        """
        bases = (layer.w13_trellis.data_ptr(), layer.w2_trellis.data_ptr())
        if self._bases.setdefault(device, bases) != bases:
            raise RuntimeError(
                f"{self._where}: found parameters that have moved, expected them to stay, since kernels find experts "
                "in host memory from there. Report what moves them, and serve with VLLM_EXL3_EXPERTS=gpu."
            )

    def placed(self, table: torch.Tensor, device: torch.device) -> torch.Tensor:
        """The layer's table with offsets of these experts counted from the parameters.

        Args:
            table: int64 ``[experts, projections, 8]`` on the CPU, with offsets in `words`.
            device: whose kernels read it; `check_bases` has seen it.
        """
        first, down = (
            (memory.device_address - base) // 2
            for memory, base in zip(self._memory.values(), self._bases[device], strict=True)
        )
        return shift_trellises(table, self._experts, first, down)
