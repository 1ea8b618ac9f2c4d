"""The start-up report: when it appears, and what it says of the writer and of layers that are not EXL3."""

from types import SimpleNamespace

import pytest
import torch
from torch.nn import Module, Parameter

from tests.serving.conftest import PACKS
from vllm_exl3.pack import Pack
from vllm_exl3.pack.names import NameResolver
from vllm_exl3.pack.wording import byte_size
from vllm_exl3.serving.head import Exl3EmbeddingMethod
from vllm_exl3.serving.layout import Layout, Output
from vllm_exl3.serving.report import Report

SAMPLE = "llama_tied-3.0-mul1"


def layer_and_layout(key: str) -> tuple[Module, Layout]:
    resolution = NameResolver(Pack.open(PACKS / SAMPLE)).resolve(key)
    assert resolution is not None
    linear = resolution.linears[0]
    width, inputs = linear.out_features, linear.in_features
    layout = Layout(key, resolution.parts, [Output(width, 0, width)], (0, inputs, inputs))
    layer = Module()
    layer.trellis = Parameter(torch.empty(layout.sizes["trellis"], dtype=torch.int16), requires_grad=False)
    return layer, layout


def test_a_layer_that_vllm_drops_is_not_waited_for() -> None:
    """Pooling models move their head to the meta device, as others do towers that are not run."""
    names = [f"model.layers.0.mlp.{name}_proj" for name in ("gate", "up", "down")]
    built = {name: layer_and_layout(name) for name in names}
    report = Report()
    for name, (layer, layout) in built.items():
        report.add_layer(name, layer, layout)
    pack = Pack.open(PACKS / SAMPLE)
    gate, up, down = (built[name][0] for name in names)
    assert not report.layer_ready(names[1], up, pack), "gate and down are still to come"
    gate.to("meta")
    assert report.layer_ready(names[2], down, pack)
    assert sorted(report.layers) == sorted(names[1:])
    assert report.bytes["trellis"] == up.trellis.nbytes + down.trellis.nbytes


def test_a_layer_that_no_longer_exists_is_not_waited_for() -> None:
    report = Report()
    layer, layout = layer_and_layout("model.layers.0.mlp.gate_proj")
    report.add_layer("gone", layer, layout)
    del layer
    kept, layout = layer_and_layout("model.layers.0.mlp.down_proj")
    report.add_layer("kept", kept, layout)
    assert report.layer_ready("kept", kept, Pack.open(PACKS / SAMPLE))


@pytest.mark.parametrize(
    ("version", "shown"),
    [
        ("1.6.5", "exllamav3 1.6.5"),
        ("vllm-exl3 0.1.0", "quantizer  vllm-exl3 0.1.0"),
        (None, "quantizer  unknown"),
        (1.5, "exllamav3 1.5"),
        ([], "quantizer  []"),
    ],
)
def test_the_report_names_the_writer_and_why_layers_are_dense(version: str | None, shown: str) -> None:
    report = Report()
    layer, layout = layer_and_layout("model.layers.0.mlp.down_proj")
    report.add_layer("down", layer, layout)
    for number in range(6):
        report.add_dense(f"gate.{number}", "stored as BF16")
    report.add_dense("visual.qkv", "nothing of this name stored")
    pack = SimpleNamespace(source="pack", commit=None, quantization={"version": version})
    assert report.layer_ready("down", layer, pack)  # type: ignore[arg-type]
    text = report.text()
    assert shown in text
    assert "stored as BF16: gate.0, gate.1, gate.2, gate.3 and 2 more; nothing of this name stored: visual.qkv" in text
    assert "no EXL3 head on this rank" in text
    assert "  not EXL3   stored as BF16" in text
    ((bits, count),) = report.as_dict()["weights_by_bits"].items()
    assert f"  weights    {count / 1e6:.1f} M at {bits} bits; {float(bits):.2f} on average, no EXL3 head" in text
    assert f"memory     trellis {byte_size(report.bytes['trellis'])} on this rank" in text and "0.0 " not in text


def test_embeddings_are_named_with_their_bytes_and_kernels_only_where_one_decodes_them() -> None:
    report = Report()
    layer, layout = layer_and_layout("model.layers.0.mlp.down_proj")
    report.add_layer("down", layer, layout)
    dense = Module()
    dense.weight, dense.prefix = Parameter(torch.zeros(1 << 10, 1 << 10, dtype=torch.bfloat16)), ""
    method = Exl3EmbeddingMethod(SimpleNamespace(report=report), has_own_head=True)  # type: ignore[arg-type]
    for _ in range(2):  # as a reload does
        method.process_weights_after_loading(dense)
    pack = SimpleNamespace(source="pack", commit=None, quantization={})
    assert report.layer_ready("down", layer, pack)  # type: ignore[arg-type]
    assert "table      embed_tokens: dense, bfloat16, 2.0 MiB" in report.text()
    assert set(report.as_dict()["kernels"]) == {"linear"}
    report.embedding_ready("ngram", "n-gram rows, K = 5, disk", 0)
    assert set(report.as_dict()["kernels"]) == {"linear", "ngram"}
    report.embedding_ready("embed_tokens", "int8, a scale for each row", 7)
    assert set(report.as_dict()["kernels"]) == {"linear", "ngram", "embedding"}
    assert report.bytes["embedding"] == 7
    labels = [line.split()[0] for line in report.text().splitlines()[1:]]
    assert [labels.count(label) for label in ("table", "embedding", "ngram")] == [2, 1, 1]


def test_fast_arithmetic_is_named_where_nothing_serves_it(monkeypatch: pytest.MonkeyPatch) -> None:
    report = Report()
    layer, layout = layer_and_layout("model.layers.0.mlp.down_proj")
    report.add_layer("down", layer, layout)
    pack = SimpleNamespace(source="pack", commit=None, quantization={})
    assert report.layer_ready("down", layer, pack)  # type: ignore[arg-type]
    assert report.as_dict()["precision"] == [] and "precision" not in report.text()
    monkeypatch.setenv("VLLM_EXL3_PRECISION", "fast")
    assert "  precision  fast was asked for; native on cpu, which serves linears, has no such mode" in report.text()
    monkeypatch.setattr(report, "experts", {"model.layers.0.mlp.experts": SimpleNamespace()})
    assert report._precision()[1:] == ["fast was asked for; routed experts have no such mode"]


@pytest.mark.parametrize(("backend", "told"), [("native", True), ("reference", False)])
def test_a_gpu_without_measurements_is_told_so(backend: str, told: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    report = Report()
    layer, layout = layer_and_layout("model.layers.0.mlp.down_proj")
    report.add_layer("down", layer, layout)
    pack = SimpleNamespace(source="pack", commit=None, quantization={})
    assert report.layer_ready("down", layer, pack)  # type: ignore[arg-type]
    assert report.as_dict()["dispatch"] is None and "dispatch" not in report.text()
    gpu = SimpleNamespace(name="NVIDIA L4", limits=SimpleNamespace(architecture="sm_89"))
    choice = SimpleNamespace(backend=SimpleNamespace(name=backend), declined={})
    monkeypatch.setattr(report, "device", "cuda")
    monkeypatch.setattr("vllm_exl3.ops.backends.select", lambda *_: choice)
    monkeypatch.setattr("vllm_exl3.cuda.runtime.device", lambda index: gpu)
    monkeypatch.setattr("torch.cuda.current_device", lambda: 0)
    line = "  dispatch   the kernel for each number of tokens is chosen by a model, as nobody has measured sm_89\n"
    assert (line in report.text()) == told


@pytest.mark.parametrize(
    ("device", "others", "told"), [("cpu", 50.0, True), ("cpu", 0.0, False), ("cuda", 50.0, False)]
)
def test_busy_processors_are_named_where_a_model_is_served_on_them(
    device: str, others: float, told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = Report()
    layer, layout = layer_and_layout("model.layers.0.mlp.down_proj")
    report.add_layer("down", layer, layout)
    pack = SimpleNamespace(source="pack", commit=None, quantization={})
    assert report.layer_ready("down", layer, pack)  # type: ignore[arg-type]
    monkeypatch.setattr("vllm_exl3.serving.report.measure_others", lambda: others)
    monkeypatch.setattr("vllm_exl3.serving.report._reports", [])
    monkeypatch.setattr(report, "device", device)
    report.publish()
    monkeypatch.setattr(report, "device", "cpu")
    assert ("  processors others keep 50.0 of" in report.text()) == told
    assert (report.as_dict()["shortage"] is not None) == told
