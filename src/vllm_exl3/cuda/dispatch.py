"""Which form of the GEMM serves how many tokens, on which GPU.

The table is data (``dispatch.json``): for each architecture the crossovers that ``benchmarks/gpu_linear.py --tune``
measured. A GPU without an entry takes the model of `modelled`. There are three classes at most (identity, fp16 in the
narrow kernel, fp16 in the warpgroup kernel) below the prefill kernel: inside one, a row's bits do not depend on the
other rows. How the prefill kernel cuts k, and so the order of its sums, depends on the number of rows as well.
"""

import functools
import importlib.resources
import json
from collections.abc import Collection
from dataclasses import dataclass

from vllm_exl3.cuda.geometry import Form
from vllm_exl3.pack.stored import Codebook

__all__ = [
    "FAST_TOKENS",
    "Crossover",
    "choose_form",
    "crossover",
    "gemm_rows",
    "modelled",
    "origin",
    "prefill_from",
    "warpgroups",
]

_NARROW = 16
"""The largest number of tokens that the kernels of mma.sync take in one tile."""


@dataclass(frozen=True, slots=True)
class Crossover:
    """The largest number of tokens that the identities serve.

    Attributes:
        mul1: for layers with a mul1 shard.
        halves: for mcg and 3INST.
        measured: where the numbers come from: a GPU's name, or None for the model.
    """

    mul1: int
    halves: int
    measured: str | None


def modelled() -> Crossover:
    """Crossovers from instruction counts, for GPUs that nobody measured.

    An MMA of the integer identity covers 4 tokens, one of the pair identity 8, and each takes twice the MMAs a weight
    that decoding to fp16 takes; decoding costs 1.3 (mul1) or 1.2 (pairs) further instructions a weight. One group of
    columns is where the identity wins; a second one costs more than decoding does.
    """
    return Crossover(mul1=4, halves=8, measured=None)


@functools.cache
def _table() -> dict[str, dict[str, object]]:
    text = (importlib.resources.files("vllm_exl3.cuda") / "dispatch.json").read_text(encoding="utf-8")
    table: dict[str, dict[str, object]] = json.loads(text)
    return table


@functools.cache
def crossover(architecture: str) -> Crossover:
    """The crossovers for an architecture such as ``sm_90a``."""
    entry = _table().get(architecture)
    if entry is None:
        return modelled()
    return Crossover(mul1=int(str(entry["mul1"])), halves=int(str(entry["halves"])), measured=str(entry["gpu"]))


def origin(architecture: str, gpu: str) -> str:
    """Where it comes from which kernel serves how many tokens, in words: for the report of an engine's start.

    Args:
        architecture: NVRTC's name of the GPU.
        gpu: the GPU's own name.
    """
    measured = crossover(architecture).measured
    if measured is None:
        return f"the kernel for each number of tokens is chosen by a model, as nobody has measured {architecture}"
    other = "" if measured == gpu else f"; {gpu} is taken to be alike ({architecture})"
    return f"the kernel for each number of tokens is chosen as measured on {measured}{other}"


_MODELLED_PREFILL = 49
"""Tokens from which on the prefill kernel is modelled to win: four tiles of the narrow one cost more than it does."""


@functools.cache
def prefill_from(architecture: str, *, fills: bool) -> int:
    """The smallest number of tokens that the prefill kernel serves.

    Args:
        architecture: NVRTC's name of the GPU.
        fills: whether the layer gives every multiprocessor work for long, so that what the end of a tile costs counts
            little, or divides evenly among them.
    """
    entry = _table().get(architecture)
    return int(str(entry["prefill_filled" if fills else "prefill"])) if entry else _MODELLED_PREFILL


def gemm_rows(architecture: str, kinds: Collection[tuple[int, int]], units: float, *, int8: bool = False) -> range:
    """The numbers of tokens that the GEMM kernel (gemm/gemm.cu) serves; empty where it serves none.

    Args:
        architecture: NVRTC's name of the GPU.
        kinds: (half_bits, codebook) of the layer's shards.
        units: of 128 × 256 weights, a multiprocessor: with few, what a launch costs at its ends decides.
        int8: with int8 products.
    """
    mul1 = all(codebook == Codebook.MUL1 for _, codebook in kinds)
    table = _table().get(architecture, {}).get("gemm_int8" if int8 else "gemm" if mul1 else "gemm_halves", [])
    assert isinstance(table, list)
    return next((range(first, last + 1) for least, first, last in table if units >= least), range(0))


def warpgroups(architecture: str) -> bool:
    """True where the warpgroup kernels run."""
    return architecture == "sm_90a"


FAST_TOKENS = 8
"""The largest number of tokens that the fast mode of few tokens serves: one product of int8 takes so many."""


def choose_form(
    codebooks: frozenset[int], rows: int, architecture: str, *, one_class: bool = False, fast: bool = False
) -> Form:
    """The form that serves ``rows`` tokens of a layer with these codebooks.

    Args:
        codebooks: `Codebook` values of the layer's shards.
        rows: tokens.
        architecture: NVRTC's name of the GPU.
        one_class: decode to fp16 for every number of tokens, so that a row's bits never depend on the batch.
        fast: for mul1, activations of one int8 where they save time: above the tokens that two serve as fast.
    """
    limits = crossover(architecture)
    largest = limits.mul1 if Codebook.MUL1 in codebooks else limits.halves
    wide = warpgroups(architecture)
    if rows <= largest and not one_class:
        return Form(identity=True, tile_rows=4 if largest <= 4 else 8)
    if fast and rows <= FAST_TOKENS and not one_class:
        return Form(identity=True, tile_rows=FAST_TOKENS, fast=True)
    if not wide or (rows <= _NARROW and not one_class):
        return Form(identity=False, tile_rows=8 if rows <= 8 else _NARROW)
    return Form(identity=False, tile_rows=next((tile for tile in (32, 64) if rows <= tile), 128))
