"""The part of ``verify`` that needs the 16-bit model: where models come from, and their divergences on a text."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from vllm_exl3.pack import Exl3PackError, Pack
from vllm_exl3.pack.skip import main_layers
from vllm_exl3.verify.display import Display
from vllm_exl3.verify.int4_folder import METHODS, Int4Folder
from vllm_exl3.verify.judge import Divergence, FinalStates, compare, final_states
from vllm_exl3.verify.weights import DenseFolder, PackWeights, Weights

__all__ = ["measure", "open_source", "read_text"]

WINDOW = 256
"""Tokens of one sequence."""


def open_source(model: str) -> DenseFolder:
    """The 16-bit model in a folder, or downloaded from the Hub.

    Raises:
        Exl3PackError: there is no such model.
    """
    if os.path.isdir(os.path.expanduser(model)):
        return DenseFolder(Path(model).expanduser())
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


def read_text(file: Path, tokenizer: Path, tokens: int) -> torch.Tensor:
    """A text as sequences of `WINDOW` tokens.

    Args:
        file: the text, UTF-8.
        tokenizer: a folder with ``tokenizer.json``.
        tokens: at most so many.

    Returns:
        int64 ``[sequences, WINDOW]``.

    Raises:
        Exl3PackError: there is no tokenizer, or less text than two sequences.
    """
    from tokenizers import Tokenizer

    path = tokenizer / "tokenizer.json"
    if not path.is_file():
        raise _refused("no tokenizer.json", "the tokenizer's file", str(tokenizer), "Fetch it from the model's page.")
    ids = Tokenizer.from_file(str(path)).encode(file.read_text(encoding="utf-8"), add_special_tokens=False).ids
    count = min(len(ids), tokens) // WINDOW
    if count < 2:
        remedy = "Give a longer text, or a larger --tokens."
        raise _refused(f"{min(len(ids), tokens)} tokens", f"{2 * WINDOW} or more", str(file), remedy)
    return torch.tensor(ids[: count * WINDOW]).view(count, WINDOW)


def measure(
    pack: Pack, source: DenseFolder, others: Sequence[str], ids: torch.Tensor, display: Display
) -> dict[str, Divergence]:
    """Divergences from the 16-bit model by label: the pack first, then what it is compared with.

    Args:
        pack: the pack.
        source: the 16-bit model.
        others: EXL3 packs, GGUF files or folders that transformers can load.
        ids: the text, ``[sequences, tokens]``.
        display: shows the progress.
    """
    config = _config(Path(source.label)) or {key: pack.config[key] for key in pack.config}
    reference = _states(source, config, ids, display)
    found = {}
    for label in (pack.source, *others):
        weights, own = (PackWeights(pack), pack.config) if label == pack.source else _open_other(label, config)
        states = _states(weights, own, ids, display)
        with display.progress(f"comparing {Path(label).name}", ids.numel() - len(ids), "tokens") as advance:
            found[label] = compare(reference, states, ids, advance)
        kl = found[label].estimates()["kl"]
        display.say(f"divergence {kl.mean:.4g} nats per token ({kl.low:.4g} to {kl.high:.4g})  {label}")
    return found


def _states(weights: Weights, config: Any, ids: torch.Tensor, display: Display) -> FinalStates:
    layers = main_layers(config) or 1
    with display.progress(f"running {Path(weights.label).name}", layers, "layers") as advance:
        return final_states(weights, config, ids, advance)


def _open_other(label: str, config: dict[str, Any]) -> tuple[Weights, dict[str, Any]]:
    path = Path(label).expanduser()
    if path.suffix == ".gguf":
        from vllm_exl3.verify.gguf_weights import gguf_weights

        return gguf_weights(path), config
    own = _config(path)
    if own is None:
        raise _refused("no config.json", "an EXL3 pack, a GGUF file or a model's folder", label, "Check the path.")
    method = own.get("quantization_config", {}).get("quant_method")
    if method == "exl3":
        pack = Pack.open(path)
        return PackWeights(pack), dict(pack.config)
    if method is None:
        return DenseFolder(path), own
    if method in METHODS:
        return Int4Folder(path, own["quantization_config"]), own
    from vllm_exl3.verify.loaded import LoadedWeights

    return LoadedWeights(path, str(method)), own


def _config(folder: Path) -> dict[str, Any] | None:
    path = folder / "config.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def _refused(found: str, expected: str, where: str, remedy: str) -> Exl3PackError:
    return Exl3PackError(found=found, expected=expected, where=where, remedy=remedy)
