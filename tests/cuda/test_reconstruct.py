"""The reconstruct backend's windows of columns, with the kernel that fills them replaced by the reference."""

import pytest
import torch

from vllm_exl3.cuda import reconstruct
from vllm_exl3.ops.linear import linear_reference
from vllm_exl3.ops.shards import Shard, pack_shards
from vllm_exl3.ops.trellis import decode, hadamard

SHARDS = (Shard(8, 2, 256, 1152, 0, 1152), Shard(6, 1, 256, 384, 70, 200), Shard(5, 2, 256, 128, 127, 1))


class Decoded:
    """Stands for the kernel; decodes a shard once, however many windows it is cut into."""

    def __init__(self) -> None:
        self.whole: dict[Shard, torch.Tensor] = {}

    def __call__(
        self, shard: Shard, words: torch.Tensor, suh: torch.Tensor, svh: torch.Tensor, begin: int, dense: torch.Tensor
    ) -> None:
        if shard not in self.whole:
            weights = decode(words.view(shard.trellis_shape), shard.half_bits, shard.codebook).float()
            self.whole[shard] = hadamard(hadamard(weights.T).T) * suh.float()[:, None] * svh.float()
        assert 0 < dense.shape[1] <= shard.out_features - begin
        dense.copy_(self.whole[shard][:, begin : begin + dense.shape[1]])


@pytest.mark.parametrize("mebibytes", ["0", "1", "256"])
@pytest.mark.parametrize("width", [256, 200])
def test_windows_cover_every_column_once(mebibytes: str, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_EXL3_RECONSTRUCT_MB", mebibytes)
    monkeypatch.setattr(reconstruct, "decode_columns", Decoded())
    generator = torch.Generator().manual_seed(width)
    trellis = torch.randint(
        -(2**15), 2**15, (sum(s.trellis_words for s in SHARDS),), generator=generator, dtype=torch.int16
    )
    suh, svh = (
        torch.rand(sum(sizes), generator=generator).add(0.5).half()
        for sizes in ([s.in_features for s in SHARDS], [s.out_features for s in SHARDS])
    )
    x = torch.randn(5, width, generator=generator)
    bias = torch.randn(sum(s.crop_size for s in SHARDS), generator=generator)
    layout = tuple(pack_shards(SHARDS))
    found = reconstruct.linear(x, trellis, suh, svh, bias, layout)
    expected = linear_reference(x, trellis, suh, svh, bias, layout)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


def test_shards_of_one_layer_share_the_scratch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scratch of their own each would be twice what was allowed, where one is made while the other is there."""
    places = set()

    def decode_nothing(shard: Shard, *arguments: torch.Tensor | int) -> None:
        dense = arguments[-1]
        assert isinstance(dense, torch.Tensor)
        places.add(dense.untyped_storage().data_ptr())
        assert dense.untyped_storage().nbytes() == 256 * 1152 * 4
        dense.zero_()

    monkeypatch.setattr(reconstruct, "decode_columns", decode_nothing)
    words = torch.zeros(sum(s.trellis_words for s in SHARDS), dtype=torch.int16)
    suh, svh = (torch.ones(n, dtype=torch.float16) for n in (3 * 256, sum(s.out_features for s in SHARDS)))
    out = reconstruct.linear(torch.ones(2, 256), words, suh, svh, None, tuple(pack_shards(SHARDS)))
    assert len(places) == 1 and not out.any()


def test_windows_respect_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_EXL3_RECONSTRUCT_MB", "64")
    shard = Shard(8, 2, 8192, 28672, 0, 28672)
    columns = reconstruct._columns_at_once(shard, 2)
    assert columns % 128 == 0 and columns * 8192 * 2 <= 64 << 20 < (columns + 128) * 8192 * 2
