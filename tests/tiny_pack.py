"""Drafts of tiny EXL3 packs that a test can spoil in one place and write to disk.

The writer here is independent of the package's own, so that a shared mistake cannot hide.
"""

import json
import math
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

MARKER_VALUES = {"mcg": -877912083, "mul1": -2082680531}
_TYPES = {
    "F16": "<f2",
    "I16": "<i2",
    "I32": "<i4",
    "I64": "<i8",
    "F32": "<f4",
    "BF16": "<u2",
    "U8": "u1",
    "I8": "i1",
    "F8_E4M3": "u1",
}

Spec = tuple[str, np.ndarray]


@dataclass
class Draft:
    """A pack that is not written yet.

    Attributes:
        tensors: name to dtype code and values, in file order.
        config: config.json; None leaves it out.
        sidecar: quantization_config.json; None leaves it out.
        file_of: tensor name to file name; what is not named here goes to model.safetensors.
        index: True writes one that matches, a dict is written as it is, None writes none.
        edit_header: changes the header of each file just before it is written.
        after: runs on the written folder.
    """

    tensors: dict[str, Spec]
    config: dict[str, Any] | None
    sidecar: dict[str, Any] | None = None
    file_of: dict[str, str] = field(default_factory=dict)
    index: bool | dict[str, str] | None = None
    edit_header: Callable[[dict[str, Any]], None] | None = None
    after: Callable[[Path], None] | None = None

    def write(self, folder: Path) -> Path:
        """Write everything and return the folder."""
        folder.mkdir(parents=True, exist_ok=True)
        files: dict[str, dict[str, Spec]] = {}
        for name, spec in self.tensors.items():
            files.setdefault(self.file_of.get(name, "model.safetensors"), {})[name] = spec
        for file, tensors in files.items():
            write_safetensors(folder / file, tensors, self.edit_header)
        for name, content in (("config.json", self.config), ("quantization_config.json", self.sidecar)):
            if content is not None:
                (folder / name).write_text(json.dumps(content, indent=1))
        if self.index is not None and self.index is not False:
            weight_map = self.index
            if weight_map is True:
                weight_map = {name: self.file_of.get(name, "model.safetensors") for name in self.tensors}
            index = {"metadata": {}, "weight_map": weight_map}
            (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        if self.after is not None:
            self.after(folder)
        return folder

    def shard(self, count: int = 2) -> "Draft":
        """Distribute the tensors over ``count`` numbered files with an index."""
        names = list(self.tensors)
        for position, name in enumerate(names):
            number = position * count // len(names) + 1
            self.file_of[name] = f"model-{number:05d}-of-{count:05d}.safetensors"
        self.index = True
        return self

    def add_linear(self, key: str, inputs: int, outputs: int, **options: Any) -> "Draft":
        """Add an EXL3 linear; options as for `linear`."""
        self.tensors.update(linear(key, inputs, outputs, **options))
        return self

    def drop(self, *suffixes: str) -> "Draft":
        """Remove every tensor whose name ends with one of the suffixes."""
        for name in [name for name in self.tensors if name.endswith(suffixes)]:
            del self.tensors[name]
        return self


def write_safetensors(
    path: Path, tensors: dict[str, Spec], edit: Callable[[dict[str, Any]], None] | None = None
) -> None:
    """Write one safetensors file."""
    header: dict[str, Any] = {}
    blobs = []
    position = 0
    for name, (dtype, values) in tensors.items():
        data = values.astype(_TYPES[dtype]).tobytes()
        header[name] = {
            "dtype": dtype,
            "shape": list(values.shape),
            "data_offsets": [position, position + len(data)],
        }
        position += len(data)
        blobs.append(data)
    if edit is not None:
        edit(header)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(blobs))


def linear(
    key: str, inputs: int, outputs: int, *, bits: float = 3, codebook: str = "mul1", bias: int = 0, legacy: bool = False
) -> dict[str, Spec]:
    """The tensors of one EXL3 linear with random contents."""
    rng = np.random.default_rng(zlib.crc32(f"{key} {inputs} {outputs}".encode()))
    words = int(16 * bits)
    tensors: dict[str, Spec] = {
        f"{key}.trellis": ("I16", rng.integers(-(2**15), 2**15, (inputs // 16, outputs // 16, words))),
    }
    for leaf, width in (("su", inputs), ("sv", outputs)):
        if legacy:
            tensors[f"{key}.{leaf}"] = ("I16", rng.integers(-(2**15), 2**15, width // 16))
        else:
            tensors[f"{key}.{leaf}h"] = ("F16", rng.choice([-1.0, 1.0], width) * rng.uniform(0.5, 2, width))
    if codebook != "3inst":
        tensors[f"{key}.{codebook}"] = ("I32", np.array(MARKER_VALUES[codebook]))
    if bias:
        tensors[f"{key}.bias"] = ("F16", rng.standard_normal(bias))
    return tensors


def llama(*, layers: int = 2, bits: float = 3, codebook: str = "mul1", head_bits: float = 6) -> Draft:
    """A complete small Llama: hidden 128, MLP 256, two heads of 64, vocabulary 256."""
    quantization = {
        "quant_method": "exl3",
        "version": "1.6.5",
        "bits": bits,
        "head_bits": head_bits,
        "codebook": codebook,
    }
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": layers,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "vocab_size": 256,
        "tie_word_embeddings": False,
        "quantization_config": quantization,
    }
    tensors: dict[str, Spec] = {"model.embed_tokens.weight": ("F16", np.ones((256, 128)))}
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            tensors |= linear(f"{prefix}.self_attn.{name}", 128, 128, bits=bits, codebook=codebook)
        for name, inputs, outputs in (("gate_proj", 128, 256), ("up_proj", 128, 256), ("down_proj", 256, 128)):
            tensors |= linear(f"{prefix}.mlp.{name}", inputs, outputs, bits=bits, codebook=codebook)
        tensors[f"{prefix}.input_layernorm.weight"] = ("F16", np.ones(128))
        tensors[f"{prefix}.post_attention_layernorm.weight"] = ("F16", np.ones(128))
    tensors["model.norm.weight"] = ("F16", np.ones(128))
    tensors |= linear("lm_head", 128, 256, bits=head_bits, codebook=codebook)
    draft = Draft(tensors, config)
    draft.sidecar = {**quantization, "tensor_storage": ledger(draft)}
    return draft


def ledger(draft: Draft) -> dict[str, Any]:
    """``tensor_storage`` as exllamav3 writes it for a draft's tensors."""
    storage: dict[str, Any] = {}
    for name, (dtype, values) in draft.tensors.items():
        key, _, leaf = name.rpartition(".")
        entry = storage.setdefault(key, {"stored_tensors": {}})
        entry["stored_tensors"][name] = {
            "shape": list(values.shape),
            "n_bytes": math.prod(values.shape) * np.dtype(_TYPES[dtype]).itemsize,
            "dtype": {"F16": "torch.float16", "I16": "torch.int16", "I32": "torch.int32"}.get(dtype, dtype),
        }
        if leaf == "trellis":
            width = values.shape[-1]
            entry["quant_format"] = "exl3"
            entry["bits_per_weight"] = width // 16 if width % 16 == 0 else width / 16
        if leaf in MARKER_VALUES:
            entry[f"{leaf}_multiplier"] = MARKER_VALUES[leaf] & 0xFFFFFFFF
    return storage
