"""What has to see the whole model, built and not loaded yet: a wrapper around its class' ``load_weights``.

vLLM shows a quantization config single layers, by the prefixes that model classes give them. Only the root knows the
paths of its modules, which some classes give other prefixes, and the modules that were built without a config. So the
root class of an EXL3 pack gets its ``load_weights`` wrapped, once in a process: names are checked there, and what no
loader of the class could handle is handed over. Instances without an EXL3 layer go straight to vLLM's function.
"""

import functools
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import VllmConfig
from vllm.model_executor.layers.linear import QKVParallelLinear
from vllm.model_executor.model_loader.utils import get_model_cls

from vllm_exl3.pack.errors import Exl3PackError
from vllm_exl3.pack.spelling import is_head_name
from vllm_exl3.serving.decoding import DecodedModules
from vllm_exl3.serving.loading import SCALES_OF_SIGNS

if TYPE_CHECKING:
    from vllm_exl3.serving.config import Exl3Config
    from vllm_exl3.serving.linear import Exl3LinearMethod

__all__ = ["OtherNames", "watch_loading"]

_LEAVES = frozenset(("trellis", *SCALES_OF_SIGNS, *SCALES_OF_SIGNS.values(), "mcg", "mul1"))
_WRAPPED = "_vllm_exl3_wrapped"
_DECODED = "_vllm_exl3_decoded"


def watch_loading(config: VllmConfig | None) -> None:
    """Wrap ``load_weights`` of the class that vLLM builds for the current model.

    Args:
        config: vLLM's current configuration, where there is one.
    """
    if config is None or config.model_config is None:
        return
    model_class: Any = get_model_cls(config.model_config)
    stock = getattr(model_class, "load_weights", None)
    if stock is None or getattr(stock, _WRAPPED, False):
        return

    @functools.wraps(stock)
    def load_weights(self: Any, weights: Iterable[tuple[str, torch.Tensor]], *args: Any, **kwargs: Any) -> Any:
        exl3 = _config_of(self)
        return (
            stock(self, weights, *args, **kwargs) if exl3 is None else _load(stock, self, exl3, weights, args, kwargs)
        )

    setattr(load_weights, _WRAPPED, True)
    model_class.load_weights = load_weights


def _load(
    stock: Any, model: torch.nn.Module, config: "Exl3Config", weights: Any, args: tuple[Any, ...], kwargs: Any
) -> Any:
    # Kept with the model: vLLM keeps configs longer than models, and this refers to modules.
    decoded: DecodedModules | None = model.__dict__.get(_DECODED)
    if decoded is None:
        decoded = DecodedModules(config, model)
        object.__setattr__(model, _DECODED, decoded)
    config.verify_names()
    split = OtherNames(config, model)
    decoded.mark()
    handed = _Handed(config, split.others(decoded.stream(weights)))
    try:
        loaded = stock(model, handed, *args, **kwargs)
    except (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        handed.explain(type(model).__name__, error)
        raise
    decoded.check_loaded()
    return loaded | split.loaded if isinstance(loaded, set) else loaded


class _Handed:
    """What the class' loader is given, so that a fault in it can be told by the tensor that it had in hand.

    Args:
        config: the model's quantization config.
        weights: names and tensors.
    """

    def __init__(self, config: "Exl3Config", weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        self._config = config
        self._weights = iter(weights)
        self._last = ""

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self._weights:
            self._last = name
            yield name, tensor

    def explain(self, model_class: str, error: Exception) -> None:
        """Say which EXL3 tensor vLLM's loader failed on, where it was one.

        Raises:
            Exl3PackError: it was.
        """
        key, _, leaf = self._last.rpartition(".")
        if leaf in _LEAVES and key in self._config.pack.linears:
            raise Exl3PackError(
                found=f"{self._last}, at which {model_class}.load_weights stopped ({type(error).__name__}: {error})",
                expected="a loader that hands the tensors of an EXL3 linear to their layer as they are stored",
                where=str(self._config.source),
                remedy=f"vLLM's class changes or looks for tensors of this name in its own way. Use a pack that keeps "
                f"{key} in 16 bits, and report this with the output of `vllm-exl3 inspect`.",
            ) from error


def _config_of(model: torch.nn.Module) -> "Exl3Config | None":
    """The config that built a model's layers, or None for a model of another format."""
    from vllm_exl3.serving.config import Exl3Config

    for module in model.modules():
        config = getattr(getattr(module, "quant_method", None), "config", None)
        if isinstance(config, Exl3Config):
            return config
    return None


class OtherNames:
    """Layers whose stored tensors have names that the model class would not load.

    exllamav3 splits what some classes keep fused in checkpoints too, such as the attention of a vision tower; and it
    has its own name for a head. Such tensors go to their layer here, past the class' loader.

    Args:
        config: the model's quantization config.
        model: the whole model.
    """

    def __init__(self, config: "Exl3Config", model: torch.nn.Module) -> None:
        from vllm_exl3.serving.linear import Exl3LinearMethod

        self.loaded: set[str] = set()
        self._config = config
        self._layers: dict[str, tuple[str, torch.nn.Module, int]] = {}
        for path, module in model.named_modules():
            method = getattr(module, "quant_method", None)
            if isinstance(method, Exl3LinearMethod) and self._is_unknown(path, method):
                for index, part in enumerate(method.parts):
                    self._layers[part.key] = (path, module, method.layout.part_of_output.index(index))

    def _is_unknown(self, path: str, method: "Exl3LinearMethod") -> bool:
        leaves = [part.key.rpartition(".")[2] for part in method.parts]
        if len(leaves) == 1:
            return is_head_name(method.parts[0].key) and leaves[0] != path.rpartition(".")[2]
        known = self._config.packed_modules_mapping.get(path.rpartition(".")[2])
        return known is None or (len(known) == 1 and list(known) != leaves)

    def others(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Hand these layers their tensors; give all other tensors."""
        for name, tensor in weights:
            key, _, leaf = name.rpartition(".")
            if key not in self._layers or not self._load(key, leaf, tensor):
                yield name, tensor

    def _load(self, key: str, leaf: str, tensor: torch.Tensor) -> bool:
        path, module, output = self._layers[key]
        leaf = SCALES_OF_SIGNS.get(leaf, leaf)
        param = module._parameters.get(leaf)
        if param is None:
            return False
        if len(module.quant_method.parts) == 1:
            param.weight_loader(param, tensor)
        else:
            param.weight_loader(param, tensor, "qkv"[output] if isinstance(module, QKVParallelLinear) else output)
        self.loaded.add(f"{path}.{leaf}")
        return True
