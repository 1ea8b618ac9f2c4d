"""What an EXL3 pack declares about its layers that are not EXL3.

Some packs quantize only the routed experts and keep the rest as the source model had it, often fp8.
``non_routed_quantization`` then names vLLM's own configuration for the rest. Which layers are EXL3 is
never read from here: tensor headers say that.
"""

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, get_args

import torch
from vllm.config import get_current_vllm_config_or_none
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization import QuantizationMethods, get_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase
from vllm.model_executor.models.utils import WeightsMapper

from vllm_exl3.pack import Pack
from vllm_exl3.pack.errors import Exl3PackError
from vllm_exl3.pack.skip import main_layers
from vllm_exl3.pack.stored import StoredTensor
from vllm_exl3.serving.listed import is_listed

__all__ = ["SourceFormat", "plain_experts", "says_plain"]

logger = logging.getLogger("vllm.exl3")

_FLOATS = ("F16", "BF16", "F32")

_AS_STORED = "bf16_as_stored"
_DEEPSEEK_V4 = "deepseek_v4_fp8"
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_DRAFT_LAYER = re.compile(r"^(?:model\.)?mtp\.layers\.(\d+)\.")


class SourceFormat:
    """Methods for the layers that a pack keeps in its source model's format.

    Args:
        raw: the pack's ``quantization_config``.
        where: the pack, for errors.

    Raises:
        Exl3PackError: a key holds a value that has no meaning.
    """

    def __init__(self, raw: Mapping[str, Any], where: str) -> None:
        self._where = where
        self._spec = raw.get("non_routed_quantization") or None
        if self._spec is not None and not isinstance(self._spec, Mapping):
            raise self._fault(f"non_routed_quantization {self._spec!r}", "the source model's quantization_config")
        if self._name() == "exl3":
            raise self._fault(
                "non_routed_quantization with quant_method exl3",
                "the source model's format; which layers are EXL3, their tensors say",
                "Remove non_routed_quantization from config.json.",
            )
        self._policy = self._choice(raw, "non_routed_dtype_policy", "", _AS_STORED)
        self._draft_experts = self._choice(raw, "mtp_experts", "exl3", "source")
        self._draft_start = raw.get("mtp_experts_start_layer")
        if self._draft_start is not None and (type(self._draft_start) is not int or self._draft_start < 0):
            raise self._fault(f"mtp_experts_start_layer {self._draft_start!r}", "the number of a layer")
        self._delegate: QuantizationConfig | None = None
        self._built: list[tuple[torch.nn.Module, str, tuple[str, ...]]] = []
        self._unlisted: list[str] = []

    def linear(
        self,
        layer: LinearBase,
        prefix: str,
        keys: Sequence[str],
        mappers: Sequence[WeightsMapper],
        packed: Any,
        plain: bool | None = None,
    ) -> QuantizeMethodBase:
        """The method for a linear without a trellis: the declared configuration's, else 16 bits.

        Args:
            layer: the layer that is being built.
            prefix: its vLLM name.
            keys: the checkpoint modules that fill it.
            mappers: how the model class renames checkpoint modules.
            packed: vLLM's ``packed_modules_mapping``.
            plain: what headers say: 16 bits without scales (True), codes of another format (False), or nothing.

        Raises:
            Exl3PackError: the configuration lists a layer as not converted that is stored in another format.
        """
        if self._spec is None or self._policy == _AS_STORED or self._is_plain(prefix, keys, mappers, plain):
            return UnquantizedLinearMethod()
        method = self._configuration(mappers, packed).get_quant_method(layer, prefix) or UnquantizedLinearMethod()
        if plain is False and type(method) is UnquantizedLinearMethod:
            raise self._fault(
                f"codes for {prefix} ({keys[0]}), which non_routed_quantization lists as not converted",
                "weights in 16 bits, or a list without this layer",
            )
        self._built.append((layer, prefix, tuple(keys)))
        return method

    def experts(
        self,
        layer: RoutedExperts,
        prefix: str,
        mappers: Sequence[WeightsMapper],
        packed: Any,
        plain: bool | None = None,
    ) -> QuantizeMethodBase | None:
        """The method for routed experts without a trellis, or None for vLLM's 16-bit one."""
        if self._spec is None or (self._policy == _AS_STORED and not self._is_source_draft(prefix)):
            return None
        if self._is_plain(prefix, (), mappers, plain):
            return None
        method = self._configuration(mappers, packed).get_quant_method(layer, prefix)
        self._built.append((layer, prefix, ()))
        return method

    def _is_plain(self, prefix: str, keys: Sequence[str], mappers: Sequence[WeightsMapper], plain: bool | None) -> bool:
        """Whether a layer is in 16 bits: headers say so, or the configuration does and headers say nothing."""
        if plain is False:
            return False
        listed = is_listed(self._spec or {}, (prefix, *keys), mappers)
        if plain and not listed:
            self._unlisted.append(prefix)
        return bool(plain) or listed

    @property
    def weight_block_size(self) -> list[int] | None:
        """Rows and columns that share a scale in the declared format, or None where it has none or is not used.

        Classes of DeepSeek V4 and of a few others read it of the configuration that serves the model: to name the
        scales of a checkpoint, and to fill shared experts up to whole blocks.
        """
        size = (self._spec or {}).get("weight_block_size")
        if self._policy == _AS_STORED or not isinstance(size, Sequence) or isinstance(size, str):
            return None
        return [int(value) for value in size]

    def check(self, pack: Pack, map_name: Callable[[str], str]) -> None:
        """Once the model is built: every scale that a delegated layer wants must be stored.

        vLLM would leave an absent one uninitialised, and the model would answer with empty text.

        Args:
            pack: the pack.
            map_name: vLLM's renaming of checkpoint tensor names.

        Raises:
            Exl3PackError: a layer's scales are absent.
        """
        if self._unlisted:
            logger.warning(
                "EXL3 pack %s: %d layers that non_routed_quantization declares as %s are stored in 16 bits without "
                "scales, and served so (%s)", self._where, len(self._unlisted), self._name(), self._unlisted[0]
            )  # fmt: skip
            self._unlisted.clear()
        if not self._built:
            return
        stored, experts = _stored_leaves(pack, map_name)
        for layer, prefix, keys in self._built:
            wanted = [name for name, _ in layer.named_parameters(recurse=False) if _is_stored_scale(name)]
            modules: Sequence[str] = keys
            if isinstance(layer, RoutedExperts):
                modules = experts.get(_layer_number(f"{prefix}.", pack)) or [f"{prefix}.*"]
                wanted = [name.removeprefix("w13_").removeprefix("w2_") for name in wanted]
            absent = next(((key, name) for key in modules for name in wanted if name not in stored.get(key, ())), None)
            if absent is not None:
                key, name = absent
                raise self._fault(
                    f"no {name} for {prefix}, which non_routed_quantization declares as {self._name()}: "
                    f"{key}.{name} is not stored",
                    "a scale beside every weight in that format",
                    "If the pack stores this layer in 16 bits, list it in modules_to_not_convert of "
                    f'non_routed_quantization, or set non_routed_dtype_policy to "{_AS_STORED}" where all are.',
                )
        self._built.clear()

    def _configuration(self, mappers: Sequence[WeightsMapper], packed: Any) -> QuantizationConfig:
        if self._delegate is None:
            name = self._name()
            try:
                self._delegate = _served_as(name, dict(self._spec or {})).from_config(dict(self._spec or {}))
            except (AttributeError, KeyError, TypeError, ValueError) as error:
                raise self._fault(
                    f"non_routed_quantization {self._spec!r}",
                    f"a quantization_config that this vLLM serves ({error})",
                    "Correct it in config.json, or use a vLLM that knows the format.",
                ) from error
            self._delegate.packed_modules_mapping = packed
            for mapper in mappers:
                self._delegate.apply_vllm_mapper(mapper)
        return self._delegate

    def _name(self) -> str:
        return str((self._spec or {}).get("quant_method", "")).lower()

    def _is_source_draft(self, prefix: str) -> bool:
        if self._draft_experts != "source":
            return False
        match = _LAYER.search(f"{prefix}.")
        return self._draft_start is None or (match is not None and int(match[1]) >= self._draft_start)

    def _choice(self, raw: Mapping[str, Any], key: str, *values: str) -> str:
        value = raw.get(key) or values[0]
        if value not in values:
            raise self._fault(f"{key} {value!r}", " or ".join(repr(choice) for choice in values))
        return str(value)

    def _fault(
        self, found: str, expected: str, remedy: str = "Correct quantization_config in config.json."
    ) -> Exl3PackError:
        return Exl3PackError(found=found, expected=expected, where=self._where, remedy=remedy)


def _served_as(name: str, spec: Mapping[str, Any]) -> type[QuantizationConfig]:
    """The configuration class that vLLM would choose for a checkpoint of this model in this format.

    DeepSeek V4's checkpoints declare fp8 and hold experts in fp4, which a class of their own tells from config.json.

    Args:
        name: the declared method.
        spec: the declared block.
    """
    current = get_current_vllm_config_or_none()
    model = current.model_config if current is not None else None
    if name == "fp8" and model is not None and _DEEPSEEK_V4 in get_args(QuantizationMethods):
        own = get_quantization_config(_DEEPSEEK_V4)
        if own.override_quantization_method(dict(spec), None, hf_config=model.hf_config) is not None:
            return own
    return get_quantization_config(name)


def says_plain(pack: Pack, modules: Sequence[tuple[str, StoredTensor | None]]) -> bool | None:
    """What headers say of a layer's modules: 16 bits without scales, codes of another format, or nothing certain.

    Args:
        pack: the pack.
        modules: checkpoint modules that fill the layer, each with its ``weight`` if it has one.
    """
    if not modules or any(weight is None for _, weight in modules):
        return None
    plain = {
        weight.dtype in _FLOATS and f"{key}." not in _scales(pack) for key, weight in modules if weight is not None
    }
    return plain.pop() if len(plain) == 1 else None


@lru_cache(maxsize=4)
def _scales(pack: Pack) -> frozenset[str]:
    """The modules, each with a dot behind it, beside whose weights scales are stored."""
    return frozenset(
        f"{name.rpartition('.')[0]}." for name in pack.tensors if _is_stored_scale(name.rpartition(".")[2])
    )


def plain_experts(pack: Pack, prefix: str) -> bool | None:
    """The same of the routed experts of a layer, from their tensors of that layer's number."""
    number = _layer_number(f"{prefix}.", pack)
    modules = [(key, tensor) for key, tensor in pack.dense.items() if ".experts." in key]
    return says_plain(pack, [(key, tensor) for key, tensor in modules if _layer_number(f"{key}.", pack) == number])


def _is_stored_scale(name: str) -> bool:
    """Whether vLLM expects a parameter of this name from the checkpoint; activation scales may be computed."""
    return "scale" in name and "input" not in name


def _stored_leaves(pack: Pack, map_name: Callable[[str], str]) -> tuple[dict[str, set[str]], dict[int, list[str]]]:
    """The tensors beside every module that is not EXL3, by what vLLM calls them; and each layer's experts' modules."""
    leaves: dict[str, set[str]] = {}
    experts: dict[int, list[str]] = {}
    for name in pack.tensors:
        key, _, _ = name.rpartition(".")
        if key in pack.linears:
            continue
        if key not in leaves and ".experts." in key:
            experts.setdefault(_layer_number(name, pack), []).append(key)
        leaves.setdefault(key, set()).add(map_name(name).rpartition(".")[2])
    return leaves, experts


def _layer_number(name: str, pack: Pack) -> int:
    """Number of a tensor's layer; draft layers count on from the main stack, as vLLM numbers them."""
    if match := _DRAFT_LAYER.search(name):
        return int(match[1]) + main_layers(pack.config)
    match = _LAYER.search(name)
    return int(match[1]) if match else -1
