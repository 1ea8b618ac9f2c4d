"""Modules that want a dense ``weight`` where the pack stores a trellis: it is decoded while the model is loaded.

vLLM builds some modules without a quantization config (compressors, hyper-connections, parts of vision towers, plain
``torch.nn.Linear``), and some of its code reads a layer's ``weight`` itself. Once the model is built, every such module
is looked up in the pack by its path in the model; what is found takes its decoded weight under the name of a dense one,
so that the model class' own loader does with it whatever it does with any checkpoint. The report names each.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from vllm_exl3 import env
from vllm_exl3.ops.dense import decoded_weight
from vllm_exl3.pack.errors import Exl3PackError
from vllm_exl3.pack.parts import Part
from vllm_exl3.pack.stored import StoredLinear, pad_to_block
from vllm_exl3.pack.wording import byte_size
from vllm_exl3.serving.fused import padding_outputs
from vllm_exl3.serving.layout import Layout, Output, layer_outputs
from vllm_exl3.serving.loading import (
    SCALES_OF_SIGNS,
    check_loaded_marker,
    check_loaded_scales,
    check_shape,
    unpack_signs_like,
)

if TYPE_CHECKING:
    from vllm_exl3.serving.config import Exl3Config

__all__ = ["DecodedModules"]

_WANTED = {"trellis", "suh", "svh"}


def _is_plain(module: torch.nn.Module) -> bool:
    """Whether a module multiplies by a dense matrix of its own."""
    weight = module._parameters.get("weight")
    if weight is None or weight.dim() != 2 or isinstance(module, VocabParallelEmbedding):
        return False
    return isinstance(module, (LinearBase, torch.nn.Linear)) and "trellis" not in module._parameters


def _holds_nan(weight: torch.Tensor) -> bool:
    """True for a weight with storage whose dtype has NaN and more than a byte."""
    return weight.is_floating_point() and weight.element_size() > 1 and not weight.is_meta


@dataclass(frozen=True)
class _Target:
    """One stored module that a plain module takes: ``shape`` is (out, in) without padding."""

    part: Part
    shape: tuple[int, int]
    dtype: torch.dtype
    device: torch.device


class DecodedModules:
    """The plain modules of one built model that an EXL3 pack fills.

    Args:
        config: the model's quantization config; what is found here counts as claimed.
        model: the whole model, built and not loaded yet.

    Raises:
        Exl3PackError: they take more memory than ``VLLM_EXL3_DECODE_LIMIT``, or a stored size does not fit.
    """

    def __init__(self, config: "Exl3Config", model: torch.nn.Module) -> None:
        self._config = config
        self._targets: dict[str, _Target] = {}
        self._linears: dict[str, tuple[StoredLinear, _Target]] = {}
        self._modules: dict[str, torch.nn.Module] = {}
        self._pending: dict[str, dict[str, torch.Tensor]] = {}
        # A module may be known by several paths, of which one is the checkpoint's.
        for path, module in model.named_modules(remove_duplicate=False):
            if _is_plain(module) and all(module is not known for known in self._modules.values()):
                self._find(path, module)
        self._check_limit()
        for path, module in self._modules.items():
            config.report.add_decoded(path, module.weight.nbytes)

    def stream(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """The checkpoint's tensors, those of the modules here decoded to ``weight`` (and ``bias`` cut to its size)."""
        for name, tensor in weights:
            key, _, leaf = name.rpartition(".")
            if leaf == "bias" and key in self._targets:
                yield name, tensor[: self._targets[key].shape[0]]
            elif key in self._linears:
                if leaf != "weight":  # a dense copy beside the trellis is not what the pack's maker measured
                    yield from self._take(key, leaf, tensor)
            else:
                yield name, tensor

    def mark(self) -> None:
        """Spoil one value of every row, which `check_loaded` finds again where the model's loader left rows out."""
        for module in self._modules.values():
            if _holds_nan(module.weight):
                module.weight.data[: _filled_rows(module), 0] = torch.nan

    def check_loaded(self) -> None:
        """Refuse a model whose loader let a decoded weight fall by the wayside.

        Raises:
            Exl3PackError: naming the module.
        """
        for path, module in self._modules.items():
            weight = module._parameters.get("weight")
            if weight is None or weight.dim() != 2 or not _holds_nan(weight):
                continue
            if torch.isnan(weight[: _filled_rows(module), 0]).any():
                raise Exl3PackError(
                    found="rows that vLLM's loader wrote nothing into",
                    expected="the decoded weight of every stored part",
                    where=f"{path} in {self._config.source}",
                    remedy="vLLM's class for this model does not load this module from a checkpoint: use a pack that "
                    "keeps it in 16 bits, and report it with the output of `vllm-exl3 inspect`.",
                )

    def _find(self, path: str, module: torch.nn.Module) -> None:
        resolution = self._config.names().find(path)
        parts = resolution.parts if resolution is not None else ()
        linears = [linear for part in parts for linear in part.linears]
        if not linears or any(part.key in self._config.claimed for part in parts if part.linears):
            return
        sizes, inputs = _sizes(module)
        if len(parts) > len(sizes):
            raise Exl3PackError(
                found=f"{len(parts)} stored tensors ({', '.join(part.key for part in parts)}) for a matrix that vLLM "
                f"builds with {len(sizes)} outputs and fills in its own way",
                expected="a stored tensor for each output",
                where=f"{path} in {self._config.source}",
                remedy="Use a pack that keeps these modules in 16 bits.",
            )
        self._config.claimed.update(part.key for part in parts)
        self._config.claimed.update(linear.key for linear in linears)
        outputs = [Output(size, 0, size) for size in sizes]
        widths = Layout(path, tuple(parts), outputs, (0, inputs, inputs)).logical_width  # refuses what does not fit
        self._modules[path] = module
        for part, width in zip(parts, widths, strict=True):
            if part.linears:
                self._targets[part.key] = target = _target(part, (width, inputs), module.weight)
                _check_slices(target, str(self._config.source))
                self._linears |= {linear.key: (linear, target) for linear in part.linears}

    def _check_limit(self) -> None:
        limit = env.DECODE_LIMIT.get()
        total = sum(module.weight.nbytes for module in self._modules.values())
        if limit is not None and total > limit << 20:
            names = list(self._modules)
            more = f" and {len(names) - 4} more" if len(names) > 4 else ""
            raise Exl3PackError(
                found=f"{byte_size(total)} of weights on this rank to be decoded while loading "
                f"({', '.join(names[:4])}{more}), which vLLM serves without quantization only",
                expected=f"at most {limit} MiB, as {env.DECODE_LIMIT.name} says",
                where=str(self._config.source),
                remedy=f"Set {env.DECODE_LIMIT.name} higher, or use a pack that keeps these modules in 16 bits.",
            )

    def _take(self, key: str, leaf: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """Keep one tensor of a linear; once all of its module are there, give the module's weight."""
        linear, target = self._linears[key]
        leaf = SCALES_OF_SIGNS.get(leaf, leaf)
        if linear.marker is not None and leaf == linear.codebook.label:
            check_loaded_marker(linear.marker, tensor)
            return
        if leaf not in _WANTED:
            return
        check_shape(getattr(linear, leaf), tensor)
        # A copy, for some loaders lend one buffer for every tensor.
        self._pending.setdefault(key, {})[leaf] = tensor.detach().clone()
        keys = [linear.key for linear in target.part.linears]
        if all(self._pending.get(each, {}).keys() == _WANTED for each in keys):
            pieces = [self._decode(self._linears[each][0], target, self._pending.pop(each)) for each in keys]
            weight = (
                pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1 if target.part.slice_axis == "in" else 0)
            )
            yield f"{target.part.key}.weight", weight[: target.shape[0], : target.shape[1]]

    def _decode(self, linear: StoredLinear, target: _Target, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        for leaf in ("suh", "svh"):
            tensors[leaf] = unpack_signs_like(torch.empty(0, dtype=torch.float16), tensors[leaf])
            check_loaded_scales(getattr(linear, leaf), tensors[leaf])
        shape = (linear.out_features, linear.in_features)
        if tensors["trellis"].is_meta:  # only shapes flow in a part of vLLM's layerwise reload
            return torch.empty(shape, dtype=target.dtype, device="meta")
        device = target.device if target.device.type == "cuda" else tensors["trellis"].device
        moved = [tensors[leaf].to(device) for leaf in ("trellis", "suh", "svh")]
        return decoded_weight(*moved, linear.half_bits, int(linear.codebook), shape=shape, dtype=target.dtype)


def _target(part: Part, shape: tuple[int, int], weight: torch.Tensor) -> _Target:
    dtype = weight.dtype if weight.is_floating_point() else torch.float32
    return _Target(part, shape, dtype, weight.device)


def _check_slices(target: _Target, where: str) -> None:
    """Refuse slices with padding between them, whose channels nobody could tell from others.

    Raises:
        Exl3PackError: the slices are not as wide as the module together.
    """
    inputs = [linear.in_features for linear in target.part.linears]
    stored = sum(inputs) if target.part.slice_axis == "in" else inputs[0]
    if stored != pad_to_block(target.shape[1]):
        raise Exl3PackError(
            found=f"{stored} input channels in {len(inputs)} tensors",
            expected=f"{pad_to_block(target.shape[1])}: the module's {target.shape[1]}, padded",
            where=f"{target.part.key} in {where}",
            remedy="The pack does not belong to this config.json, or stores slices in a way that this version does "
            "not know: report it with the output of `vllm-exl3 inspect`.",
        )


def _filled_rows(module: torch.nn.Module) -> int:
    """Rows of a module's weight on this rank that the checkpoint fills; others are there to align."""
    if padding := padding_outputs(module):
        return int(sum(module.output_partition_sizes[:-padding]))
    return int(module.weight.shape[0])


def _sizes(module: torch.nn.Module) -> tuple[list[int], int]:
    """Output channels of each of a module's outputs, and its input channels, over all ranks."""
    if isinstance(module, LinearBase):
        sizes = getattr(module, "output_partition_sizes", None) or [module.output_size]
        totals = [output.total for output in layer_outputs(module, sizes, module.output_size)]
        return totals[: len(totals) - padding_outputs(module)], module.input_size
    return [module.out_features], module.in_features
