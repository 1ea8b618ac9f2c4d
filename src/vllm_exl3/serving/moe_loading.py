"""What fills the flat parameters of a MoE layer's experts: this rank's share of every stored tensor, in its place."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch.nn import Parameter

from vllm_exl3.pack.stored import TILE, StoredLinear
from vllm_exl3.serving.loading import check_loaded_marker, check_shape, unpack_signs_like
from vllm_exl3.serving.moe_checks import LoadedExperts
from vllm_exl3.serving.moe_layout import STAND_IN_WORDS, ExpertLayout, ExpertSlot

__all__ = ["ExpertLoaders"]


class ExpertLoaders:
    """The loaders of one layer's parameters.

    Args:
        layout: where everything lies on this rank.
        local: of every expert of the model, its number on this rank, or a negative one.
        adds_bias: whether this rank adds down's bias: the tensor-parallel ranks' results are added up, so one does.
        trellis_arrived: told of every trellis, those of other ranks' experts too.
        host: flat words in host memory for ``w13`` and ``w2``, where some experts' trellises lie there.

    Attributes:
        loaded: what was loaded.
    """

    def __init__(
        self,
        layout: ExpertLayout,
        local: Sequence[int],
        *,
        adds_bias: bool,
        trellis_arrived: Callable[[torch.Tensor], None],
        host: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        self.loaded = LoadedExperts(layout)
        self._layout = layout
        self._local = local
        self._adds_bias = adds_bias
        self._trellis_arrived = trellis_arrived
        self._host = host or {}

    def loader(self, leaf: str) -> Callable[..., bool | None]:
        """The ``weight_loader`` of ``w13_<leaf>`` and ``w2_<leaf>``: trellis, suh, svh, bias, or marker."""

        # vLLM binds this signature by its names, and its layerwise reload tells loaders apart by theirs.
        def load(
            param: Parameter,
            loaded_weight: torch.Tensor,
            weight_name: str,
            shard_id: str,
            expert_id: int,
            return_success: bool = False,
        ) -> bool | None:
            here = self._load(leaf, param, loaded_weight, shard_id, expert_id)
            return here if return_success else None

        load.__name__ = f"load_{leaf}"
        return load

    def _load(self, leaf: str, param: Parameter, loaded: torch.Tensor, shard_id: str, expert_id: int) -> bool:
        """Load a stored tensor after checking that it is the one whose header was read; False for foreign experts."""
        if leaf == "trellis":
            self._trellis_arrived(loaded)
        local = self._local[expert_id]
        if local < 0:
            return False
        down, index = shard_id == "w2", self._projection(shard_id)
        slot = self._layout.slots[local][index]
        if leaf == "marker":
            self._copy_marker(param, loaded, slot.linear, down)
            return True
        check_shape(getattr(slot.linear, leaf), loaded)
        self.loaded.add(leaf, local, index)
        if leaf == "bias":
            self._copy_bias(param, loaded, slot, down)
        elif leaf == "trellis":
            _copy_trellis(param, loaded, slot, self._host.get("w2" if down else "w13"))
        else:
            _COPIES[leaf](param, loaded, slot)
        return True

    def _projection(self, shard_id: str) -> int:
        """Index of a projection among an expert's, from the shard id that vLLM's loader passes."""
        roles = self._layout.roles
        if shard_id == "w2":
            return len(roles) - 1
        # vLLM hands the only first projection of un-gated experts over as w1
        return 1 if shard_id == "w3" and "gate" in roles else 0

    def _copy_bias(self, param: Parameter, loaded: torch.Tensor, slot: ExpertSlot, down: bool) -> None:
        """This rank's range of a stored bias ``[out]``, without its padding."""
        start, at = slot.columns[0], slot.projection.bias
        size = self._layout.hidden if down else self._layout.intermediate
        target = param.data[at : at + size]
        target.copy_(loaded[start : start + size] if self._adds_bias or not down else torch.zeros_like(target))

    def _copy_marker(self, param: Parameter, loaded: torch.Tensor, linear: StoredLinear, down: bool) -> None:
        """A codebook's marker, whose value is checked."""
        if linear.marker is not None:
            check_loaded_marker(linear.marker, loaded)
            places = self._layout.markers["w2" if down else "w13"][linear.codebook]
            param.data[places[linear.marker.name]].copy_(loaded.reshape(()))


def _copy_trellis(param: Parameter, loaded: torch.Tensor, slot: ExpertSlot, host: torch.Tensor | None) -> None:
    """This rank's blocks of a stored trellis ``[in/16, out/16, 16·K]``."""
    (row, rows), (column, columns), at = slot.rows, slot.columns, slot.projection
    part = loaded[row // TILE : (row + rows) // TILE, column // TILE : (column + columns) // TILE]
    flat = param.data
    if slot.stand_in >= 0:
        # vLLM's layerwise reload first calls loaders with parameters on the meta device, to count what they copy.
        param.data[slot.stand_in : slot.stand_in + STAND_IN_WORDS].copy_(part[0, 0, :STAND_IN_WORDS])
        if param.is_meta:
            return
        assert host is not None  # made together with the layout
        flat = host
    flat[at.trellis : at.trellis + at.trellis_words].view(at.trellis_shape).copy_(part)


def _copy_suh(param: Parameter, loaded: torch.Tensor, slot: ExpertSlot) -> None:
    """This rank's range of stored input scales ``[in]``."""
    (start, size), at = slot.rows, slot.projection.suh
    param.data[at : at + size].copy_(unpack_signs_like(param, loaded)[start : start + size])


def _copy_svh(param: Parameter, loaded: torch.Tensor, slot: ExpertSlot) -> None:
    """This rank's range of stored output scales ``[out]``."""
    (start, size), at = slot.columns, slot.projection.svh
    param.data[at : at + size].copy_(unpack_signs_like(param, loaded)[start : start + size])


_COPIES = {"suh": _copy_suh, "svh": _copy_svh}
