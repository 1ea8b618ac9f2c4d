"""Parameters of neither a linear, nor an embedding, nor an expert, that no tensor was loaded into.

No quantization method sees a norm, a router's correction bias, attention sinks or a convolution, and vLLM looks for
parameters that were not loaded in unquantized models only. Such a parameter keeps what the class put there: ones,
zeros, or whatever lay in that memory. So the first value of each is made NaN as the parameter is registered, and no
tensor that is loaded leaves it so.
"""

import logging
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from vllm.config import VllmConfig, get_current_vllm_config_or_none
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

from vllm_exl3.pack.errors import Exl3PackError
from vllm_exl3.serving.drafts import draft_being_built

__all__ = ["ParameterWatch", "register_parameter_watch"]

logger = logging.getLogger("vllm.exl3")

_MARKED = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_SHOWN = 4


class ParameterWatch:
    """The parameters of one model, from its construction to the end of loading."""

    def __init__(self) -> None:
        self._open = True
        self._marked: list[tuple[weakref.ref[torch.nn.Module], str, torch.Tensor]] = []
        self._parents: dict[int, tuple[weakref.ref[torch.nn.Module], weakref.ref[torch.nn.Module], str]] = {}

    def note(self, module: torch.nn.Module, name: str, parameter: torch.Tensor) -> None:
        """Spoil the first value of a parameter that is being registered, and keep it."""
        if not (self._open and _can_be_marked(parameter) and _is_unwatched(module)):
            return
        first = (0,) * parameter.dim()
        value = parameter.data[first].clone()
        if not value.isnan():  # one that another module has registered already
            self._marked.append((weakref.ref(module), name, value))
        parameter.data[first] = torch.nan

    def note_child(self, parent: torch.nn.Module, name: str, child: torch.nn.Module) -> None:
        """Remember where a module stands in the model."""
        if self._open:
            self._parents[id(child)] = (weakref.ref(child), weakref.ref(parent), name)

    def close(self) -> None:
        """The model is built: what is registered from now on is made of loaded weights."""
        self._open = False

    def check(self, layer: torch.nn.Module, where: str, *, refuse: bool = True) -> None:
        """Once everything is loaded: refuse parameters that are still spoiled, and give up watching.

        Args:
            layer: any layer of the model that is served.
            where: the model, for the error.
            refuse: False warns only, and gives the parameters what their classes had put there.

        Raises:
            Exl3PackError: naming the parameters.
        """
        self.close()
        if not self._marked:
            return
        model, _ = self._place(layer)
        missing: list[str] = []
        for module, name, value in self._unloaded():
            root, path = self._place(module)
            if root is model:
                missing.append(f"{path}.{name}" if path else name)
            parameter = module._parameters[name]
            assert parameter is not None
            parameter.data[(0,) * parameter.dim()] = value
        self._marked.clear()
        self._parents.clear()
        if not missing:
            return
        names = ", ".join(sorted(missing)[:_SHOWN]) + (f" and {len(missing) - _SHOWN} more" * (len(missing) > _SHOWN))
        if not refuse:
            logger.warning("EXL3: no tensor was loaded into %s: they keep what their classes put there", names)
            return
        raise Exl3PackError(
            found=f"{names} into which no tensor was loaded, or which begin with NaN",
            expected="a stored tensor for every parameter that the model has",
            where=where,
            remedy="A tensor of the pack is missing, or config.json is of another model: fetch the pack again. Where "
            "the model can do without, --model-loader-extra-config '{\"enable_weights_track\": false}' starts it.",
        )

    def _unloaded(self) -> Iterator[tuple[torch.nn.Module, str, torch.Tensor]]:
        """Those whose first value is NaN still."""
        alive = []
        for held, name, value in self._marked:
            module = held()
            parameter = module._parameters.get(name) if module is not None else None
            if module is not None and parameter is not None and _can_be_marked(parameter):
                alive.append((module, name, value, parameter.data[(0,) * parameter.dim()]))
        by_device: dict[torch.device, list[int]] = {}
        for index, (*_, first) in enumerate(alive):
            by_device.setdefault(first.device, []).append(index)
        for indices in by_device.values():  # one wait for each device
            spoiled = torch.stack([alive[index][3].double() for index in indices]).isnan().tolist()
            yield from (alive[index][:3] for index, nan in zip(indices, spoiled, strict=True) if nan)

    def _place(self, module: torch.nn.Module) -> tuple[torch.nn.Module, str]:
        """The outermost module that this one is in, and its name there."""
        names: list[str] = []
        while (known := self._parents.get(id(module))) is not None:
            child, parent, name = known[0](), known[1](), known[2]
            if child is not module or parent is None or parent._modules.get(name) is not module:
                break
            names.insert(0, name)
            module = parent
        return module, ".".join(names)


def _can_be_marked(parameter: torch.Tensor) -> bool:
    return not parameter.is_meta and parameter.dtype in _MARKED and parameter.numel() > 0


def _is_unwatched(module: torch.nn.Module) -> bool:
    """Whether no quantization method looks after this module: none has been asked, or one that only vLLM knows.

    Scales of a KV cache have defaults, and methods of other formats parameters that no checkpoint holds.
    """
    method = getattr(module, "quant_method", None)
    plain = type(method) in (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)
    return method is None or (plain and "create_weights" not in vars(method))  # see `watched`


def register_parameter_watch() -> None:
    """Hear of every parameter that is registered in this process while a model of a pack is built."""
    register_module_parameter_registration_hook(_parameter_registered)  # type: ignore[no-untyped-call]
    register_module_module_registration_hook(_module_registered)  # type: ignore[no-untyped-call]


def _parameter_registered(module: torch.nn.Module, name: str, parameter: Any) -> None:
    watch = _watch(get_current_vllm_config_or_none())
    if watch is not None and parameter is not None:
        watch.note(module, name, parameter)


def _module_registered(module: torch.nn.Module, name: str, child: Any) -> None:
    watch = _watch(get_current_vllm_config_or_none())
    if watch is not None and child is not None:
        watch.note_child(module, name, child)


def _watch(config: VllmConfig | None) -> ParameterWatch | None:
    watch = getattr(config.quant_config, "watch", None) if config is not None else None
    return watch if isinstance(watch, ParameterWatch) and draft_being_built(config) is None else None
