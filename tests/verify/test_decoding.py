"""Every decoder of this machine agrees on golden packs, and one that is wrong in a single bit is found."""

from pathlib import Path

import numpy as np
import pytest

from tests.conftest import DATA
from tests.ops.cpu_cases import instruction_sets
from vllm_exl3.pack import Codebook, Pack, codec
from vllm_exl3.verify.decoders import decoders
from vllm_exl3.verify.decoding import compare_decoders, sample_linears

PACK = DATA / "packs" / "llama_odd-4.0-mul1"


def test_decoders_agree(golden_pack: Path) -> None:
    pack = Pack.open(golden_pack)
    found, _ = decoders()
    steps: list[float] = []
    result = compare_decoders(pack, found, steps.append)
    assert result.findings == []
    assert result.decoders[0] == "numpy" and len(result.decoders) >= 2
    assert len(steps) == len(result.linears) == len(sample_linears(pack))
    sampled = {(pack.linears[key].half_bits, pack.linears[key].codebook) for key in result.linears}
    assert sampled == {(linear.half_bits, linear.codebook) for linear in pack.linears.values()}


def test_native_instruction_sets_are_restored() -> None:
    library = pytest.importorskip("vllm_exl3.cpu.library")
    if library.unavailable() is not None:
        pytest.skip(library.unavailable())
    before = library.library().exl3_isa()
    found, _ = decoders()
    native = {name.removeprefix("native on cpu (").rstrip(")") for name in found if name.startswith("native on cpu")}
    assert native == set(instruction_sets()) and "scalar" in native
    compare_decoders(Pack.open(PACK), found)
    assert library.library().exl3_isa() == before


def _one_bit(words: np.ndarray, half_bits: int, codebook: Codebook) -> np.ndarray:
    weights = codec.decode(words, half_bits, codebook)
    weights.view(np.uint16)[5, 7] ^= 1
    return weights


def _cut(words: np.ndarray, half_bits: int, codebook: Codebook) -> np.ndarray:
    return codec.decode(words, half_bits, codebook)[:, :-16]


def _raises(words: np.ndarray, half_bits: int, codebook: Codebook) -> np.ndarray:
    raise RuntimeError("no kernel image")


@pytest.mark.parametrize(
    ("decoder", "found"),
    [(_one_bit, "1 of "), (_cut, "a matrix "), (_raises, "no kernel image")],
)
def test_wrong_decoder_is_found(decoder, found: str) -> None:
    result = compare_decoders(Pack.open(PACK), {"numpy": codec.decode, "wrong": decoder})
    assert [finding.where for finding in result.findings] == result.linears
    assert all(finding.check == "decode" and found in finding.found for finding in result.findings)
    if decoder is _one_bit:
        assert "first [5, 7]" in result.findings[0].found
