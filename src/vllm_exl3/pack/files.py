"""Which files of a pack hold weights, and what to say when they are not all there."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vllm_exl3.pack.errors import Exl3PackError
from vllm_exl3.pack.metadata import declared_blocks
from vllm_exl3.pack.source import Source

if TYPE_CHECKING:
    from vllm_exl3.pack.pack import Pack

__all__ = [
    "INDEX",
    "absent_file_fault",
    "missing_file_fault",
    "no_config_fault",
    "no_trellis_fault",
    "sharded_state_fault",
    "weight_files",
]

INDEX = "model.safetensors.index.json"

_NUMBERED = re.compile(r"^(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.safetensors$")

_SHARDED_STATE = re.compile(r"^model-rank-\d+-part-\d+\.safetensors$")
"""What vLLM's ShardedStateLoader calls its files by default."""

_OTHER_FORMATS = (
    (".q_weight", "EXL2 (ExLlamaV2)"),
    (".qweight", "GPTQ or AWQ"),
    (".weight_packed", "compressed-tensors"),
    (".weight_scale_inv", "block FP8"),
    (".weight_scale", "FP8 or NVFP4"),
)


def weight_files(names: tuple[str, ...]) -> tuple[tuple[str, ...], dict[str, str]]:
    """The safetensors files to read, those that vLLM's pattern finds, and those left aside with the reason."""
    found = [name for name in names if name.endswith(".safetensors")]
    ignored = {name: "its name begins with a dot: vLLM does not read it" for name in found if name.startswith(".")}
    seen = [name for name in found if name not in ignored]
    consolidated = [name for name in seen if _consolidated(name)]
    if len(consolidated) < len(seen):
        ignored |= dict.fromkeys(consolidated, "the source's own layout beside the Hugging Face one")
    return tuple(name for name in found if name not in ignored), ignored


def _consolidated(name: str) -> bool:
    return name.startswith("consolidated")


def missing_file_fault(pack: "Pack") -> Exl3PackError | None:
    """The fault of a pack whose index or file numbering names files that are not there."""
    return absent_file_fault(pack, (pack.index or {}).values())


def absent_file_fault(pack: "Pack", indexed: Iterable[str]) -> Exl3PackError | None:
    """The same, given the files that an index names: of an index that cannot be read, none."""
    wanted = dict.fromkeys(indexed, INDEX)
    for name in pack.files:
        if match := _NUMBERED.match(name):
            count = int(match["count"])
            for number in range(1, count + 1):
                wanted.setdefault(f"{match['stem']}-{number:05d}-of-{count:05d}.safetensors", f"the name {name}")
    readable = {*pack.files, *(name for name in pack.ignored_files if not name.startswith("."))}
    missing = sorted(set(wanted) - readable)
    if not missing:
        return None
    more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
    return Exl3PackError(
        found=f"no {', '.join(missing[:3])}{more}",
        expected=f"every file that {wanted[missing[0]]} refers to",
        where=pack.source,
        remedy="Fetch the missing files; if the index is from another revision, fetch the index too.",
    )


def no_config_fault(where: str) -> Exl3PackError:
    """The fault of a folder or repository ``where`` that does not say what its tensors are of."""
    return Exl3PackError(
        found="no config.json, or one that says nothing",
        expected="the model's own: vLLM takes the architecture from it",
        where=where,
        remedy="Fetch it from where the weights came from.",
    )


def sharded_state_fault(names: Sequence[str], where: str) -> Exl3PackError | None:
    """The fault of a folder that vLLM saved from a running engine: parameters as one rank holds them, without headers.

    Args:
        names: the safetensors files.
        where: the folder.
    """
    if not names or not all(_SHARDED_STATE.match(name) for name in names):
        return None
    return Exl3PackError(
        found=f"{names[0]}, which vLLM's save_sharded_state wrote: flat parameters of one rank",
        expected="the pack, whose tensors say which bit rate, codebook and shape each of them has",
        where=where,
        remedy="Serve the pack itself, without --load-format sharded_state. Nothing is repacked while it loads, so "
        "saved shards would not start faster.",
    )


def no_trellis_fault(files: Source, tensors: Mapping[str, object], config: Mapping[str, Any]) -> Exl3PackError:
    """The fault of a place that holds no EXL3 tensor at all, naming what it holds instead."""
    branches = files.branches()
    if not tensors:
        found = "no *.safetensors"
        if any(name.endswith(".gguf") for name in files.names()):
            found = "GGUF files and no *.safetensors"
    else:
        kinds = [label for suffix, label in _OTHER_FORMATS if any(name.endswith(suffix) for name in tensors)]
        methods = [str(block.get("quant_method")) for _, block in declared_blocks(config) if block.get("quant_method")]
        what = f"tensors of {kinds[0]}" if kinds else f"{len(tensors)} tensors and no trellis"
        found = what + (f", quant_method {methods[0]!r}" if methods else "")
    remedy = "Give the folder or repository of an EXL3 pack (tensors named *.trellis)."
    if not tensors and any(block.get("quant_method") == "exl3" for _, block in declared_blocks(config)):
        remedy = (
            "config.json declares EXL3, but the weights are not beside it: download them too. Load formats that "
            "stream weights from elsewhere are not supported, since the headers say how to build the model."
        )
    if branches:
        remedy = f"EXL3 repositories keep one branch per bit rate; pass --revision with one of: {', '.join(branches)}."
    return Exl3PackError(found=found, expected="EXL3 tensors (*.trellis)", where=files.label, remedy=remedy)
