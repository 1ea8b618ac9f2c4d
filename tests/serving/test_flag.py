"""``--quantization exl3``: serves a pack that declares nothing, and says what any other folder is."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.serving.conftest import Tensors, golden_logits, relative_error
from tests.serving.engine import engine, logits_of
from vllm_exl3.pack.errors import Exl3PackError

ODD = "llama_odd-4.0-mul1"


def undeclared(config: dict) -> None:
    config.pop("quantization_config", None)


def test_a_pack_without_any_declaration_is_served(variant: Callable[..., Path]) -> None:
    folder = variant(ODD, config=undeclared)
    (folder / "quantization_config.json").unlink()
    ids, logits = golden_logits(ODD)
    with engine(folder, quantization="exl3") as llm:
        assert relative_error(logits_of(llm, ids), logits) <= 1e-3


def only_dense(tensors: Tensors) -> None:
    tensors.clear()
    tensors["model.norm.weight"] = torch.ones(8)


def only_gptq(tensors: Tensors) -> None:
    tensors.clear()
    tensors["model.layers.0.mlp.up_proj.qweight"] = torch.ones(8, 8, dtype=torch.int32)


@pytest.mark.parametrize(("change", "found"), [(only_dense, "no trellis"), (only_gptq, "GPTQ")], ids=["dense", "GPTQ"])
def test_a_folder_of_another_format_is_named(
    variant: Callable[..., Path], change: Callable[[Tensors], None], found: str
) -> None:
    with pytest.raises(Exl3PackError, match=found), engine(variant(ODD, change, undeclared), quantization="exl3"):
        pass
