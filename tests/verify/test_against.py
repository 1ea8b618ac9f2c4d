"""Faults that the comparison with the 16-bit model finds and names, on damaged copies of a golden pack."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.verify import damage
from vllm_exl3.pack import Pack
from vllm_exl3.verify.against import compare_weights, expected_error
from vllm_exl3.verify.weights import DenseFolder

NAME = "llama_tied-3.0-mul1"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> DenseFolder:
    return DenseFolder(damage.source_of(damage.DATA / "packs" / NAME, tmp_path_factory.mktemp("source") / "model"))


def test_errors_of_an_intact_pack(source: DenseFolder) -> None:
    pack = Pack.open(damage.DATA / "packs" / NAME)
    errors, findings, missing = compare_weights(pack, source)
    assert not findings and not missing
    assert [error.key for error in errors] == list(pack.linears)
    assert all(0.9 * error.expected < error.error < 1.1 * error.expected for error in errors)


@pytest.mark.parametrize(
    ("harm", "cause"),
    [
        (damage.swap, "these are the weights of model.layers.1.mlp.up_proj"),
        (damage.flip_signs, "the signs of 128 of 256 input channels are flipped"),
        (damage.neighbour_k, "relative error"),
        (damage.fill(b"\0", 0.5), "relative error"),
        (damage.foreign_head, "relative error"),
    ],
)
def test_damage_is_found(harm: Callable[[Path], str], cause: str, source: DenseFolder, tmp_path: Path) -> None:
    folder = damage.copy_of(NAME, tmp_path)
    where = harm(folder).removesuffix(".trellis")
    findings = compare_weights(Pack.open(folder), source)[1]
    assert findings[0].where == where and cause in findings[0].found
    assert len(findings) == (2 if harm is damage.swap else 1)


def test_expected_errors_fall_by_half_a_bit() -> None:
    assert expected_error(3) == pytest.approx(0.0184**0.5)
    assert expected_error(6) == pytest.approx(expected_error(4) / 4)
