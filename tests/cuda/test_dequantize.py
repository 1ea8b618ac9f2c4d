"""What launches of the decoder are told, by a stand-in that computes what the kernel would from the same addresses."""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from vllm_exl3.cuda import dequantize, reconstruct
from vllm_exl3.cuda.compiler import Instance
from vllm_exl3.ops.linear import linear_reference
from vllm_exl3.ops.shards import Shard, pack_shards
from vllm_exl3.ops.trellis import decode, hadamard

SHARDS = (
    Shard(8, 2, 256, 640, 0, 640),
    Shard(6, 1, 256, 384, 70, 200),
    Shard(5, 2, 256, 128, 127, 1),
    Shard(4, 0, 256, 128, 0, 0),
)
DTYPES = {0: torch.float16, 1: torch.bfloat16, 2: torch.float32}


def _at(address: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Memory as a tensor."""
    return torch.frombuffer((ctypes.c_char * (count * dtype.itemsize)).from_address(address), dtype=dtype)


@dataclass
class Decoder:
    """Stands in for `runtime.Device` and its kernels, on the host."""

    launches: int = 0
    instance: Instance | None = None
    shared: list[int] = field(default_factory=list)

    def kernel(self, instance: Instance) -> "Decoder":
        self.instance = instance
        return self

    def allow_shared(self, size: int) -> None:
        self.shared.append(size)

    def launch(
        self, grid: tuple[int, int], threads: int, shared: int, stream: int, told: list[Any], dependent: bool
    ) -> None:
        shard, (address, stride, kind, rotated) = told[0], [item.value for item in told[1:]]
        assert self.instance is not None and self.shared[-1] == shared == 4 * 128 * 129 and threads == 256
        half_bits, codebook = (int(value) for _, value in self.instance.macros)
        rows, tiles, words, columns = shard.in_features // 16, shard.out_features // 16, 8 * half_bits, 128 * grid[0]
        assert 128 * grid[1] == shard.in_features and 0 < columns <= shard.out_features
        lines = [
            _at(shard.trellis + 2 * words * tiles * row, columns // 16 * words, torch.int16) for row in range(rows)
        ]
        weights = decode(torch.stack(lines).view(rows, columns // 16, words), half_bits, codebook).float()
        if not rotated:
            suh, svh = (
                _at(where, count, torch.float16).float()
                for where, count in ((shard.suh, shard.in_features), (shard.svh, columns))
            )
            weights = hadamard(hadamard(weights.T).T) * suh[:, None] * svh
        kept = weights[:, shard.crop_start : shard.crop_start + shard.crop_size].to(DTYPES[kind])
        assert kept.shape[1] == shard.crop_size and shard.out_column == 0
        for row in range(shard.in_features):
            _at(address + stride * row * kept.itemsize, shard.crop_size, kept.dtype).copy_(kept[row])
        self.launches += 1


@pytest.fixture
def decoder(in_place_of_the_device: Callable[[Decoder], Decoder]) -> Decoder:
    return in_place_of_the_device(Decoder())


def _tensors() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    words = sum(shard.trellis_words for shard in SHARDS)
    scales = [sum(shard.in_features for shard in SHARDS), sum(shard.out_features for shard in SHARDS)]
    suh, svh = (torch.rand(count, generator=generator).add(0.5).half() for count in scales)
    return torch.randint(-(2**15), 2**15, (words,), generator=generator, dtype=torch.int16), suh, svh


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_every_shard_is_decoded_into_its_columns(decoder: Decoder, dtype: torch.dtype) -> None:
    dense = dequantize.dequantize(*_tensors(), pack_shards(SHARDS), False, dtype)
    assert dense.shape == (256, 841) and dense.dtype == dtype and decoder.launches == 3
    expected = linear_reference(torch.eye(256), *_tensors(), None, tuple(pack_shards(SHARDS)))
    torch.testing.assert_close(dense.float(), expected, rtol=1e-2, atol=1e-2)


def test_without_rotations_weights_are_the_codebooks(decoder: Decoder) -> None:
    dense = dequantize.dequantize(*_tensors(), pack_shards(SHARDS), True, torch.float16)
    words = SHARDS[0].trellis_words
    second = _tensors()[0][words : words + SHARDS[1].trellis_words].view(SHARDS[1].trellis_shape)
    assert torch.equal(dense[:, 640:840], decode(second, 6, 1)[:, 70:270])


@pytest.mark.parametrize("mebibytes", ["0", "256"])
def test_reconstructing_decodes_the_same_columns(
    decoder: Decoder, mebibytes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_EXL3_RECONSTRUCT_MB", mebibytes)
    x, layout = torch.randn(3, 200, generator=torch.Generator().manual_seed(5)), tuple(pack_shards(SHARDS))
    found = reconstruct.linear(x, *_tensors(), None, layout)
    torch.testing.assert_close(found, linear_reference(x, *_tensors(), None, layout), rtol=1e-3, atol=1e-3)
    assert decoder.launches == (9 if mebibytes == "0" else 3)


def test_tensors_that_the_decoder_would_misread_are_refused(decoder: Decoder) -> None:
    trellis, suh, svh = _tensors()
    layout = tuple(pack_shards(SHARDS))
    for wrong in ((trellis.int(), suh, svh), (trellis, suh.float(), svh), (trellis, suh, svh[:-1])):
        with pytest.raises(ValueError, match="expected contiguous"):
            reconstruct.linear(torch.zeros(1, 256), *wrong, None, layout)
        with pytest.raises(ValueError, match="expected contiguous"):
            dequantize.dequantize(*wrong, layout, False, torch.float16)
    with pytest.raises(ValueError, match=r"found torch\.float64, expected"):
        dequantize.dequantize(trellis, suh, svh, layout, False, torch.float64)
    assert not decoder.launches
