"""`check`: everything that can be known to be wrong with a pack before its weights are read.

What contradicts itself or cannot be decoded is refused; what is odd but harmless becomes a warning.
The rows of this list come from public reports of what goes wrong when EXL3 packs are served.
"""

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

import numpy as np

from vllm_exl3.pack.check_config import config_faults
from vllm_exl3.pack.check_experts import expert_faults
from vllm_exl3.pack.check_layers import layer_faults, layer_warnings
from vllm_exl3.pack.claims import audit_ledger, claim_warnings
from vllm_exl3.pack.errors import Exl3PackError, Exl3PackWarning
from vllm_exl3.pack.files import INDEX, missing_file_fault, no_config_fault
from vllm_exl3.pack.metadata import architectures, text_configs
from vllm_exl3.pack.pack import Pack
from vllm_exl3.pack.skip import MAIN_LAYER, Skipper, classify, main_layers
from vllm_exl3.pack.spelling import is_embedding_name, is_head_name
from vllm_exl3.pack.stored import StoredTensor
from vllm_exl3.pack.values import check_marker
from vllm_exl3.pack.wording import counted

__all__ = ["check", "find_faults", "find_warnings"]

_FOREIGN_DTYPES = ("F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "F4", "I8", "U8")
_SAMPLES = 3
_NUMBERS = 8
"""Layers that a message lists; a damaged count may claim any number of them."""

_SCALES_AND_MARKERS = (".suh", ".svh", ".su", ".sv", ".mcg", ".mul1")


def check(pack: Pack) -> list[Exl3PackWarning]:
    """Refuse a pack with a fault; return the warnings of one without.

    Reads headers, JSON files and marker scalars. Of a remote pack, whose scalars each cost a
    request, the first marker of each kind in each file is read; loading verifies the others.

    Raises:
        Exl3PackError: the first fault; its remedy says how many more there are.
    """
    faults = list(find_faults(pack))
    if faults:
        first = faults[0]
        more = f" ({len(faults) - 1} more faults: see `vllm-exl3 inspect`.)" if len(faults) > 1 else ""
        raise Exl3PackError(
            found=first.found, expected=first.expected, where=first.where, remedy=first.remedy + more
        ) from None
    return find_warnings(pack)


def find_faults(pack: Pack) -> Iterator[Exl3PackError]:
    """Every fault of a pack, the most telling first."""
    if fault := missing_file_fault(pack):
        yield fault
    if not pack.config:
        yield no_config_fault(pack.source)
    yield from _index_faults(pack)
    yield from _declaration_faults(pack)
    yield from config_faults(pack)
    yield from audit_ledger(pack).faults
    yield from _orphans(pack)
    yield from _marker_faults(pack)
    yield from _foreign_weights(pack)
    yield from _foreign_table(pack)
    yield from _gaps(pack)
    yield from layer_faults(pack)
    yield from expert_faults(pack)
    yield from _absent_head(pack)


def find_warnings(pack: Pack) -> list[Exl3PackWarning]:
    """Every oddity of a pack that serving it can live with."""
    texts = [*pack.remarks, *claim_warnings(pack), *_tied_with_head(pack), *layer_warnings(pack)]
    if not any(is_embedding_name(key) for key in (*pack.dense, *pack.embeddings)) and _generates(pack):
        texts.append("no token embedding was recognised among the stored tensors")
    if consolidated := [name for name in pack.ignored_files if name.startswith("consolidated")]:
        texts.append(
            f"{consolidated[0]} is left aside here, but vLLM's --load-format auto reads it instead of the pack: "
            "delete it, or start with --load-format safetensors"
        )
    accounts = classify(pack)
    if accounts.unknown:
        size = sum(tensor.nbytes for tensor in accounts.unknown)
        texts.append(
            f"{counted(len(accounts.unknown), 'tensor')} ({size} bytes) neither served nor skipped under a rule: "
            f"{_sample([tensor.name for tensor in accounts.unknown])}"
        )
    copies = accounts.skipped.get("dense copy of an EXL3 module", [])
    if copies:
        texts.append(
            f"{counted(len(copies), 'module')} stored both as EXL3 and as .weight; the EXL3 form is served: "
            f"{_sample([tensor.name for tensor in copies])}"
        )
    return [Exl3PackWarning(text) for text in texts]


def _index_faults(pack: Pack) -> Iterator[Exl3PackError]:
    """vLLM reads only files that the index names, so an index that disagrees loses tensors silently."""
    if pack.index is None:
        return
    remedy = (
        "The index is of another revision: fetch it again, write a new one (`vllm-exl3 reindex`), or delete it and "
        "keep the pack's files only."
    )
    skipper = Skipper(pack)
    absent = [name for name in pack.index if name not in pack.tensors and pack.index[name] in pack.files]
    if absent:
        name = absent[0]
        yield _fault(
            f"{counted(len(absent), 'tensor')} that no file holds ({_sample(absent)})",
            f"{name} in {pack.index[name]}, as the index says",
            f"{INDEX} in {pack.source}",
            remedy,
        )
    unlisted = [
        name
        for name in pack.tensors
        if name not in pack.index and not _read_past_index(pack, name) and not skipper.rule_for_tensor(name)
    ]
    if unlisted:
        name = unlisted[0]
        yield _fault(
            f"{len(unlisted)} stored tensors that the index does not list ({_sample(unlisted)})",
            f"{name}, which is in {pack.tensors[name].file}, to be listed",
            f"{INDEX} in {pack.source}",
            remedy,
        )
    moved = [name for name, file in pack.index.items() if name in pack.tensors and pack.tensors[name].file != file]
    if moved:
        name = moved[0]
        yield _fault(
            f"{name} in {pack.tensors[name].file} ({len(moved)} such tensors)",
            f"{pack.index[name]}, the file that the index names",
            f"{INDEX} in {pack.source}",
            remedy,
        )


def _read_past_index(pack: Pack, name: str) -> bool:
    """N-gram tables lie in files of their own that no index lists; they are opened directly."""
    key = name.rpartition(".")[0]
    return key in pack.ngram_tables or key.rpartition(".shard_")[0] in pack.ngram_tables


def _declaration_faults(pack: Pack) -> Iterator[Exl3PackError]:
    for place, holder in (("", pack.config), *((f"{key}.", value) for key, value in pack.config.items())):
        block = holder.get("quantization_config") if isinstance(holder, Mapping) else None
        if block is None:
            continue
        where = f"{place}quantization_config in config.json of {pack.source}"
        if not isinstance(block, Mapping):
            yield _fault(f"a {type(block).__name__}", "an object", where, "Write it as exllamav3 does, or remove it.")
        elif str(block.get("quant_method", "exl3")).lower() != "exl3":
            yield _fault(
                f"quant_method {block['quant_method']!r} beside {len(pack.linears)} EXL3 linears",
                "exl3",
                where,
                "The block is the source model's: replace it in config.json by that of quantization_config.json.",
            )


def _orphans(pack: Pack) -> Iterator[Exl3PackError]:
    """Scales and markers whose trellis is nowhere: a file is missing that no index speaks of."""
    orphans = [
        tensor
        for name, tensor in pack.tensors.items()
        if name.endswith(_SCALES_AND_MARKERS) and name.rpartition(".")[0] not in pack.linears
    ]
    if orphans:
        yield _fault(
            f"{len(orphans)} scales or markers without a trellis ({_sample([tensor.name for tensor in orphans])})",
            f"{orphans[0].name.rpartition('.')[0]}.trellis",
            f"{orphans[0].name} in {orphans[0].file}",
            "A file of the pack is missing: fetch the pack again.",
        )


def _marker_faults(pack: Pack) -> Iterator[Exl3PackError]:
    markers = [linear.marker for linear in pack.linears.values() if linear.marker is not None]
    if pack.folder is None:
        first: dict[tuple[str, str], StoredTensor] = {}
        for marker in markers:
            first.setdefault((marker.file, _leaf(marker.name)), marker)
        markers = list(first.values())
    for marker, data in zip(markers, pack.read_many(markers), strict=True):
        try:
            check_marker(marker.name, int(np.frombuffer(data, "<i4")[0]), file=marker.file)
        except Exl3PackError as fault:
            yield fault


def _foreign_weights(pack: Pack) -> Iterator[Exl3PackError]:
    """Weights of another quantization that is not declared would be loaded without their scales."""
    if pack.quantization.get("non_routed_quantization"):
        return
    skipper = Skipper(pack)
    foreign = [
        tensor
        for tensor in pack.dense.values()
        if tensor.dtype in _FOREIGN_DTYPES and skipper.rule_for_tensor(tensor.name) is None
    ]
    if foreign:
        yield _fault(
            f"{len(foreign)} weights of dtype {foreign[0].dtype} ({_sample([tensor.name for tensor in foreign])})",
            "EXL3, 16- or 32-bit floats, or a non_routed_quantization in config.json that names their format",
            f"{foreign[0].name} in {foreign[0].file}",
            "Declare the source model's format as non_routed_quantization, or convert these layers to 16 bits.",
        )


def _foreign_table(pack: Pack) -> Iterator[Exl3PackError]:
    """A token embedding in another plugin's format, which no layer of the model would load."""
    if any(is_embedding_name(key) for key in (*pack.dense, *pack.embeddings)):
        return
    parts = [tensor for name, tensor in pack.tensors.items() if is_embedding_name(name.rpartition(".")[0])]
    if parts:
        key = parts[0].name.rpartition(".")[0]
        yield _fault(
            f"a token embedding of {', '.join(f'.{_leaf(part.name)} {part.dtype}' for part in parts)}",
            f"{key}.weight, a row code of exllamav3, or a table of vllm-exl3 embed-quant",
            f"{parts[0].name} in {parts[0].file}",
            "The embed_quant of another plugin, such as vllm-quantpack, has a format of its own, which is not read: "
            f"put {key}.weight in 16 bits back, from the pack as it was before or from the source model; "
            "`vllm-exl3 embed-quant` then makes a table that is served.",
        )


def _gaps(pack: Pack) -> Iterator[Exl3PackError]:
    """Layers that config.json counts and no file holds."""
    present = {int(match[1]) for name in pack.tensors if (match := MAIN_LAYER.match(name))}
    absent = list(islice((layer for layer in range(main_layers(pack.config)) if layer not in present), _NUMBERS))
    if present and absent:
        yield _fault(
            f"no tensor of layer {', '.join(map(str, absent))}",
            f"{main_layers(pack.config)} layers as config.json says",
            pack.source,
            "A file of the pack is missing or config.json is of another model: fetch the pack again.",
        )


def _absent_head(pack: Pack) -> Iterator[Exl3PackError]:
    if _generates(pack) and _tied(pack.config) is False and not _has_head(pack):
        yield _fault(
            "no lm_head, neither EXL3 nor dense",
            "a head, since tie_word_embeddings is false",
            f"config.json of {pack.source}",
            "A file of the pack is missing: fetch the pack again. If the model ties its head to the embedding, "
            "set tie_word_embeddings to true.",
        )


def _tied_with_head(pack: Pack) -> Iterator[str]:
    if _tied(pack.config) and _has_head(pack):
        yield "tie_word_embeddings is true, but the pack stores a head of its own: the stored head is served"


def _has_head(pack: Pack) -> bool:
    return any(is_head_name(key) for modules in (pack.linears, pack.dense) for key in modules)


def _tied(config: Mapping[str, Any]) -> bool | None:
    for holder in reversed(text_configs(config)):  # the root first
        if isinstance(holder.get("tie_word_embeddings"), bool):
            return bool(holder["tie_word_embeddings"])
    return None


def _generates(pack: Pack) -> bool:
    return any(name.endswith(("ForCausalLM", "ForConditionalGeneration")) for name in architectures(pack.config))


def _leaf(name: str) -> str:
    return name.rpartition(".")[2]


def _sample(names: list[str]) -> str:
    return ", ".join(names[:_SAMPLES]) + (" …" if len(names) > _SAMPLES else "")


def _fault(found: str, expected: str, where: str, remedy: str) -> Exl3PackError:
    return Exl3PackError(found=found, expected=expected, where=where, remedy=remedy)
