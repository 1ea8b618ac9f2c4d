"""Parameters, and checks on tensors while they are loaded: the right ones, all of them, with usable values."""

from collections.abc import Callable, Iterator

import torch
from torch.nn import Parameter
from vllm.config import VllmConfig
from vllm.model_executor.utils import set_weight_attrs

from vllm_exl3.pack.errors import Exl3PackError
from vllm_exl3.pack.parts import Part
from vllm_exl3.pack.stored import StoredTensor
from vllm_exl3.pack.values import check_marker, check_scales

__all__ = [
    "SCALES_OF_SIGNS",
    "LoadedParts",
    "check_load_format",
    "check_loaded_marker",
    "check_loaded_scales",
    "check_overwritten",
    "check_shape",
    "register_parameter",
    "unpack_signs_like",
]

SCALES_OF_SIGNS = {"su": "suh", "sv": "svh"}
"""Names of packed signs to those of the scales that they stand for."""


def register_parameter(
    layer: torch.nn.Module, name: str, data: torch.Tensor, loader: Callable[..., bool | None]
) -> None:
    """Give a layer a parameter that is not trained and that ``loader(param, loaded_weight, ...)`` fills."""
    param = Parameter(data, requires_grad=False)
    set_weight_attrs(param, {"weight_loader": loader})
    layer.register_parameter(name, param)


def check_load_format(config: VllmConfig | None, where: str) -> None:
    """Refuse a loader that would change tensors of integers, or let no layer look at what it got.

    Raises:
        Exl3PackError: it is tensorizer's.
    """
    if config is not None and config.load_config.load_format == "tensorizer":
        raise Exl3PackError(
            found="--load-format tensorizer",
            expected="a loader that keeps trellises as the integers that they are, and has layers check what came: "
            "vLLM's for tensorizer turns every tensor into the model's dtype, and checks none",
            where=where,
            remedy="Serve the pack itself: --load-format auto, fastsafetensors, instanttensor or runai_streamer.",
        )


class LoadedParts:
    """Which tensors of one layer its loaders have seen.

    Loaders that bypass ours (dummy weights, sharded state) leave it empty, which is no fault.

    Args:
        where: the layer's name, for errors.
    """

    def __init__(self, where: str) -> None:
        self._where = where
        self._seen: set[tuple[str, int]] = set()

    def add(self, leaf: str, part: int) -> None:
        """Note a tensor; noting it twice, as layerwise reloading does, changes nothing."""
        self._seen.add((leaf, part))

    def check(self, parts: tuple[Part, ...], *, bias: bool = False) -> None:
        """Refuse a layer of which some tensors came and others did not.

        Args:
            parts: the layer's stored tensors.
            bias: whether the model gives the layer a bias.

        Raises:
            Exl3PackError: naming the missing tensors.
        """
        wanted = {(leaf, index) for index, part in enumerate(parts) for leaf in _leaves(part, bias)}
        if self._seen and (missing := wanted - self._seen):
            names = ", ".join(sorted(f"{parts[index].key}.{leaf}" for leaf, index in missing))
            raise Exl3PackError(
                found=f"no data for {names}",
                expected="every tensor that the pack's headers list"
                + (", and a bias, which config.json gives to this layer" if bias else ""),
                where=self._where,
                remedy="A shard was skipped while loading: compare model.safetensors.index.json with the files "
                "(vllm-exl3 inspect lists the differences).",
            )
        self._seen.clear()


def _leaves(part: Part, bias: bool) -> Iterator[str]:
    """The tensors that fill one part of a layer; a marker among them, for without it another codebook is decoded."""
    yield from ("trellis", "suh", "svh") if part.linear is not None else ("weight",)
    if part.linear is not None and part.linear.marker is not None:
        yield part.linear.codebook.label
    if bias:
        yield "bias"


def check_shape(stored: StoredTensor, loaded: torch.Tensor) -> None:
    """Refuse a tensor that is not the one whose header was read.

    Raises:
        Exl3PackError: the shapes differ.
    """
    if tuple(loaded.shape) != stored.shape:
        raise Exl3PackError(
            found=f"shape {list(loaded.shape)}",
            expected=f"{list(stored.shape)}, as its header said when the pack was opened",
            where=f"{stored.file}, {stored.name}",
            remedy="The pack changed since, or another revision was downloaded; start again, with --revision. If "
            "neither is so, vLLM's class cuts or fills up this tensor while loading, which it cannot do to a trellis: "
            "use a pack that keeps this layer in 16 bits.",
        )


def check_loaded_scales(stored: StoredTensor, values: torch.Tensor) -> None:
    """Refuse a loaded scale that would silently turn a layer into noise or nothing.

    Raises:
        Exl3PackError: a value is NaN or infinite, or all are zero.
    """
    if not values.is_meta:  # vLLM's layerwise reload calls loaders on shapes first
        check_scales(stored.name, values.cpu().numpy(), file=stored.file)


def check_loaded_marker(stored: StoredTensor, value: torch.Tensor) -> None:
    """Refuse a marker of another value than its codebook's.

    Headers cannot show values, and from the Hub `vllm_exl3.pack.check` reads only some. A marker that a loader
    delivers on a device is not waited for.

    Raises:
        Exl3PackError: the value is wrong.
    """
    if value.device.type == "cpu":
        check_marker(stored.name, int(value), file=stored.file)


def check_overwritten(where: str, **scales: torch.Tensor) -> None:
    """Refuse a layer whose scales are still the NaN they were created with.

    Raises:
        Exl3PackError: some scale was never written.
    """
    for name, values in scales.items():
        if torch.isnan(values).any():
            raise Exl3PackError(
                found=f"a {name} that no tensor was loaded into",
                expected="every tensor of the layer in the files that were loaded",
                where=where,
                remedy="Compare model.safetensors.index.json with the files (vllm-exl3 inspect lists differences).",
            )


def unpack_signs_like(param: torch.Tensor, loaded: torch.Tensor) -> torch.Tensor:
    """Scales as float16: those of packs up to exllamav3 0.0.2 are bits, 1 for −1, lowest bit first."""
    if loaded.dtype.is_floating_point:
        return loaded
    bits = (loaded.to(torch.int32).unsqueeze(-1) >> torch.arange(16, device=loaded.device)) & 1
    return (1 - 2 * bits).flatten().to(param.dtype)
