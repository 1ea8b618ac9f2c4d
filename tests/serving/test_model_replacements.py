"""Methods of vLLM's that single families' files replace: what they do, and that they leave other models alone."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_exl3.serving.config import Exl3Config
from vllm_exl3.serving.models import install_for, mimo_v2


def test_olmo_hybrids_convolutions_go_to_their_parts() -> None:
    """vLLM passes the part as an attribute of the tensor, which a plain layer's loading leaves unread."""
    from vllm.model_executor.layers.mamba.gdn import olmo_gdn_linear_attn

    install_for(["OlmoHybridForCausalLM"])
    loader = olmo_gdn_linear_attn._make_fused_conv1d_weight_loader([2, 2, 4], 1, 0)
    weight = torch.nn.Parameter(torch.zeros(8, 1, 3))
    for part, rows in enumerate((2, 2, 4)):
        stored = torch.full((rows, 1, 3), float(part + 1))
        stored.shard_id = part
        loader(weight, stored)
    assert weight[:, 0, 0].tolist() == [1, 1, 2, 2, 3, 3, 3, 3]


@pytest.mark.parametrize(
    ("linears", "version", "is_scaled"),
    [([object()], "1.6.5", True), ([], "1.6.5", False), ([object()], "other 1.0", False)],
    ids=["EXL3 by exllamav3", "in 16 bits", "EXL3 by another converter"],
)
def test_which_output_projections_hold_the_scale_of_values(
    linears: list[object], version: str, is_scaled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = Exl3Config({})
    found = SimpleNamespace(parts=[SimpleNamespace(linears=linears)])
    monkeypatch.setattr(config, "names", lambda: SimpleNamespace(find=lambda _: found))
    monkeypatch.setattr(Exl3Config, "pack", SimpleNamespace(quantization={"version": version}))
    assert mimo_v2._is_scaled(config, "model.layers.0.self_attn.o_proj") is is_scaled
    other: Any = None
    assert mimo_v2._is_scaled(other, "model.layers.0.self_attn.o_proj") is False
