"""The part of ``verify`` that needs the 16-bit model: where models come from, and their divergences on a text."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from vllm_exl3.pack import Exl3PackError, Pack
from vllm_exl3.pack.metadata import parse_object
from vllm_exl3.pack.skip import main_layers
from vllm_exl3.verify.display import Display
from vllm_exl3.verify.int4_folder import METHODS, Int4Folder
from vllm_exl3.verify.judge import Divergence, FinalStates, compare, final_states
from vllm_exl3.verify.weights import DenseFolder, PackWeights, Weights

__all__ = ["check_others", "measure", "open_source"]


def open_source(model: str) -> DenseFolder:
    """The 16-bit model in a folder, or downloaded from the Hub.

    Raises:
        Exl3PackError: there is no such model, or it is an EXL3 pack.
    """
    if os.path.isdir(folder := os.path.expanduser(model)):
        source = DenseFolder(Path(folder))
        if any(name.endswith(".trellis") for name in source.names()):
            remedy = "Give the 16-bit model to --against, and other packs to --compare."
            raise _refused("an EXL3 pack", "the 16-bit model that the pack was made from", model, remedy)
        return source
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return DenseFolder(Path(snapshot_download(model, allow_patterns=["*.safetensors", "*.json"])))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError) as error:
        raise Exl3PackError(
            found=f"no such folder, and no such repository ({type(error).__name__})",
            expected="the 16-bit model that the pack was made from",
            where=model,
            remedy="Give its local folder, or its repository id where the Hub can be reached.",
        ) from error


def check_others(others: Sequence[str]) -> None:
    """Find out before anything is measured that a model to compare with is not there.

    Args:
        others: EXL3 packs, GGUF files or folders that transformers can load.

    Raises:
        Exl3PackError: there is no such file or folder, or its config.json says nothing that can be used.
    """
    for label in others:
        path = _path(label)
        if path.suffix != ".gguf":
            _method(_own_config(path, label), label)
        elif not path.is_file():
            raise _refused("no such file", "a GGUF file", label, "Check the path.")


def measure(
    pack: Pack, source: DenseFolder, others: Sequence[str], ids: torch.Tensor, display: Display
) -> dict[str, Divergence]:
    """Divergences from the 16-bit model by name: the pack first, then what it is compared with.

    A name is that of the folder or file. Where several have one name, all but the first are numbered: ``name (2)``.

    Args:
        pack: the pack.
        source: the 16-bit model.
        others: EXL3 packs, GGUF files or folders that transformers can load.
        ids: the text, ``[sequences, tokens]``.
        display: shows the progress.

    Raises:
        Exl3PackError: a model cannot be read, or has another vocabulary than the 16-bit model.
    """
    config = _config(Path(source.label))
    if not config:
        display.say(f"           no config.json in {source.label}: the pack's own describes both models")
        config = dict(pack.config)
    reference = _states(source, config, ids, display)
    if not bool(torch.isfinite(reference.hidden).all() and torch.isfinite(reference.head).all()):
        remedy = "Fetch it again: nothing can be compared with it as it is."
        raise _refused("activations that are not finite", "a 16-bit model that works", source.label, remedy)
    found: dict[str, Divergence] = {}
    for label in (None, *others):
        weights, own = (PackWeights(pack), pack.config) if label is None else _open_other(label, config)
        states = _states(weights, own, ids, display)
        if len(states.head) != len(reference.head):
            raise _refused(
                f"a vocabulary of {len(states.head)} tokens",
                f"one of {len(reference.head)}, as in the 16-bit model",
                weights.label,
                "Its predictions cannot be compared with the 16-bit model's: leave it out.",
            )
        name = _name(weights.label, found)
        with display.progress(f"comparing {name}", ids.numel() - len(ids), "tokens") as advance:
            found[name] = compare(reference, states, ids, advance)
        display.say(_account(found[name], weights.label))
    return found


def _account(found: Divergence, label: str) -> str:
    if found.not_finite:
        return f"divergence not finite at {found.not_finite} of {found.kl.size} tokens  {label}"
    kl = found.estimates()["kl"]
    return f"divergence {kl.mean:.4g} nats per token ({kl.low:.4g} to {kl.high:.4g})  {label}"


def _name(label: str, taken: Mapping[str, Any]) -> str:
    name = Path(os.path.abspath(os.path.expanduser(label))).name
    number, numbered = 1, name
    while numbered in taken:
        number += 1
        numbered = f"{name} ({number})"
    return numbered


def _states(weights: Weights, config: Any, ids: torch.Tensor, display: Display) -> FinalStates:
    layers = main_layers(config) or 1
    with display.progress(f"running {Path(weights.label).name}", layers, "layers") as advance:
        return final_states(weights, config, ids, advance)


def _open_other(label: str, config: dict[str, Any]) -> tuple[Weights, dict[str, Any]]:
    path = _path(label)
    if path.suffix == ".gguf":
        from vllm_exl3.verify.gguf_weights import gguf_weights

        return gguf_weights(path), config
    own = _own_config(path, label)
    method = _method(own, label)
    if method == "exl3":
        pack = Pack.open(path)
        return PackWeights(pack), dict(pack.config)
    if method is None:
        return DenseFolder(path), own
    if method in METHODS:
        return Int4Folder(path, own["quantization_config"]), own
    from vllm_exl3.verify.loaded import LoadedWeights

    return LoadedWeights(path, method), own


def _path(label: str) -> Path:
    return Path(os.path.expanduser(label))


def _method(config: Mapping[str, Any], label: str) -> str | None:
    """The ``quant_method`` that a config.json names, or None for a model that is not quantized."""
    block = config.get("quantization_config")
    if block is None:
        return None
    if not isinstance(block, dict) or not isinstance(block.get("quant_method"), str):
        remedy = "Fetch its config.json again, or leave it out of --compare."
        raise _refused(f"the quantization_config {str(block)[:80]}", "an object with quant_method", label, remedy)
    return str(block["quant_method"])


def _own_config(folder: Path, label: str) -> dict[str, Any]:
    own = _config(folder)
    if not own:
        what = "no config.json" if own is None else "an empty config.json"
        raise _refused(what, "an EXL3 pack, a GGUF file or a model's folder", label, "Check the path.")
    return own


def _config(folder: Path) -> dict[str, Any] | None:
    path = folder / "config.json"
    return parse_object(path.read_bytes(), str(path)) if path.is_file() else None


def _refused(found: str, expected: str, where: str, remedy: str) -> Exl3PackError:
    return Exl3PackError(found=found, expected=expected, where=where, remedy=remedy)
