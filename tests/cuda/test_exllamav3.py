"""The backend that calls exllamav3: which of its layers are made, kept and dropped, with a stand-in for the package."""

import dataclasses
import gc
import sys
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import pytest
import torch

from vllm_exl3.cuda import exllamav3
from vllm_exl3.cuda.moe_by_expert import moe_exllamav3
from vllm_exl3.ops import backends
from vllm_exl3.ops.linear import linear_reference
from vllm_exl3.ops.moe import moe_reference
from vllm_exl3.ops.shards import Shard, pack_shards
from vllm_exl3.pack.stored import Codebook


class _Layer:
    """Remembers what it was made from; its output is the layer's number in every channel."""

    made: ClassVar[list["_Layer"]] = []

    def __init__(self, config: None, in_features: int, out_features: int, **tensors: Any) -> None:
        self.tensors, self.out_features = tensors, out_features
        self.number = len(self.made)
        self.made.append(self)

    def forward(self, x: torch.Tensor, parameters: dict[str, Any]) -> torch.Tensor:
        assert x.dtype == torch.float16 and x.is_contiguous()
        return torch.full((x.shape[0], self.out_features), float(self.number), dtype=torch.float16)


@pytest.fixture(autouse=True)
def _stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    _Layer.made = []
    names = ["exllamav3", "exllamav3.modules", "exllamav3.modules.quant", "exllamav3.modules.quant.exl3"]
    for name in names:
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules[names[-1]].LinearEXL3 = _Layer  # type: ignore[attr-defined]
    exllamav3._layers.clear()


SHARDS = [Shard(8, Codebook.MUL1, 256, 128, 0, 100), Shard(6, Codebook.MCG, 256, 256, 128, 128)]


def _tensors() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return (
        torch.zeros(sum(shard.trellis_words for shard in SHARDS), dtype=torch.int16),
        torch.ones(512, dtype=torch.float16),
        torch.ones(384, dtype=torch.float16),
    )


def test_layers_are_made_once_with_their_codebooks_and_cropped() -> None:
    tensors, layout, bias = _tensors(), tuple(pack_shards(SHARDS)), torch.ones(228, dtype=torch.bfloat16)
    x = torch.ones(3, 200, dtype=torch.bfloat16)
    for _ in range(2):
        out = exllamav3.linear(x, *tensors, bias, layout)
    assert out.dtype == torch.bfloat16 and out.shape == (3, 228)
    assert (out[:, :100] == 1).all() and (out[:, 100:] == 2).all()
    assert [set(layer.tensors) for layer in _Layer.made] == [
        {"suh", "svh", "trellis", "mul1"},
        {"suh", "svh", "trellis", "mcg"},
    ]


def test_no_rows_ask_nothing_of_it() -> None:
    out = exllamav3.linear(torch.ones(0, 256, dtype=torch.bfloat16), *_tensors(), None, tuple(pack_shards(SHARDS)))
    assert out.shape == (0, 228) and out.dtype == torch.bfloat16 and not _Layer.made


def test_tensors_that_move_get_new_layers_and_dropped_ones_leave() -> None:
    trellis, suh, svh = _tensors()
    layout, x = tuple(pack_shards(SHARDS)), torch.ones(1, 256)
    exllamav3.linear(x, trellis, suh, svh, None, layout)
    trellis.data = trellis.data.clone()
    exllamav3.linear(x, trellis, suh, svh, None, layout)
    assert len(_Layer.made) == 4 and len(exllamav3._layers) == 1
    del trellis
    _Layer.made = []
    gc.collect()
    assert not exllamav3._layers


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("raise OSError('libcudart.so.12: cannot open')", "exllamav3 cannot be imported (OSError: libcudart"),
        ("import no_such_module", "exllamav3 cannot be imported (ModuleNotFoundError"),
        (None, "exllamav3 is not installed"),
    ],
)
def test_a_package_that_does_not_import_is_a_reason_and_no_crash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str | None, reason: str
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "exllamav3"]:
        monkeypatch.delitem(sys.modules, name)
    if source is not None:
        (tmp_path / "exllamav3").mkdir()
        (tmp_path / "exllamav3" / "__init__.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)

    def not_a_distribution(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", not_a_distribution)
    assert (exllamav3.unavailable() or "").startswith(reason)


@pytest.mark.parametrize(
    ("installed", "served"),
    [
        ("1.6.4", False),
        ("1.7.0", False),
        ("1.6.5", True),
        ("1.6.5+cu130.torch2.11.0", True),
        ("1.6.6+cu130.torch2.11.0", False),
        ("1.6.50", False),
    ],
)
def test_another_version_than_was_tried_is_named(installed: str, served: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", {"exllamav3": installed}.__getitem__)
    reason = None if served else f"exllamav3 {installed} is installed, 1.6.5 is needed"
    assert exllamav3.unavailable() == reason


@pytest.mark.parametrize(
    ("unusable", "serves"),
    [((), "native"), (("native", "reconstruct"), "exllamav3"), (("native", "reconstruct", "exllamav3"), "reference")],
)
@pytest.mark.parametrize(("op", "reference"), [("linear", linear_reference), ("moe", moe_reference)])
def test_auto_takes_it_only_where_the_own_kernels_cannot_run(
    op: str, reference: Any, unusable: tuple[str, ...], serves: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VLLM_EXL3_LINEAR_KERNEL", raising=False)
    monkeypatch.delenv("VLLM_EXL3_MOE_KERNEL", raising=False)
    monkeypatch.setattr(backends, "_choices", {})
    backends.select(op, "cuda", reference)  # registers them
    known = [
        dataclasses.replace(backend, unavailable=lambda name=backend.name: "no" if name in unusable else None)
        for backend in backends._backends[op, "cuda"]
    ]
    assert {"native", "exllamav3"} <= {backend.name for backend in known}
    monkeypatch.setattr(backends, "_backends", {(op, "cuda"): known})
    monkeypatch.setattr(backends, "_choices", {})
    choice = backends.select(op, "cuda", reference)
    assert choice.backend.name == serves
    before = [backend.name for backend in known]
    before = before[: before.index(serves)] if serves in before else before
    assert choice.declined == dict.fromkeys(before, "no")


@pytest.mark.parametrize("kernels", [moe_exllamav3, moe_reference])
def test_experts_that_read_the_routing_cannot_be_captured(kernels: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    x = type("OnGpu", (), {"device": torch.device("cuda", 0)})()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="no CUDA graph can hold: serve with --enforce-eager"):
        kernels(x)
