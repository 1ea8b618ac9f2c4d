"""The decoded weight of one linear is the specification's."""

import numpy as np
import pytest
import torch

from tests.tiny_pack import linear
from vllm_exl3.ops.dense import decoded_weight
from vllm_exl3.pack.codec import dense_weight
from vllm_exl3.pack.stored import Codebook


@pytest.mark.parametrize(("inputs", "outputs"), [(128, 128), (256, 1408)])
@pytest.mark.parametrize(
    ("codebook", "bits"),
    [(Codebook.INST3, 4), (Codebook.MCG, 3), (Codebook.MUL1, 1.5), (Codebook.MUL1, 8)],
)
def test_it_is_the_specification_s(codebook: Codebook, inputs: int, outputs: int, bits: float) -> None:
    tensors = linear("x", inputs, outputs, bits=bits, codebook=codebook.label)
    trellis = tensors["x.trellis"][1].astype(np.int16)
    suh, svh = (tensors[f"x.{leaf}"][1].astype(np.float16) for leaf in ("suh", "svh"))
    expected = dense_weight(trellis, round(2 * bits), codebook, suh, svh).T
    shape = (outputs - 5, inputs - 3)
    parts = [torch.from_numpy(values) for values in (trellis, suh, svh)]
    found = decoded_weight(*parts, round(2 * bits), int(codebook), shape=shape, dtype=torch.float32).numpy()
    assert found.shape == shape
    cut = expected[: shape[0], : shape[1]]
    assert np.linalg.norm(found - cut) <= 1e-5 * np.linalg.norm(cut)
