"""A tiny random model of any family: an EXL3 pack with the family's own tensor names, and its decoded dense twin.

transformers makes the model from a configuration and saves it, which gives the names and the shapes that the family
publishes. Every linear that a row of the table wants in EXL3 then becomes random trellises in the pack, and what they
decode to in the twin. What exllamav3 stores apart (stacked experts, fused projections) is cut up in the pack alone.
"""

import json
import re
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.families.vision import Vision, write_processor
from tests.serving.dense_twin import dense_weight_of
from tests.tiny_pack import Draft, Spec, linear
from vllm_exl3.pack.stored import pad_to_block

__all__ = ["Family", "Tensors", "first_of_kinds", "sizes", "write"]

Tensors = dict[str, npt.NDArray[Any]]

_NO_LINEARS = re.compile(
    r"(^|[._])(embed|norm|conv|router|position|patch)|(^|\.)(gate|shared_expert_gate|wte|embeddings)$|embed_tokens|embedding"
)
"""Modules with a two-dimensional weight that exllamav3 leaves as they are, whatever the family."""

_MUL1_RMS = 1.0003


@dataclass(frozen=True)
class Family:
    """One row of the table.

    Attributes:
        name: of the row.
        config: what `transformers.AutoConfig.for_model` takes: ``model_type`` and the sizes.
        architecture: transformers' class, where ``AutoModelForCausalLM`` does not choose it.
        kind: what the row stands for; the first row of a kind is run by every ``make test``.
        exl3: which of the modules that may be EXL3 are.
        dense: which of them are not, all the same.
        also: modules that are EXL3 although exllamav3 leaves modules of such names as they are.
        scaled: modules that exllamav3 stores multiplied by a factor which it applies nowhere else, to that factor.
        slices: how many slices some linears are stored in.
        sliced: which are; those of an MLP if not said otherwise.
        tied: the embedding is the head; the pack stores an EXL3 head all the same, of which the embedding is a copy.
        unfused: modules that exllamav3 cuts up, by their last component: the parts, each with its outputs.
        stacked: how the family stacks its experts' weights: ``in_out`` for ``[experts, in, out]``, ``out_in``, or None.
        rename: from a saved tensor's name to the one that exllamav3 writes, where they differ.
        edit: changes what transformers saved, before anything is coded; for tensors that its class lacks.
        source: the format of what is not EXL3, in pack and twin, whose tensors ``edit`` makes.
        experts: layers that the twin keeps in 16 bits all the same, by vLLM's names.
        published: keys of the family's published ``config.json`` that transformers does not write.
        tensors: makes everything in place of transformers, for families that it does not have.
        vision: how a request with an image is made, for families that take one.
        options: of the engine.
        variables: of its environment.
        needs: packages that vLLM's class cannot do without on a GPU, beside what an engine of any model imports.
        unused: packages that it imports and, without images, never calls.
        constants: names in vLLM's modules, as ``module:NAME``, to values with which its class calls no other package.
        bound: of the error, for classes that round to 16 bits throughout, twin and all; what is wrong is far beyond it.
        interpreted: vLLM's class for CPUs launches Triton kernels; such a row needs a process of its own.
        gpu: why vLLM serves the family on GPUs only, not in float32, or not at all; such a row is not compared here.
        shows: what the report must say, if anything.
    """

    name: str
    config: Mapping[str, Any]
    architecture: str | None = None
    kind: str = ""
    exl3: str = ""
    dense: str = r"^$"
    also: str = r"^$"
    scaled: Mapping[str, float] = field(default_factory=dict)
    slices: int = 1
    sliced: str = r"mlp\.(gate|up|down)_proj$"
    tied: bool = False
    unfused: Mapping[str, tuple[tuple[str, int], ...]] = field(default_factory=dict)
    stacked: str | None = None
    rename: Callable[[str], str] = str
    edit: Callable[[Tensors], None] | None = None
    source: Mapping[str, Any] = field(default_factory=dict)
    experts: Sequence[str] = ()
    published: Mapping[str, Any] = field(default_factory=dict)
    tensors: Callable[[], Tensors] | None = None
    vision: Vision | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)
    needs: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    constants: Mapping[str, Any] = field(default_factory=dict)
    bound: float = 0.0
    interpreted: bool = False
    gpu: str = ""
    shows: tuple[str, ...] = ()

    def is_exl3(self, key: str) -> bool:
        """Whether the module of this name becomes EXL3."""
        if re.search(self.also, key):
            return True
        may = _NO_LINEARS.search(key) is None
        return may and re.search(self.exl3, key) is not None and re.search(self.dense, key) is None

    def factor(self, key: str) -> float:
        """How many times larger than the source's weights those of a module are in the pack."""
        return next((factor for pattern, factor in self.scaled.items() if re.search(pattern, key)), 1.0)


def sizes(model_type: str, *, without: Sequence[str] = (), **others: Any) -> dict[str, Any]:
    """The configuration of two small layers; heads of 32, two of four for keys, whose 64 channels a pack pads to 128.

    Args:
        model_type: transformers' name of the family.
        without: keys that this family does not have.
        others: further keys, or other values.
    """
    config = {
        "model_type": model_type,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": 640,
        "max_position_embeddings": 512,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return {**{name: value for name, value in config.items() if name not in without}, **others}


def write(family: Family, folder: Path) -> tuple[Path, Path]:
    """Write the pack and its twin.

    Args:
        family: a row of the table.
        folder: where both go, as ``pack`` and ``twin``.

    Returns:
        The two folders.
    """
    config, saved = _saved(family)
    pack: dict[str, Spec] = {}
    twin: dict[str, Spec] = {}
    for name, values in saved.items():
        key, _, leaf = name.rpartition(".")
        if leaf == "weight" and values.ndim == 2 and family.is_exl3(key):
            base, _, last = key.rpartition(".")
            if last in family.unfused:
                _code_unfused(base, name, family.unfused[last], values.shape[1], pack, twin)
            else:
                count = family.slices if re.search(family.sliced, key) else 1
                _code(family.rename(key), name, values.shape, pack, twin, count, family.factor(key))
        elif leaf == "bias" and key.rpartition(".")[2] in family.unfused and family.is_exl3(key):
            twin[name] = ("F32", values)
            pack |= _split_bias(key, values, family.unfused[key.rpartition(".")[2]])
        elif family.stacked and values.ndim == 3 and ".experts" in name and family.is_exl3(name):
            _code_stacked(family, name, values.shape, pack, twin)
        else:
            code = {"int32": "I32", "uint8": "F8_E4M3"}.get(values.dtype.name, "F32")
            pack[family.rename(name)] = twin[name] = (code, values)
    if family.tied:
        _add_head(pack, twin)
    twin_config = {**config, "dtype": "float32"}
    declared: dict[str, Any] = {"quant_method": "exl3", "version": "1.6.5", "bits": 4.0, "head_bits": 4}
    declared["codebook"] = "mul1"
    if family.source:
        declared["non_routed_quantization"] = dict(family.source)
        twin_config["quantization_config"] = {**family.source, "ignored_layers": list(family.experts)}
    Draft(pack, {**twin_config, "quantization_config": declared}).write(folder / "pack")
    Draft(twin, twin_config).write(folder / "twin")
    for target in (folder / "pack", folder / "twin"):
        (target / "generation_config.json").write_text("{}")
        if family.vision is not None:
            write_processor(family.vision, target)
    return folder / "pack", folder / "twin"


def _saved(family: Family) -> tuple[dict[str, Any], Tensors]:
    """``config.json`` and the tensors, of a size that keeps activations near one."""
    import torch
    import transformers
    from safetensors.numpy import load_file

    torch.manual_seed(zlib.crc32(family.name.encode()))
    rng = np.random.default_rng(zlib.crc32(family.name.encode()))
    if family.tensors is not None:
        config, tensors = dict(family.config), family.tensors()
    else:
        made = transformers.AutoConfig.for_model(**family.config)
        auto = transformers.AutoModelForCausalLM.from_config
        model = getattr(transformers, family.architecture)(made) if family.architecture else auto(made)
        with tempfile.TemporaryDirectory() as scratch:
            model.float().save_pretrained(scratch)
            config = json.loads((Path(scratch) / "config.json").read_text())
            tensors = {}
            for path in sorted(Path(scratch).glob("*.safetensors")):
                tensors |= load_file(path)
    tensors = {
        name: values if values.dtype == np.int32 else _spread(name, values, rng) for name, values in tensors.items()
    }
    if family.edit is not None:
        family.edit(tensors)
    return {**config, **family.published}, tensors


def _spread(name: str, values: npt.NDArray[Any], rng: np.random.Generator) -> npt.NDArray[np.float32]:
    """Values as large as a trained model's: transformers begins with near zeros, under which attention averages."""
    values = values.astype(np.float32)
    if values.ndim < 2:
        return (values * (1 + 0.1 * rng.standard_normal(values.shape))).astype(np.float32)
    fan_in = 1 if "embed" in name else int(np.prod(values.shape[1:]))
    return (rng.standard_normal(values.shape) * fan_in**-0.5).astype(np.float32)


def _code(
    key: str,
    name: str,
    shape: tuple[int, ...],
    pack: dict[str, Spec],
    twin: dict[str, Spec],
    slices: int = 1,
    factor: float = 1.0,
) -> None:
    """Put random trellises into the pack and what they decode to, without ``factor``, into the twin."""
    axis = 1 if slices > 1 and key.endswith("down_proj") else 0
    part = [size // slices if index == axis else size for index, size in enumerate(shape)]
    decoded = []
    for index in range(slices):
        piece = key if slices == 1 else f"{key}.slice.{index}"
        tensors = _trellises(piece, *part)
        tensors[f"{piece}.suh"] = ("F16", (tensors[f"{piece}.suh"][1] * factor).astype(np.float16))
        pack |= tensors
        decoded.append(_decoded(tensors, piece, *part) / np.float32(factor))
    twin[name] = ("F32", np.concatenate(decoded, axis))


def _code_unfused(
    base: str, name: str, parts: Sequence[tuple[str, int]], inputs: int, pack: dict[str, Spec], twin: dict[str, Spec]
) -> None:
    """The same for a projection that the family fuses, and the pack stores in parts."""
    decoded = []
    for part, outputs in parts:
        key = f"{base}.{part}"
        pack |= (tensors := _trellises(key, outputs, inputs))
        decoded.append(_decoded(tensors, key, outputs, inputs))
    twin[name] = ("F32", np.concatenate(decoded))


def _split_bias(key: str, values: npt.NDArray[np.float32], parts: Sequence[tuple[str, int]]) -> dict[str, Spec]:
    """The bias of a projection that the pack stores in parts."""
    base = key.rpartition(".")[0]
    ends = np.cumsum([outputs for _, outputs in parts])[:-1]
    pieces = np.split(values, ends)
    return {f"{base}.{part}.bias": ("F32", piece) for (part, _), piece in zip(parts, pieces, strict=True)}


def _code_stacked(
    family: Family, name: str, shape: tuple[int, ...], pack: dict[str, Spec], twin: dict[str, Spec]
) -> None:
    """The same for ``gate_up_proj`` and ``down_proj`` of all experts of a layer in one tensor."""
    experts, *sizes = shape
    inputs, outputs = sizes if family.stacked == "in_out" else sizes[::-1]
    base, _, leaf = name.removesuffix(".weight").rpartition(".")
    parts = ("gate_proj", "up_proj") if leaf == "gate_up_proj" else (leaf,)
    stacked = []
    for expert in range(experts):
        rows = []
        for part in parts:
            key = family.rename(f"{base}.{expert}.{part}")
            pack |= (tensors := _trellises(key, outputs // len(parts), inputs))
            rows.append(_decoded(tensors, key, outputs // len(parts), inputs))
        weight = np.concatenate(rows)
        stacked.append(weight.T if family.stacked == "in_out" else weight)
    twin[name] = ("F32", np.stack(stacked))


def _add_head(pack: dict[str, Spec], twin: dict[str, Spec]) -> None:
    """Let the embedding be what an EXL3 head decodes to, so that the twin, which has no head, computes the same."""
    name = next(name for name in twin if name.endswith(("embed_tokens.weight", "word_embeddings.weight")))
    shape = twin[name][1].shape
    pack |= (tensors := _trellises("lm_head", *shape))
    pack[name] = twin[name] = ("F32", _decoded(tensors, "lm_head", *shape))


def _trellises(key: str, outputs: int, inputs: int) -> dict[str, Spec]:
    """The tensors of one mul1 linear of 4 bits, padded, that gives about as much as it takes."""
    tensors = linear(key, pad_to_block(inputs), pad_to_block(outputs), bits=4)
    rng = np.random.default_rng(zlib.crc32(key.encode()))
    for leaf, width, size in (("suh", inputs, inputs**-0.5 / _MUL1_RMS), ("svh", outputs, 1.0)):
        values = np.zeros(pad_to_block(width))
        values[:width] = rng.choice([-1.0, 1.0], width) * rng.uniform(0.8, 1.2, width) * size
        tensors[f"{key}.{leaf}"] = ("F16", values.astype(np.float16))
    return tensors


def _decoded(tensors: dict[str, Spec], key: str, outputs: int, inputs: int) -> npt.NDArray[np.float32]:
    return np.ascontiguousarray(dense_weight_of(tensors, key)[:outputs, :inputs])


def first_of_kinds(families: Iterable[Family]) -> Iterator[tuple[Family, bool]]:
    """Every row, and whether it is the first of its kind."""
    seen: set[str] = set()
    for family in families:
        yield family, bool(family.kind) and family.kind not in seen
        seen.add(family.kind)
