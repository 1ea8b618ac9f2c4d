"""One layer of every golden pack: its output is exllamav3's, for one row and for five."""

from pathlib import Path

import numpy as np
import pytest
import torch

import vllm_exl3.ops.linear  # noqa: F401  registers the op
from vllm_exl3.ops.shards import Shard, pack_shards
from vllm_exl3.pack import Pack

PACKS = sorted(path.parent for path in (Path(__file__).parents[1] / "data" / "packs").glob("*/golden_linear.npz"))


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("folder", PACKS, ids=lambda folder: folder.name)
def test_probed_layer_is_exllamav3s(folder: Path, rows: int) -> None:
    golden = np.load(folder / "golden_linear.npz")
    wanted = golden[f"y{rows}"].astype(np.float64)
    pack = Pack.open(folder)
    linear = pack.linears[str(golden["key"])]
    shard = Shard(linear.half_bits, linear.codebook, linear.in_features, linear.out_features, 0, wanted.shape[1])
    trellis, suh, svh = (torch.from_numpy(pack.read(t.name).copy()) for t in (linear.trellis, linear.suh, linear.svh))
    x = torch.from_numpy(golden["x"][:rows].astype(np.float32))
    ours = torch.ops.vllm_exl3.linear(x, trellis.flatten(), suh, svh, None, pack_shards([shard]), "probe")
    error = np.linalg.norm(ours.double().numpy() - wanted) / np.linalg.norm(wanted)
    assert error <= 1e-3
