"""Faults that the pass over the tensors finds in damaged copies of golden packs; none in intact ones."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.verify import damage
from vllm_exl3.pack import Codebook, Pack
from vllm_exl3.verify.tensors import scan_tensors
from vllm_exl3.verify.trellis import diagnose

PACKS = ("llama_tied-2.0-mcg", "llama_odd-4.0-mul1")


def test_nothing_in_an_intact_pack(golden_pack: Path) -> None:
    pack, read = Pack.open(golden_pack), []
    scan = scan_tensors(pack, read.append)
    assert scan.findings == []
    assert scan.nbytes == sum(read) == pack.nbytes
    assert scan.undecided == sum(linear.bits < 1.5 for linear in pack.linears.values())


@pytest.mark.parametrize("name", [PACKS[0], pytest.param(PACKS[1], marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("harm", "check"),
    [
        (damage.set_scale("suh", np.nan), "not finite"),
        (damage.set_scale("svh", np.inf), "not finite"),
        (damage.set_scale("suh", 0.0, -1), "scales"),
        (damage.set_scale("svh", 6e4), "scales"),
        (damage.fill(b"\0"), "zeros"),
        (damage.fill(b"\0", 0.97), "zeros"),
        (damage.fill(b"\xff"), "statistics"),
        (damage.randomize, "statistics"),
        (damage.bytes_of_embedding, "statistics"),
        (damage.bytes_of_head, "statistics"),
        (damage.duplicate, "duplicate"),
    ],
)
def test_damage_is_found(name: str, harm: Callable[[Path], str], check: str, tmp_path: Path) -> None:
    pack = damage.copy_of(name, tmp_path)
    where = harm(pack)
    assert [(finding.check, finding.where) for finding in scan_tensors(Pack.open(pack)).findings] == [(check, where)]


@pytest.mark.parametrize("harm", [damage.swap, damage.flip_signs, damage.foreign_head])
def test_what_needs_the_source_is_not_found(harm: Callable[[Path], str], tmp_path: Path) -> None:
    """The limits that the documents state; `--against` is for these."""
    pack = damage.copy_of(PACKS[1], tmp_path)
    harm(pack)
    assert scan_tensors(Pack.open(pack)).findings == []


@pytest.mark.parametrize("name", PACKS)
def test_wrong_codebook_is_found(name: str) -> None:
    folder = damage.DATA / "packs" / name
    for linear in [*Pack.open(folder).linears.values()][-3:]:
        words = np.frombuffer(damage.raw(folder, linear.trellis), "<u2").reshape(-1, 8 * linear.half_bits)
        assert diagnose([(0, words)], linear.half_bits, linear.codebook) is None
        for book in set(Codebook) - {linear.codebook}:
            reason = str(diagnose([(0, words)], linear.half_bits, book))
            assert "uniform" in reason
            if linear.bits >= 4:  # at 2 bits a matrix of this size does not tell which reading is the right one
                assert f"K = {linear.bits:g} with codebook {linear.codebook.label}" in reason
