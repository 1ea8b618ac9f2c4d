#!/usr/bin/env python3
"""What an int8 or int4 embedding costs a language model: KL divergence from the same pack with its 16-bit table.

    python benchmarks/embedding_kl.py PACK [--text FILE ...] [--tokens 4096] [--write]

Everything but the table is the same, so the divergence is the table's alone. The text is this repository's
README and documentation unless files are named; it is read in windows of 512 tokens.
"""

import argparse
import hashlib
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.serving.engine import engine, logits_of
from vllm_exl3.tools.results import write_results
from vllm_exl3.tools.table_writer import quantize_embedding

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "cpu" / "embedding_kl.json"
WINDOW = 512


def log_probabilities(pack: Path, windows: list[list[int]], target: Path) -> np.ndarray:
    """Served log probabilities ``[tokens, vocabulary]`` in float32, kept in a file."""
    kept: np.ndarray | None = None
    with engine(pack, max_model_len=WINDOW + 1, max_num_batched_tokens=WINDOW + 1, max_num_seqs=1) as llm:
        for number, ids in enumerate(windows):
            rows = torch.log_softmax(logits_of(llm, ids), -1).numpy()
            if kept is None:
                kept = np.lib.format.open_memmap(target, "w+", np.float32, (len(windows) * WINDOW, rows.shape[1]))
            kept[number * WINDOW : (number + 1) * WINDOW] = rows
    assert kept is not None
    return kept


def divergence(reference: np.ndarray, other: np.ndarray) -> tuple[float, float, float]:
    """KL in nats per token, its standard error over tokens, and how often the likeliest token is the same."""
    each, same = [], 0
    for start in range(0, len(reference), WINDOW):
        p, q = (torch.from_numpy(rows[start : start + WINDOW]).double() for rows in (reference, other))
        each.append((p.exp() * (p - q)).sum(-1))
        same += int((p.argmax(-1) == q.argmax(-1)).sum())
    values = torch.cat(each)
    return float(values.mean()), float(values.std() / len(values) ** 0.5), same / len(values)


def main() -> None:
    """Measure, print, and write the results if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pack", type=Path)
    parser.add_argument("--text", type=Path, nargs="+", default=[ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))])
    parser.add_argument("--tokens", type=int, default=8 * WINDOW)
    parser.add_argument("--write", action="store_true", help=f"write {RESULTS.relative_to(ROOT)}")
    arguments = parser.parse_args()
    text = "\n\n".join(path.read_text(encoding="utf-8") for path in arguments.text)
    ids = Tokenizer.from_file(str(arguments.pack / "tokenizer.json")).encode(text).ids[: arguments.tokens]
    windows = [ids[start : start + WINDOW] for start in range(0, len(ids) - WINDOW + 1, WINDOW)]
    digest = hashlib.sha256(np.array(windows, "<u4").tobytes()).hexdigest()
    rows = []
    with tempfile.TemporaryDirectory(dir=arguments.pack.parent) as scratch:
        reference = log_probabilities(arguments.pack, windows, Path(scratch) / "reference.npy")
        for bits in (8, 4):
            folder = Path(scratch) / f"int{bits}"
            made = quantize_embedding(arguments.pack, folder, bits)
            kl, error, same = divergence(reference, log_probabilities(folder, windows, Path(scratch) / f"{bits}.npy"))
            print(f"int{bits}: KL {kl:.2e} ± {error:.1e} nats per token, same likeliest token {same:.2%}", flush=True)
            rows.append(
                {
                    "kernel": f"embedding_int{bits}",
                    "pack": arguments.pack.resolve().name,
                    "bits": bits,
                    "tokens": len(windows) * WINDOW,
                    "tokens_sha256": digest,
                    "source_bytes": made.source_bytes,
                    "table_bytes": made.table_bytes,
                    "error": made.relative_error,
                    "kl": kl,
                    "kl_standard_error": error,
                    "same_likeliest_token": same,
                }
            )
    if arguments.write:
        write_results(RESULTS, rows, machine="cpu", command="python benchmarks/embedding_kl.py PACK --write")


if __name__ == "__main__":
    main()
