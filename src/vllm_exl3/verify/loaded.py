"""The weights of a quantized folder that transformers can load, dequantized by running its linears."""

from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vllm_exl3.pack import Exl3PackError
from vllm_exl3.verify.weights import Floats

__all__ = ["LoadedWeights"]


class LoadedWeights:
    """A model that transformers has loaded; it must fit into memory as it is stored.

    A quantized linear's weight is what it makes of the unit vectors, so that no format's layout has to be known here.

    Args:
        folder: the model's folder.
        method: its ``quant_method``, for messages.

    Raises:
        Exl3PackError: transformers cannot load it, mostly because the format's own package is not installed.
    """

    def __init__(self, folder: Path, method: str) -> None:
        from transformers import AutoModelForCausalLM

        self.label = str(folder)
        loader: Any = AutoModelForCausalLM
        try:
            self._model = loader.from_pretrained(folder, dtype="auto").eval()
        except Exception as error:  # each format's package has errors of its own
            says = (str(error).splitlines() or [""])[0]
            raise Exl3PackError(
                found=f"quant_method {method}, which transformers cannot load here: {type(error).__name__}: {says}",
                expected="an EXL3 pack, a GGUF file, or a folder that transformers can load",
                where=str(folder),
                remedy="Install the package that the message names, or leave this one out of --compare.",
            ) from error
        self._plain = dict(self._model.named_parameters())
        self._quantized = {
            f"{name}.weight": module
            for name, module in self._model.named_modules()
            if hasattr(module, "qweight") or hasattr(module, "weight_packed")
        }
        self._names = self._quantized.keys() | self._plain.keys()

    def names(self) -> Collection[str]:
        """See `vllm_exl3.verify.weights.Weights`."""
        return self._names

    def read(self, name: str) -> Floats:
        """See `vllm_exl3.verify.weights.Weights`."""
        with torch.inference_mode():
            if (module := self._quantized.get(name)) is None:
                return np.array(self._plain[name].float().cpu().numpy(), np.float32)
            units = torch.eye(int(module.in_features), dtype=self._model.dtype, device=self._model.device)
            outputs = module(units).float()
            if getattr(module, "bias", None) is not None:
                outputs -= module.bias.float()
            return np.array(outputs.T.cpu().numpy(), np.float32)
