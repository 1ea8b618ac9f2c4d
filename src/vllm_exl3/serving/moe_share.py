"""A layer whose experts are divided between the GPU and the CPU: each computes its own, and the two sums are added.

For few tokens only. For more, the GPU reads the trellises in host memory (`moe_host`): every weight is read once for
all of them, and the CPU would have to multiply for each.
"""

from typing import TYPE_CHECKING

import torch

from vllm_exl3.ops import backends
from vllm_exl3.ops.moe import MoECall, moe_reference
from vllm_exl3.serving.moe_host import HostExperts
from vllm_exl3.serving.moe_layout import ExpertLayout

if TYPE_CHECKING:
    from vllm_exl3.cuda.share import CpuShare, SideStream

__all__ = ["DividedExperts"]


class DividedExperts:
    """What the CPU needs of one layer.

    Args:
        layout: of the layer; some of its experts are in host memory.
        host: their trellises.

    Attributes:
        scales: copies of the layer's scales and biases, by parameter; the CPU reads no parameter on the GPU.
    """

    def __init__(self, layout: ExpertLayout, host: HostExperts) -> None:
        self._layout, self._host = layout, host
        self.scales: dict[str, torch.Tensor] = {}
        self._table = torch.empty(0, device="cpu")
        self._share: CpuShare | None = None
        self._map: torch.Tensor | None = None

    def load(self, layer: torch.nn.Module, table: torch.Tensor) -> None:
        """Take over scales, biases and the table once they are loaded; in place if they were before.

        Args:
            layer: with parameters ``w13_*`` and ``w2_*``.
            table: int64 ``[experts, projections, 8]`` on the CPU, with offsets in host memory for the CPU's experts.
        """
        for name in ("w13_suh", "w13_svh", "w13_bias", "w2_suh", "w2_svh", "w2_bias"):
            values = getattr(layer, name, None)
            if values is None:
                continue
            if name not in self.scales:
                self.scales[name] = torch.empty(values.shape, dtype=values.dtype, device="cpu")
            self.scales[name].copy_(values.data)
        own = table[list(self._layout.in_host)].contiguous()
        self._table = own if self._share is None else self._table.copy_(own)

    def prepare(self, side: "SideStream", call: MoECall, device: torch.device) -> None:
        """Make what calls need; the first time only, and before any is captured.

        Args:
            side: the stream of the CPU's work.
            call: the op's arguments.
            device: the GPU.
        """
        if self._share is None:
            from vllm_exl3.cuda.share import CpuShare

            self._map = self._gpu_map().to(device)
            self._share = CpuShare(side, self._cpu_call(call), self._numbers())

    def __call__(self, x: torch.Tensor, call: MoECall, layer_class: str) -> torch.Tensor:
        """The layer's output, in the dtype of ``x``; the sums of both are added in float32.

        Args:
            x: ``[M, hidden]``, as many tokens as the side stream takes at most.
            call: the op's other arguments.
            layer_class: what calls are counted under.
        """
        from vllm_exl3.cuda import runtime

        assert self._share is not None  # `prepare` has made it
        stream = runtime.current_stream(x.device.index)
        backends.count_call("moe", "cpu_share", layer_class)
        result = self._share.enqueue(x, call.topk_weights, call.topk_ids, stream)
        if len(self._layout.in_host) < len(self._layout.local):
            backend = backends.select("moe", "cuda", moe_reference).backend
            backends.count_call("moe", backend.name, layer_class)
            own = backend.function(x, *call._replace(expert_map=self._map), out_dtype=torch.float32)
            self._share.join(stream)
            result = own.add_(result)
        else:
            self._share.join(stream)
        return result.to(x.dtype)

    def _cpu_call(self, call: MoECall) -> MoECall:
        scales, words = self.scales, self._host.words
        return call._replace(
            w13_trellis=words["w13"],
            w13_suh=scales["w13_suh"],
            w13_svh=scales["w13_svh"],
            w13_bias=scales.get("w13_bias"),
            w2_trellis=words["w2"],
            w2_suh=scales["w2_suh"],
            w2_svh=scales["w2_svh"],
            w2_bias=scales.get("w2_bias"),
            table=self._table,
        )

    def _numbers(self) -> torch.Tensor:
        """int32 on the CPU: for each expert of the model its row in the CPU's table, or -1."""
        layout = self._layout
        numbers = torch.full((layout.total,), -1, dtype=torch.int32, device="cpu")
        for row, local in enumerate(layout.in_host):
            numbers[layout.local[local]] = row
        return numbers

    def _gpu_map(self) -> torch.Tensor:
        """int32 on the CPU: for each expert of the model its number on this rank, or -1 where the CPU computes it."""
        layout = self._layout
        numbers = torch.full((layout.total,), -1, dtype=torch.int32, device="cpu")
        for local, expert in enumerate(layout.local):
            numbers[expert] = -1 if local in layout.in_host else local
        return numbers
