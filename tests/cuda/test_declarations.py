"""What the host reads out of the kernels' sources is what the compiler makes of them."""

import ctypes
from collections.abc import Iterator

import pytest

from vllm_exl3.attention.native import KvDecodeArgs, KvMergeArgs
from vllm_exl3.cuda import compiler, declarations
from vllm_exl3.cuda.compiler import Instance, compile_instance, compiler_unavailable, kernel_sources
from vllm_exl3.cuda.declarations import constants, enumerators, members
from vllm_exl3.cuda.embedding import EmbeddingArgs
from vllm_exl3.cuda.geometry import LinearArgs, ShardArgs
from vllm_exl3.cuda.moe_geometry import ACTIVATION_KINDS, MoeArgs, MoeStage
from vllm_exl3.cuda.narrow import NarrowArgs, NarrowShard
from vllm_exl3.cuda.prefill_arguments import PrefillArgs, PrefillShard
from vllm_exl3.ops.activation import ACTIVATIONS

STRUCTURES = {
    "wide/wide.cuh": (ShardArgs, LinearArgs),
    "narrow/narrow.cuh": (NarrowShard, NarrowArgs),
    "gemm/gemm.cuh": (PrefillShard, PrefillArgs),
    "moe/cluster.cuh": (MoeStage, MoeArgs),
    "kv/merge.cuh": (KvDecodeArgs, KvMergeArgs),
    "decode/embedding.cu": (EmbeddingArgs,),
    "prefill/rotate.cu": (),
    "moe/combine_rows.cu": (),
    "wide/transform.cu": (),
}
"""Of files that between them include most others: those whose layout is compared."""

MACROS = {"CLUSTER": 2, "KIND": 2, "BITS": 4}


@pytest.fixture
def source(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """One file of "kernels", ``some.cuh``, whose text a test sets."""
    sources: dict[str, str] = {}
    monkeypatch.setattr(declarations, "kernel_sources", lambda: sources)
    declarations._text.cache_clear(), declarations.constants.cache_clear()
    yield sources
    declarations._text.cache_clear(), declarations.constants.cache_clear()


@pytest.mark.skipif(compiler_unavailable() is not None, reason=str(compiler_unavailable()))
@pytest.mark.parametrize("file", STRUCTURES)
def test_structures_and_constants_are_the_compilers(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [*(f"#define INSTANCE_{name} {value}" for name, value in MACROS.items())]
    if file == "prefill/rotate.cu":
        lines += ["#define ROTATE_WARPS 8", "#define ROTATE_BLOCKS 2"]
    lines.append(f'#include "{file}"')
    for structure in STRUCTURES[file]:
        name = structure.__name__
        lines.append(f"static_assert(sizeof({name}) == {ctypes.sizeof(structure)});")
        for field, *_ in structure._fields_:
            at = f"__INTADDR__(&(({name}*)0)->{field})"  # what offsetof is to this compiler
            lines.append(f"static_assert({at} == {getattr(structure, field).offset});")
    found = constants(file)
    assert found
    lines += [f"static_assert({name} == {value});" for name, value in found.items()]
    sources = {**kernel_sources(), "check.cu": "\n".join(lines)}
    if file.endswith(".cu"):  # the compiler takes headers by name only
        sources["check.cu"] = sources["check.cu"].replace(f'#include "{file}"', sources[file])
    monkeypatch.setattr(compiler, "kernel_sources", lambda: sources)
    compile_instance(Instance("check.cu", ""), "sm_90a")


def test_members_of_every_sort(source: dict[str, str]) -> None:
    source["some.cuh"] = """constexpr u32 COUNT = 1 << 2;  // constexpr u32 NONE = 3;
struct Inner {
    u32 a, b;       // two
};
struct Outer {
    Inner inner[COUNT / 2];
    const void* x;  // or null
    i64 stride;
    float alpha, beta;
};
"""
    inner = type("Inner", (ctypes.Structure,), {"_fields_": members("some.cuh", "Inner")})
    fields = members("some.cuh", "Outer", inner)
    assert [name for name, _ in fields] == ["inner", "x", "stride", "alpha", "beta"]
    assert [ctypes.sizeof(kind) for _, kind in fields] == [16, 8, 8, 4, 4] and fields[1][1] is ctypes.c_uint64
    assert constants("some.cuh") == {"COUNT": 4}


def test_what_ctypes_would_misread_is_refused(source: dict[str, str]) -> None:
    source["some.cuh"] = "struct Args {\n    bool wide;\n};\nenum Sort : u32 { A = 0, B };\n"
    with pytest.raises(ValueError, match="found 'bool wide', expected a number"):
        members("some.cuh", "Args")
    with pytest.raises(ValueError, match="no structure Other"):
        members("some.cuh", "Other")
    with pytest.raises(ValueError, match="no enumeration Other"):
        enumerators("some.cuh", "Other")
    assert enumerators("some.cuh", "Sort") == ["A", "B"]


def test_every_activation_has_a_number() -> None:
    assert set(ACTIVATION_KINDS) == set(ACTIVATIONS) and ACTIVATION_KINDS[:2] == ("swiglu", "swiglu_step")
