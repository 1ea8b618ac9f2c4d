"""Writes the planned parts of docs/recipes.md and docs/memory.md by running plans on packs of public models' shapes.

The packs are headers without contents, made in a temporary folder. ``--check`` only says whether the pages are current.
"""

import argparse
import re
import sys
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from generated import ROOT, write_or_check

from vllm_exl3.pack.pack import Pack
from vllm_exl3.pack.wording import byte_size
from vllm_exl3.plan.advice import shell
from vllm_exl3.plan.as_data import CARDS
from vllm_exl3.plan.cache import CACHE_TYPES, token_bytes
from vllm_exl3.plan.cpu_plan import make_cpu_plan
from vllm_exl3.plan.gpus import find_gpu
from vllm_exl3.plan.layers import cache_layers
from vllm_exl3.plan.serving_plan import Plan, Wish, make_plan
from vllm_exl3.tools.random_pack import write_random_pack

GIB = 1 << 30

_LLAMA = {"head_dim": 128, "kv_heads": 8, "vocab": 128256}
_QWEN = {"head_dim": 128, "kv_heads": 8, "vocab": 151936, "architecture": "Qwen3ForCausalLM"}
_EXPERTS = {**_QWEN, "kv_heads": 4, "architecture": "Qwen3MoeForCausalLM", "experts": 128, "top_k": 8}
MODELS: dict[str, dict[str, Any]] = {
    "Llama 3.1 8B": {**_LLAMA, "hidden": 4096, "intermediate": 14336, "layers": 32, "heads": 32},
    "Llama 3.3 70B": {**_LLAMA, "hidden": 8192, "intermediate": 28672, "layers": 80, "heads": 64},
    "Qwen3 14B": {**_QWEN, "hidden": 5120, "intermediate": 17408, "layers": 40, "heads": 40},
    "Qwen3 32B": {**_QWEN, "hidden": 5120, "intermediate": 25600, "layers": 64, "heads": 64},
    "Qwen3 30B-A3B": {**_EXPERTS, "hidden": 2048, "intermediate": 768, "layers": 48, "heads": 32},
    "Qwen3 235B-A22B": {**_EXPERTS, "hidden": 4096, "intermediate": 1536, "layers": 94, "heads": 64},
}
"""Shapes from the models' public configurations."""

RECIPES: dict[str, dict[str, Any]] = {
    "8 GB": {"model": "Llama 3.1 8B", "bits": 4, "gpu": "RTX 3070", "needs": "one 8 GB GPU", "length": 8192,
             "seqs": 16},
    "12 GB": {"model": "Qwen3 14B", "bits": 4, "gpu": "RTX 3060", "needs": "one 12 GB GPU", "length": 16384,
              "cache_type": "fp8", "seqs": 16},
    "16 GB": {"model": "Qwen3 30B-A3B", "bits": 3, "gpu": "RTX 4060 Ti", "needs": "one 16 GB GPU", "length": 16384,
              "seqs": 32},
    "24 GB": {"model": "Qwen3 32B", "bits": 4, "gpu": "RTX 3090", "needs": "one 24 GB GPU", "length": 16384,
              "cache_type": "fp8", "seqs": 16},
    "24 GB, experts": {"model": "Qwen3 30B-A3B", "bits": 5, "gpu": "RTX 4090", "needs": "one 24 GB GPU",
                       "length": 16384, "seqs": 16},
    "two unequal cards": {"model": "Qwen3 32B", "bits": 5, "gpu": "RTX 3090", "gpu_gib": (24, 12), "length": 16384,
                          "needs": "a 24 GB and a 12 GB GPU", "seqs": 16},
    "DGX Spark": {"model": "Qwen3 30B-A3B", "bits": 6, "gpu": "DGX Spark", "needs": "a DGX Spark", "length": 40960,
                  "utilization": 0.8},
    "128 GB of RAM": {"model": "Qwen3 235B-A22B", "bits": 2.5, "gpu": "RTX 4090", "host": 100, "length": 8192,
                      "needs": "one 24 GB GPU and 128 GB of RAM", "seqs": 16},
    "H100": {"model": "Llama 3.3 70B", "bits": 4, "gpu": "H100", "needs": "one H100", "length": 32768,
             "cache_type": "int4_per_token_head", "seqs": 64},
    "H200": {"model": "Llama 3.1 8B", "bits": 4, "gpu": "H200", "needs": "one H200", "length": 8448, "seqs": 128},
}  # fmt: skip
CPU = {"model": "Llama 3.1 8B", "bits": 4, "host": 16, "length": 8192, "needs": "16 GB of RAM, no GPU"}


class Packs:
    """Hollow packs by model and bits, each made once."""

    def __init__(self, folder: Path) -> None:
        self.get: Callable[[str, float], Pack] = cache(self._make)
        self._folder = folder

    def _make(self, model: str, bits: float) -> Pack:
        shape = MODELS[model]
        folder = self._folder / f"{model} {bits}"
        return Pack.open(write_random_pack(folder, hollow=True, bits=bits, head_bits=6, **shape))


def plan_of(packs: Packs, recipe: dict[str, Any]) -> tuple[Pack, Plan]:
    """The plan of a recipe."""
    gpu = find_gpu(recipe["gpu"])
    sizes = tuple(int(gib * GIB) for gib in recipe.get("gpu_gib", (gpu.memory_gib,)))
    names = ("length", "cache_type", "seqs", "utilization")
    options = {name: recipe[name] for name in names if name in recipe}
    host = recipe["host"] * GIB if "host" in recipe else None
    pack = packs.get(recipe["model"], recipe["bits"])
    return pack, make_plan(pack, Wish(gpu, sizes, gpus=len(sizes), host_bytes=host, **options))


def recipe_text(packs: Packs, name: str) -> str:
    """One recipe: the command, and what the plan says."""
    recipe = RECIPES[name]
    pack, plan = plan_of(packs, recipe)
    if not plan.fits:
        raise SystemExit(f"the recipe for {name} does not fit")
    line = shell(pack, plan).replace(f"'{pack.source}'", "<pack>").replace(pack.source, "<pack>")
    ranks = plan.ranks
    rows = [("weights", " + ".join(byte_size(rank.placement.gpu) for rank in ranks))]
    if plan.offloaded:
        host = sum(rank.placement.host for rank in ranks)
        pinned = sum(rank.placement.pinned for rank in ranks)
        rows.append(("weights in host memory", f"{byte_size(host)}, which pins {byte_size(pinned)}"))
    rows.append(("workspace", " + ".join(byte_size(sum(rank.workspace.values())) for rank in ranks)))
    for kind, capacity in plan.capacity.items():
        if capacity is not None:
            rows.append((f"KV cache, {kind}", f"{capacity.tokens:,} tokens"))
    rows.append(("decode", ", ".join(f"{speed:,.0f} tokens/s with {batch}" for batch, speed in plan.decode.items())))
    rows.append(("prompt", ", ".join(f"{speed:,.0f} tokens/s of {tokens:,}" for tokens, speed in plan.prefill.items())))
    words = f"A pack of {recipe['model']} at {recipe['bits']:g} bits with a head of 6, planned for {_on(plan)}:"
    return f"{words}\n\n```sh\n# needs: {recipe['needs']}\n{_wrapped(line)}\n```\n\n" + _table(rows)


def _on(plan: Plan) -> str:
    name = plan.wish.gpu.name
    return f"an {name}" if name[0] in "AEFHLMNORSX" else f"a {name}"


def cpu_text(packs: Packs) -> str:
    """The recipe without a GPU."""
    plan = make_cpu_plan(packs.get(CPU["model"], CPU["bits"]), CPU["host"] * GIB, length=CPU["length"])
    assert plan.fits and plan.capacity is not None
    rows = [
        ("weights", byte_size(plan.weights)),
        ("KV cache", f"{plan.cache_gib} GiB, {plan.capacity.tokens:,} tokens"),
        ("decode", f"{plan.tokens_per_second:.1f} tokens/s with {plan.threads} threads"),
    ]
    words = f"A pack of {CPU['model']} at {CPU['bits']:g} bits with a head of 6:"
    return f"{words}\n\n```sh\n# needs: {CPU['needs']}\n{plan.command('<pack>')}\n```\n\n" + _table(rows)


def cards_text(packs: Packs) -> str:
    """Which models fit which cards: the longest context of one request in each cache type."""
    lines = ["| model | bits | " + " | ".join(f"{gib} GB" for gib in CARDS) + " |", "|---|---|" + "---|" * len(CARDS)]
    for model, bits in (("Llama 3.1 8B", 4), ("Qwen3 14B", 4), ("Qwen3 32B", 4), ("Qwen3 30B-A3B", 4),
                        ("Llama 3.3 70B", 4)):  # fmt: skip
        pack, cells = packs.get(model, bits), []
        for gib, gpu in CARDS.items():
            plan = make_plan(pack, Wish(find_gpu(gpu), (gib * GIB,), length=131072, seqs=16))
            longest = [found.longest if found else 0 for found in plan.capacity.values()]
            cells.append(" / ".join(f"{tokens // 1024}k" for tokens in longest) if longest[-1] >= 1024 else "no")
        lines.append(f"| {model} | {bits} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def tokens_text(packs: Packs) -> str:
    """KV cache of a token."""
    lines = ["| model | " + " | ".join(CACHE_TYPES) + " |", "|---|" + "---|" * len(CACHE_TYPES)]
    for model in MODELS:
        if model == "Qwen3 235B-A22B":
            continue
        layers = cache_layers(packs.get(model, 4).config).layers
        cells = [byte_size(sum(token_bytes(layer, kind) for layer in layers)) for kind in CACHE_TYPES]
        lines.append(f"| {model} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _table(rows: list[tuple[str, str]]) -> str:
    return "| | |\n|---|---|\n" + "".join(f"| {name} | {value} |\n" for name, value in rows)


def _wrapped(line: str) -> str:
    """A command over several lines, broken before options."""
    lines, current = [], ""
    for part in re.split(r" (?=--)", line):
        if current and len(current) + len(part) > 110:
            lines.append(current + " \\")
            current = "    " + part
        else:
            current = f"{current} {part}" if current else part
    return "\n".join([*lines, current])


PARTS: dict[str, Callable[[Packs], str]] = {
    **{name: (lambda packs, name=name: recipe_text(packs, name)) for name in RECIPES},  # type: ignore[misc]
    "CPU only": cpu_text,
    "cards": cards_text,
    "tokens": tokens_text,
}
PAGES = ("recipes.md", "memory.md")
_PART = re.compile(r"(<!-- planned: (.+?) -->\n).*?(<!-- end of planned -->\n)", re.DOTALL)


def filled(text: str, packs: Packs) -> str:
    """A page with every part between its marks replaced."""
    return _PART.sub(lambda match: f"{match[1]}\n{PARTS[match[2]](packs)}\n{match[3]}", text)


def main() -> int:
    """Write the pages, or with ``--check`` compare."""
    parser = argparse.ArgumentParser(description="Write the planned parts of docs/recipes.md and docs/memory.md.")
    parser.add_argument("--check", action="store_true", help="only say whether they are current")
    check = parser.parse_args().check
    paths = [ROOT / "docs" / name for name in PAGES]
    with tempfile.TemporaryDirectory() as temporary:
        packs = Packs(Path(temporary))
        made = {path: filled(path.read_text(encoding="utf-8"), packs) for path in paths}
    return write_or_check(made, check=check)


if __name__ == "__main__":
    sys.exit(main())
