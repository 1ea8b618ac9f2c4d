"""The kernels of quantized tables compile for every architecture, and which one serves what."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from vllm_exl3.cuda.compiler import ARCHITECTURES, compile_instance, compiler_unavailable
from vllm_exl3.cuda.embedding import every_instance, instance_for, ngram_instance, pack_instances
from vllm_exl3.pack.pack import Pack


@pytest.mark.skipif(compiler_unavailable() is not None, reason=str(compiler_unavailable()))
@pytest.mark.parametrize(
    "architecture", [pytest.param(name, marks=[] if name == "sm_80" else pytest.mark.slow) for name in ARCHITECTURES]
)
def test_kernels_compile(architecture: str) -> None:
    instances = list(every_instance())
    with ThreadPoolExecutor(2) as pool:
        cubins = list(pool.map(lambda instance: compile_instance(instance, architecture), instances))
    for instance, cubin in zip(instances, cubins, strict=True):
        assert cubin.image.startswith(b"\x7fELF"), instance
        assert 0 < cubin.registers <= 64 and not cubin.spill_bytes and not cubin.stack_bytes, (instance, cubin.log)


def macros(table: torch.Tensor, groups: int, width: int) -> dict[str, str]:
    return dict(instance_for(table, groups, width).macros)


@pytest.mark.parametrize("bits", range(1, 9))
def test_a_row_code_has_the_kernel_of_its_k(bits: int) -> None:
    coded = torch.empty((3, 3 * (1 + 16 * bits)), dtype=torch.int16)
    assert macros(coded, 3, 576) == {"INSTANCE_KIND": "2", "INSTANCE_BITS": str(bits)}
    assert dict(ngram_instance(1 + 10 * bits).macros) == {"INSTANCE_KIND": "3", "INSTANCE_BITS": str(bits)}


@pytest.mark.parametrize(("width", "vector"), [(576, "8"), (2880, "8"), (1000, "8"), (127, "1"), (1, "1"), (2884, "1")])
def test_integers_are_read_eight_at_a_time_where_rows_are_aligned(width: int, vector: str) -> None:
    for kind, dtype in (("0", torch.int8), ("1", torch.uint8)):
        table = torch.empty((3, width), dtype=dtype)
        assert macros(table, 1, width) == {"INSTANCE_KIND": kind, "INSTANCE_VECTOR": vector}


def test_every_kernel_that_can_be_asked_for_is_compiled_by_the_test() -> None:
    assert len(set(every_instance())) == 2 * 2 + 2 * 8


def test_a_pack_s_tables_tell_which_kernels_it_needs() -> None:
    pack = Path(__file__).parents[1] / "data" / "packs" / "qwen3-2.25-mul1-emb4"
    assert [dict(instance.macros) for instance in pack_instances(Pack.open(str(pack)))] == [
        {"INSTANCE_KIND": "2", "INSTANCE_BITS": "4"}
    ]
    assert not pack_instances(Pack.open(str(pack.with_name("llama_odd-4.0-mul1"))))
