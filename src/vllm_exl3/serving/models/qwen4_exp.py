"""Qwen3.8-Flash-Next (``Qwen4Exp…``): EXL3 n-gram tables, and FP8 ones on GPUs before Ada.

vLLM chooses the method of the n-gram embedding in ``Qwen4ExpPLEEmbeddingMethod.from_quant_config``. Given a
quantization config that it does not know it raises (0.30 to 0.32) or takes the table for a plain one (0.33), and it
keeps the table in pinned memory of its own unless told otherwise. No hook reaches either, so both are replaced here:

* ``from_quant_config`` asks an `Exl3Config` first; everything else goes to vLLM's function.
* The class for pinned tables, a pluggable layer, becomes the one for tables on the device where the method is ours:
  `VLLM_EXL3_NGRAM_TABLE` says where the rows lie, whatever ``--engram-config`` says.
* vLLM 0.30 and 0.31 hand FP8 tables to Triton as FP8, which it refuses before sm_89; rows are copied, not computed
  with, so they are handed over as bytes. 0.32 does that itself.
"""

import functools
import importlib
from typing import Any

import torch

__all__ = ["install", "is_qwen4_exp"]

_MODULES = ("vllm.models.qwen4_exp.common.ngram_embedding", "vllm.models.qwen4_exp.nvidia.ngram_embedding")
"""Where the classes are: the first from 0.31 on, the second in 0.30."""

_PINNED = "Qwen4ExpPLEPinnedHostEmbedding"


def is_qwen4_exp(architecture: str) -> bool:
    """Whether a class name of ``config.json`` is of this family."""
    return architecture.startswith("Qwen4Exp")


@functools.cache
def install() -> None:
    """Replace what the module's text says, once in a process.

    Raises:
        RuntimeError: vLLM's classes are not where they were.
    """
    module = _find()
    method = module.Qwen4ExpPLEEmbeddingMethod
    stock = method.from_quant_config

    @functools.wraps(stock)
    def from_quant_config(quant_config: Any, prefix: str, *args: Any, **kwargs: Any) -> Any:
        return _method(stock, quant_config, prefix, *args, **kwargs)

    method.from_quant_config = staticmethod(from_quant_config)
    _replace_pinned(module)


def _find() -> Any:
    for name in _MODULES:
        try:
            module = importlib.import_module(name)
        except ImportError:
            continue
        if hasattr(module, "Qwen4ExpPLEEmbeddingMethod") and hasattr(module, _PINNED):
            return module
    raise RuntimeError(
        f"vLLM's n-gram embedding is neither in {' nor in '.join(_MODULES)}: this version of vllm-exl3 does not know "
        "this vLLM. Use vLLM 0.30 to 0.33, or update vllm-exl3."
    )


def _method(stock: Any, quant_config: Any, prefix: str, *args: Any, **kwargs: Any) -> Any:
    from vllm_exl3.serving.config import Exl3Config

    if not isinstance(quant_config, Exl3Config):
        return stock(quant_config, prefix, *args, **kwargs)
    ours = quant_config.ngram_method(prefix)
    # A table in 16 bits, or in FP8 where config.json says so, is vLLM's own business.
    return ours if ours is not None else stock(None, prefix, *args, **kwargs)


def _replace_pinned(module: Any) -> None:
    from vllm.model_executor.custom_op import PluggableLayer

    from vllm_exl3.serving.ngram import NgramEmbeddingMethod

    pinned, on_device = getattr(module, _PINNED), module.Qwen4ExpPLEDeviceEmbedding

    class Placed(pinned):  # type: ignore[misc, valid-type]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            ours = isinstance(kwargs.get("embedding_method"), NgramEmbeddingMethod)
            self.__class__ = on_device if ours else pinned
            self.__class__.__init__(self, *args, **kwargs)

    PluggableLayer.register_oot(Placed, name=_PINNED)
    if _needs_bytes(module):
        pinned._lookup = functools.partialmethod(_lookup_bytes, module)


def _needs_bytes(module: Any) -> bool:
    """Whether this vLLM's kernel takes elements: 0.32's counts in bytes."""
    arguments = getattr(module._lookup_ple_embedding_from_pinned_kernel, "arg_names", None)
    return arguments is not None and "row_bytes" not in arguments


def _lookup_bytes(layer: Any, module: Any, input_ids: torch.Tensor, output: torch.Tensor | None = None) -> torch.Tensor:
    """vLLM's look-up in a pinned table, with rows of any dtype passed as bytes.

    Args:
        layer: vLLM's layer.
        module: where its kernel is.
        input_ids: any shape.
        output: ``[*input_ids.shape, width]`` in the table's dtype, which is written; None makes one.
    """
    shape = (*input_ids.shape, layer.embedding_dim)
    if output is None:
        output = torch.empty(shape, dtype=layer.weight.dtype, device=input_ids.device)
    elif tuple(output.shape) != shape or output.dtype != layer.weight.dtype or output.device != input_ids.device:
        raise ValueError(
            f"output: found {output.dtype} {tuple(output.shape)} on {output.device}, expected "
            f"{layer.weight.dtype} {shape} on {input_ids.device}"
        )
    ids = input_ids.reshape(-1).long()
    if ids.numel():
        row_bytes = layer.embedding_dim * layer.weight.element_size()
        block = 1 << (row_bytes - 1).bit_length()
        module._lookup_ple_embedding_from_pinned_kernel[(ids.numel(),)](
            layer._uva_weight.view(torch.uint8),
            ids,
            output.view(torch.uint8),
            row_bytes,
            layer.shard_indices.org_vocab_start_index,
            layer.shard_indices.org_vocab_end_index,
            BLOCK_D=block,
        )
    return output
