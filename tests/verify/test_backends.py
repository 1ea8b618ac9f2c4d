"""All decoders of this machine agree, one that does not is named, and the canary tells runs apart."""

import numpy as np
import pytest

from tests.verify import damage
from vllm_exl3.pack import Pack
from vllm_exl3.verify import canary
from vllm_exl3.verify.backends import Decoder, compare_backends, decoders, sample_linears


@pytest.mark.parametrize("name", ["qwen3-2.25-mul1-emb4", "gemma2-6.0-mcg"])
def test_decoders_agree(name: str) -> None:
    pack = Pack.open(damage.DATA / "packs" / name)
    found, declined = decoders()
    linears = sample_linears(pack)
    assert {linear.half_bits for linear in linears} == {linear.half_bits for linear in pack.linears.values()}
    assert {decoder.name for decoder in found} | set(declined) == {
        "reference on cpu",
        "reference on cuda",
        "native on cpu",
    }
    assert not list(compare_backends(pack, linears, found))


def test_one_wrong_bit_is_found() -> None:
    pack = Pack.open(damage.DATA / "packs" / "gemma2-6.0-mcg")
    right = decoders()[0][0]

    def wrong(*arguments: object) -> np.ndarray:
        values = right.decode(*arguments)
        values.view(np.uint16)[3, 5] ^= 1
        return values

    linears = sample_linears(pack)[:1]
    (finding,) = compare_backends(pack, linears, [right, Decoder("broken", wrong)])
    assert finding.where == f"{linears[0].key}, decoded by broken" and finding.found.startswith("1 of ")


@pytest.mark.slow
def test_canary_through_vllm() -> None:
    tokens, findings = canary.run_canary(str(damage.DATA / "packs" / "llama_tied-3.0-mul1"), 640)
    assert not findings and [len(line) for line in tokens] == [16, 16]


@pytest.mark.parametrize(
    ("answers", "found"),
    [
        ([([[1, 2], [3, 4]], "")] * 2, None),
        ([([[1, 2], [3, 4]], ""), ([[1, 2], [3, 5]], "")], "from token 1 of prompt 1 on"),
        ([(None, "exit status 1: out of memory")], "exit status 1: out of memory"),
    ],
)
def test_canary_compares_runs(answers: list, found: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    queue = iter(answers)
    monkeypatch.setattr(canary, "_run", lambda *_: next(queue))
    findings = canary.run_canary("pack", 640)[1]
    assert [finding.found for finding in findings] == ([] if found is None else [findings[0].found])
    assert found is None or found in findings[0].found
