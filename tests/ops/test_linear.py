"""The linear op: its reference against float64 mathematics, its fake, and backend choice."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch

import vllm_exl3.ops.linear as linear_module
from vllm_exl3.ops import backends
from vllm_exl3.ops.shards import Shard, pack_shards, unpack_shards
from vllm_exl3.ops.trellis import decode, decode_states, hadamard
from vllm_exl3.pack import codec
from vllm_exl3.pack.stored import Codebook

HALF_BITS = {
    Codebook.INST3: (2, 4, 6, 8, 10, 12, 14, 16),
    Codebook.MCG: (2, 4, 6, 8, 10, 12, 14, 16),
    Codebook.MUL1: (2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16),
}
EVERY_KIND = [(codebook, half_bits) for codebook, widths in HALF_BITS.items() for half_bits in widths]


@pytest.fixture
def fresh_backends(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(backends, "_choices", {})
    monkeypatch.setattr(backends, "_backends", {})
    monkeypatch.setattr(backends, "_MODULES", {})
    backends.reset_calls()
    yield
    backends.reset_calls()


def random_layer(shards: list[Shard], seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rng = np.random.default_rng(seed)
    words = sum(shard.trellis_words for shard in shards)
    trellis = torch.from_numpy(rng.integers(-(1 << 15), 1 << 15, words, dtype=np.int16))
    suh = torch.from_numpy(rng.standard_normal(sum(shard.in_features for shard in shards))).half()
    svh = torch.from_numpy(rng.standard_normal(sum(shard.out_features for shard in shards))).half()
    return trellis, suh, svh


def expected(
    x: torch.Tensor, trellis: torch.Tensor, suh: torch.Tensor, svh: torch.Tensor, shards: list[Shard]
) -> np.ndarray:
    """float64 mathematics of the decoded weights, from the numpy codec."""
    outputs = []
    words = rows = columns = 0
    for shard in shards:
        tiles = trellis[words : words + shard.trellis_words].view(shard.trellis_shape).numpy()
        weight = codec.dense_weight(
            tiles,
            shard.half_bits,
            Codebook(shard.codebook),
            suh[rows : rows + shard.in_features].numpy(),
            svh[columns : columns + shard.out_features].numpy(),
        )
        y = x.double().numpy() @ weight[: x.shape[1]]
        outputs.append(y[:, shard.crop_start : shard.crop_start + shard.crop_size])
        words += shard.trellis_words
        rows += shard.in_features
        columns += shard.out_features
    return np.concatenate(outputs, axis=1)


def relative_error(y: torch.Tensor, wanted: np.ndarray) -> float:
    return float(np.linalg.norm(y.double().numpy() - wanted) / np.linalg.norm(wanted))


@pytest.mark.parametrize(("codebook", "half_bits"), EVERY_KIND)
def test_torch_decoder_is_bit_identical_to_the_specification(codebook: Codebook, half_bits: int) -> None:
    tiles = np.random.default_rng(half_bits).integers(-(1 << 15), 1 << 15, (2, 3, half_bits * 8), dtype=np.int16)
    ours = decode(torch.from_numpy(tiles), half_bits, codebook).numpy()
    assert (ours.view(np.uint16) == codec.decode(tiles, half_bits, codebook).view(np.uint16)).all()


@pytest.mark.parametrize("codebook", list(Codebook))
def test_every_state_decodes_as_the_specification_says(codebook: Codebook) -> None:
    states = np.arange(1 << 16)
    ours = decode_states(torch.from_numpy(states), codebook).numpy()
    assert (ours.view(np.uint16) == codec.decode_states(states, codebook).view(np.uint16)).all()


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(
    "shards",
    [
        [Shard(8, Codebook.MUL1, 128, 256, 0, 256)],
        [Shard(5, Codebook.MUL1, 256, 128, 64, 64)],
        [Shard(6, Codebook.MCG, 256, 256, 32, 192), Shard(4, Codebook.INST3, 256, 128, 0, 100)],
    ],
    ids=["one", "cropped", "mixed"],
)
def test_reference_matches_float64(fresh_backends: None, shards: list[Shard], rows: int) -> None:
    trellis, suh, svh = random_layer(shards, seed=rows)
    x = torch.from_numpy(np.random.default_rng(7).standard_normal((rows, shards[0].in_features - 28))).float()
    y = torch.ops.vllm_exl3.linear(x, trellis, suh, svh, None, pack_shards(shards), "Test")
    assert relative_error(y, expected(x, trellis, suh, svh, shards)) < 2e-6
    bias = torch.arange(y.shape[1], dtype=torch.float32)
    with_bias = torch.ops.vllm_exl3.linear(x, trellis, suh, svh, bias, pack_shards(shards), "Test")
    torch.testing.assert_close(with_bias, y + bias)
    assert backends.calls() == {("linear", "reference", "Test"): 2}
    assert backends.reconstructed_bytes() == 2 * 2 * sum(shard.in_features * shard.out_features for shard in shards)


def test_reference_bounds_what_it_decodes_at_once(fresh_backends: None, monkeypatch: pytest.MonkeyPatch) -> None:
    shards = [Shard(6, Codebook.MUL1, 256, 512, 0, 512)]
    trellis, suh, svh = random_layer(shards, seed=3)
    x = torch.randn(2, 256)
    whole = linear_module.linear_reference(x, trellis, suh, svh, None, tuple(pack_shards(shards)))
    monkeypatch.setattr(linear_module, "_DECODED_AT_ONCE", 256 * 48)
    sizes: list[int] = []

    def spy(tiles: torch.Tensor, half_bits: int, codebook: int) -> torch.Tensor:
        decoded = decode(tiles, half_bits, codebook)
        sizes.append(decoded.numel())
        return decoded

    monkeypatch.setattr(linear_module, "decode", spy)
    parts = linear_module.linear_reference(x, trellis, suh, svh, None, tuple(pack_shards(shards)))
    assert len(sizes) > 1 and max(sizes) <= 256 * 48
    torch.testing.assert_close(parts, whole, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_fake_agrees_with_the_op(fresh_backends: None, dtype: torch.dtype) -> None:
    shards = [Shard(8, Codebook.MUL1, 128, 128, 0, 96), Shard(4, Codebook.MCG, 128, 128, 32, 64)]
    trellis, suh, svh = random_layer(shards, seed=1)
    args = (torch.randn(5, 128).to(dtype), trellis, suh, svh, None, pack_shards(shards), "Test")
    torch.library.opcheck(torch.ops.vllm_exl3.linear, args)
    assert torch.ops.vllm_exl3.linear(*args).dtype == dtype


def test_hadamard_is_its_own_inverse() -> None:
    x = torch.randn(3, 384, dtype=torch.float64)
    torch.testing.assert_close(hadamard(hadamard(x)), x)


def test_shards_round_trip_and_refuse_what_they_are_not() -> None:
    shards = [Shard(3, Codebook.MUL1, 128, 256, 0, 200), Shard(16, Codebook.INST3, 128, 128, 5, 7)]
    assert unpack_shards(pack_shards(shards)) == shards
    for wrong in ([], [1, 2, 3], [8, 9, 128, 128, 0, 128]):
        with pytest.raises(ValueError):
            unpack_shards(wrong)


def _backend(name: str, reason: str | None) -> backends.Backend:
    return backends.Backend("linear", "cpu", name, lambda *_: name, lambda: reason)


@pytest.mark.parametrize(
    ("wanted", "chosen", "declined"),
    [
        ("auto", "second", {"first": "no compiler"}),
        (
            "reference",
            "reference",
            {"first": "VLLM_EXL3_LINEAR_KERNEL=reference", "second": "VLLM_EXL3_LINEAR_KERNEL=reference"},
        ),
    ],
)
def test_choice_is_the_first_that_can_run_and_says_why_others_cannot(
    fresh_backends: None, monkeypatch: pytest.MonkeyPatch, wanted: str, chosen: str, declined: dict[str, str]
) -> None:
    monkeypatch.setenv("VLLM_EXL3_LINEAR_KERNEL", wanted)
    backends.register_backend(_backend("first", "no compiler"))
    backends.register_backend(_backend("second", None))
    choice = backends.select("linear", "cpu", linear_module.linear_reference)
    assert (choice.backend.name, choice.declined) == (chosen, declined)


def test_a_wanted_backend_that_cannot_run_is_an_error(fresh_backends: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_EXL3_LINEAR_KERNEL", "native")
    backends.register_backend(_backend("native", "built without a C++ compiler"))
    with pytest.raises(RuntimeError, match=r"native cannot serve linear on cpu .*built without a C\+\+ compiler"):
        backends.select("linear", "cpu", linear_module.linear_reference)


def test_a_wanted_backend_that_does_not_exist_names_those_that_do(
    fresh_backends: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_EXL3_LINEAR_KERNEL", "exllamav3")
    backends.register_backend(_backend("native", None))
    with pytest.raises(RuntimeError, match=r"no such kernel for this device, only native, reference\)"):
        backends.select("linear", "cpu", linear_module.linear_reference)


def test_an_unknown_value_is_an_error_naming_the_variable(
    fresh_backends: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_EXL3_LINEAR_KERNEL", "fastest")
    with pytest.raises(ValueError, match="VLLM_EXL3_LINEAR_KERNEL='fastest': expected one of auto, native"):
        backends.select("linear", "cpu", linear_module.linear_reference)


@pytest.mark.parametrize("rows", [0, 1])
def test_a_batch_may_be_empty(rows: int) -> None:
    """As ranks see it that got no tokens."""
    assert hadamard(torch.ones((rows, 256))).shape == (rows, 256)
