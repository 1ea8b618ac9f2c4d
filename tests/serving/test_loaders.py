"""Ways to load a pack other than reading its files one by one, and what is said meanwhile."""

import importlib.util
import inspect
import logging
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.config import LoadConfig, VllmConfig, set_current_vllm_config
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from tests.serving.conftest import PACKS, golden_logits
from tests.serving.engine import PROMPTS, engine, generate, logits_of, model_of
from tests.serving.test_engine import PHI, up_in_sixteen_bits
from vllm_exl3.pack.errors import Exl3PackError
from vllm_exl3.serving.config import Exl3Config
from vllm_exl3.serving.progress import LoadProgress, phase

ODD, TIED, GEMMA = "llama_odd-4.0-mul1", "llama_tied-2.0-mcg", "gemma2-6.0-mcg"
QWEN, MIXTRAL, ROW_CODED = "qwen3_moe-3.0-mul1", "mixtral-4.0-3inst", "qwen3-2.25-mul1-emb4"


def slow(name: str) -> Any:
    return pytest.param(name, marks=pytest.mark.slow)


class OneBuffer(DefaultModelLoader):
    """Hands every tensor over in the same memory, and overwrites it afterwards, as streaming loaders do."""

    def __init__(self, load_config: Any) -> None:
        load_config.load_format = "safetensors"
        super().__init__(load_config)

    def get_all_weights(self, *args: Any) -> Iterator[tuple[str, torch.Tensor]]:
        buffer = torch.empty(1 << 22, dtype=torch.uint8)
        for name, tensor in super().get_all_weights(*args):
            # through int8, since float8 and the like have no copy of their own everywhere
            flat = tensor.contiguous().flatten().view(torch.uint8)
            lent = buffer[: flat.numel()].copy_(flat).view(tensor.dtype).view(tensor.shape)
            yield name, lent
            buffer.fill_(0xFE)


@pytest.mark.parametrize("name", [QWEN, slow(ODD), slow(GEMMA), slow(ROW_CODED), slow(MIXTRAL)])
def test_nothing_is_kept_of_a_buffer_that_a_loader_lends(name: str) -> None:
    ids, _ = golden_logits(name)
    with engine(PACKS / name) as llm:
        expected = logits_of(llm, ids)
    register_model_loader("one_buffer")(OneBuffer)
    with engine(PACKS / name, load_format="one_buffer") as llm:
        torch.testing.assert_close(logits_of(llm, ids), expected, rtol=0, atol=0)


@pytest.mark.parametrize("load_format", ["safetensors", "runai_streamer"])
@pytest.mark.slow
def test_load_formats_give_the_same_logits(load_format: str) -> None:
    if load_format == "runai_streamer":
        pytest.importorskip("runai_model_streamer")
    ids, _ = golden_logits(QWEN)
    with engine(PACKS / QWEN) as llm:
        expected = logits_of(llm, ids)
    with engine(PACKS / QWEN, load_format=load_format) as llm:
        torch.testing.assert_close(logits_of(llm, ids), expected, rtol=0, atol=0)


class Heard:
    """Keeps what vLLM and this package say."""

    def __init__(self) -> None:
        self.records: list[logging.LogRecord] = []

    def lines(self, level: int = logging.INFO) -> list[str]:
        return [record.getMessage() for record in self.records if record.levelno >= level]


@pytest.fixture
def heard() -> Iterator[Heard]:
    """Listens where records are made: the first engine of a process sets handlers and level of vLLM's logger."""
    listener, make = Heard(), logging.getLogRecordFactory()
    own = logging.getLogger("vllm.exl3")
    level = own.level
    own.setLevel(logging.INFO)

    def keep(*arguments: Any, **named: Any) -> logging.LogRecord:
        record = make(*arguments, **named)
        if record.name.partition(".")[0] == "vllm":
            listener.records.append(record)
        return record

    logging.setLogRecordFactory(keep)
    yield listener
    logging.setLogRecordFactory(make)
    own.setLevel(level)


def assert_fit_for_layerwise_reload(loader: Any) -> None:
    """vLLM reads the name of each loader, and replaces the argument that is called ``param``."""
    assert inspect.isfunction(loader) or inspect.ismethod(loader), loader
    assert loader.__name__ and next(iter(inspect.signature(loader).parameters)) == "param", loader


TRACKED = {"enable_weights_track": True}


@pytest.mark.parametrize("name", [QWEN, slow(ODD), slow(GEMMA), slow(ROW_CODED), slow(TIED), slow(MIXTRAL)])
def test_every_parameter_is_reported_as_loaded(name: str, heard: Heard) -> None:
    with engine(PACKS / name, model_loader_extra_config=TRACKED) as llm:
        assert generate(llm, [[1, 2, 3]], 2)
        for key, parameter in model_of(llm).named_parameters():
            ours = key.endswith(("trellis", "suh", "svh", "mcg", "mul1"))
            assert parameter.numel() or not ours, f"{key}: prefetching takes no empty parameter"
            if hasattr(parameter, "weight_loader"):
                assert_fit_for_layerwise_reload(parameter.weight_loader)
    assert not [line for line in heard.lines(logging.WARNING) if "dtype" in line]
    assert any(re.match(r"vllm-exl3 loaded [1-9][\d.]* [KM]iB in \d", line) for line in heard.lines()), heard.lines()
    assert any(line.startswith("vllm-exl3 making kernels ready took ") for line in heard.lines())


@pytest.mark.slow
def test_a_half_dense_layer_is_reported_as_loaded(variant: Callable[..., Path]) -> None:
    with engine(variant(PHI, up_in_sixteen_bits), model_loader_extra_config=TRACKED) as llm:
        assert generate(llm, [[1, 2, 3]], 2)


def test_a_folder_of_saved_shards_is_refused_by_name(tmp_path: Path) -> None:
    folder = tmp_path / "sharded"
    folder.mkdir()
    for path in (PACKS / ODD).glob("*.json"):
        (folder / path.name).write_bytes(path.read_bytes())
    with engine(PACKS / ODD) as llm:
        llm.llm_engine.engine_core.save_sharded_state(path=str(folder))
    with (
        pytest.raises(Exl3PackError, match=r"save_sharded_state wrote.*Serve the pack itself"),
        engine(folder, load_format="sharded_state"),
    ):
        pass


def test_a_loader_that_turns_trellises_into_floats_is_refused() -> None:
    """vLLM's tensorizer loader gave int16 as float32; nothing would have noticed it before the first product."""
    config = Exl3Config({})
    config.maybe_update_config(str(PACKS / ODD))
    with (
        set_current_vllm_config(VllmConfig(load_config=LoadConfig(load_format="tensorizer"))),
        pytest.raises(Exl3PackError, match=r"--load-format tensorizer.*--load-format auto"),
    ):
        config.get_quant_method(torch.nn.Linear(2, 2), "model.layers.0.mlp.down_proj")


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("tensorizer") is not None, reason="tensorizer is installed")
def test_without_its_package_tensorizer_is_named_by_vllm() -> None:
    """It opens the file before it builds a layer, so before this package is asked; the same for any model."""
    with (
        pytest.raises(ModuleNotFoundError, match="No module named 'tensorizer'"),
        engine(PACKS / ODD, load_format="tensorizer"),
    ):
        pass


@pytest.mark.slow
def test_safetensors_are_read_ahead_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    with engine(PACKS / ODD) as llm:
        expected = generate(llm, PROMPTS)
    with engine(PACKS / ODD, safetensors_load_strategy="eager") as llm:
        assert generate(llm, PROMPTS) == expected


def test_progress_says_bytes_speed_and_what_is_left() -> None:
    now, lines = [0.0], []
    progress = LoadProgress(clock=lambda: now[0], log=lines.append)
    total = 40 << 30
    for second in range(20):
        now[0] = float(second)
        progress.add(2 << 30, lambda: total)
    assert lines[0] == "vllm-exl3 loading: 12.00 GiB of 40.00 GiB (30%), 2.40 GiB/s, 12 s left"
    assert len(lines) == 4 and lines[-1] == "vllm-exl3 loaded 40.00 GiB in 19.0 s, 2.11 GiB/s"
    progress.add(1 << 30, lambda: 1 << 30)  # a reload counts anew
    assert lines[-1] == "vllm-exl3 loaded 1.00 GiB in 0.0 s"
    progress.add(700 << 10, lambda: 700 << 10)  # a pack that rounds to no GiB at all
    assert lines[-1] == "vllm-exl3 loaded 700.0 KiB in 0.0 s"


def test_phases_are_named_when_they_begin_and_end(heard: Heard) -> None:
    with phase("counting sheep"):
        assert heard.lines() == ["vllm-exl3 counting sheep"]
    assert heard.lines()[1].startswith("vllm-exl3 counting sheep took 0.")
