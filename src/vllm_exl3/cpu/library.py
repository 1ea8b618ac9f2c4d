"""Loads the C++ library (csrc/cpu) with ctypes, and says why it cannot be used where it cannot.

One library serves every Python and torch: its interface (csrc/cpu/abi.h) is plain C, and it links
no OpenMP runtime. Where the process already runs one, `Library.use_openmp` lends it to the library.
"""

import ctypes
import threading
from functools import lru_cache
from pathlib import Path

import vllm_exl3.cpu
from vllm_exl3 import env

__all__ = [
    "ABI_VERSION",
    "FlatStruct",
    "LinearCall",
    "MoECallStruct",
    "RowCall",
    "ShardStruct",
    "check",
    "find_openmp",
    "library",
    "unavailable",
    "use_openmp",
]

ABI_VERSION = 6
"""The ``EXL3_ABI_VERSION`` that this code speaks."""

_NAME = "libvllm_exl3_cpu"


class ShardStruct(ctypes.Structure):
    """``exl3_shard``: the fields of `vllm_exl3.ops.shards.Shard`."""

    _fields_ = tuple(
        (name, ctypes.c_int64)
        for name in ("half_bits", "codebook", "in_features", "out_features", "crop_start", "crop_size")
    )


class LinearCall(ctypes.Structure):
    """``exl3_linear_call``; pointers as integers, since they come from ``Tensor.data_ptr``."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("shards", "trellis", "suh", "svh", "bias", "x", "y")),
        *((name, ctypes.c_int64) for name in ("rows", "columns", "x_stride", "y_stride")),
        *((name, ctypes.c_int32) for name in ("shard_count", "dtype", "bias_dtype", "threads")),
    )


class FlatStruct(ctypes.Structure):
    """``exl3_flat``: the flat tensors of one projection of all experts, and their elements."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("trellis", "suh", "svh", "bias")),
        *((name, ctypes.c_int64) for name in ("trellis_size", "suh_size", "svh_size", "bias_size")),
    )


class MoECallStruct(ctypes.Structure):
    """``exl3_moe_call``; pointers as integers, since they come from ``Tensor.data_ptr``."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "ids", "weights", "out", "table", "context")),
        *((name, FlatStruct) for name in ("w13", "w2")),
        *((name, ctypes.c_int64) for name in ("tokens", "hidden", "intermediate", "top_k", "experts")),
        *((name, ctypes.c_int64) for name in ("x_stride", "out_stride")),
        *((name, ctypes.c_float) for name in ("alpha", "beta", "limit")),
        *((name, ctypes.c_int32) for name in ("dtype", "out_dtype", "id_bytes", "projections", "activation")),
        *((name, ctypes.c_int32) for name in ("weight_on_input", "slots", "threads")),
    )


class RowCall(ctypes.Structure):
    """``exl3_row_call``; pointers as integers, since they come from ``Tensor.data_ptr``."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("table", "scales", "ids", "index", "offsets", "out")),
        *((name, ctypes.c_int64) for name in ("count", "rows", "width", "groups", "first_row")),
        *((name, ctypes.c_int32) for name in ("kind", "bits", "scale_dtype", "dtype", "threads")),
    )


def library() -> ctypes.CDLL:
    """The loaded library, with ``VLLM_EXL3_CPU_ISA`` applied.

    Raises:
        RuntimeError: it cannot be used here; the message is `unavailable`'s.
    """
    loaded, reason = _load()
    if loaded is None:
        raise RuntimeError(reason)
    return loaded


def unavailable() -> str | None:
    """Why `library` would raise, or None."""
    return _load()[1]


def check(code: int) -> None:
    """Raise for a code that a library function returned.

    Raises:
        RuntimeError: the code is not 0.
    """
    if code:
        raise RuntimeError(library().exl3_error_text(code).decode())


def find_openmp() -> str | None:
    """The file of the OpenMP runtime that this process has loaded: the one torch runs on, or None."""
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        return None
    files = dict.fromkeys(line.split(maxsplit=5)[5] for line in maps.splitlines() if line.count("/"))
    runtimes = [file for file in files if Path(file).name.startswith(("libgomp", "libiomp5", "libomp"))]
    # torch's wheels bring their own copy, which is the one that vLLM preloads and binds.
    runtimes.sort(key=lambda file: "torch" not in file)
    return runtimes[0] if runtimes else None


_openmp_lock = threading.Lock()
_openmp_used = False


def use_openmp() -> None:
    """Let the library work on the threads of the process' OpenMP runtime, once torch has loaded it.

    vLLM binds those threads to CPUs, and they spin for a while after each torch op: a second pool
    would compete with them for the same cores.
    """
    global _openmp_used  # noqa: PLW0603
    with _openmp_lock:
        if _openmp_used or (runtime := find_openmp()) is None:
            return
        function = getattr(ctypes.CDLL(runtime), "GOMP_parallel", None)
        if function is not None:
            library().exl3_set_openmp(ctypes.cast(function, ctypes.c_void_p))
        _openmp_used = True


def _file() -> Path | None:
    # An editable install keeps the built library beside the installed package, not beside the sources.
    for folder in vllm_exl3.cpu.__path__:
        for suffix in (".so", ".dylib", ".dll"):
            file = Path(folder) / f"{_NAME}{suffix}"
            if file.exists():
                return file
    return None


def _absence() -> str:
    """Why there is no library, and what to do: a checkout's is built by hand, a package's comes with it."""
    checkout = Path(__file__).parents[3]
    if (checkout / "CMakeLists.txt").exists():
        return (
            f"the CPU kernels of this checkout are not built: in {checkout}, run cmake -B build "
            "-DCMAKE_BUILD_TYPE=Release && cmake --build build, which takes g++ or clang, or pip install it."
        )
    return (
        "vllm-exl3 was installed without its CPU kernels, as happens where no C++ compiler is found and under "
        "VLLM_EXL3_NO_NATIVE=1. Install g++ or clang and reinstall it from source, or take a wheel for this platform."
    )


@lru_cache(maxsize=1)
def _load() -> tuple[ctypes.CDLL | None, str | None]:
    file = _file()
    if file is None:
        return None, _absence()
    try:
        loaded = ctypes.CDLL(str(file))
        version = loaded.exl3_abi_version()
    except (OSError, AttributeError) as error:
        return None, f"{file} does not load: {error}. Reinstall vllm-exl3."
    if version != ABI_VERSION:
        return None, f"{file} has interface {version}, expected {ABI_VERSION}. Reinstall vllm-exl3 (or rebuild it)."
    _declare(loaded)
    isa = env.CPU_ISA.get()
    if loaded.exl3_select_isa(isa.encode()):
        return None, f"VLLM_EXL3_CPU_ISA={isa}: this CPU does not run it; the best here is {loaded.exl3_isa().decode()}"
    return loaded, None


def _declare(loaded: ctypes.CDLL) -> None:
    pointer, integer, long = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64
    loaded.exl3_error_text.restype = ctypes.c_char_p
    loaded.exl3_isa.restype = ctypes.c_char_p
    loaded.exl3_select_isa.argtypes = [ctypes.c_char_p]
    loaded.exl3_set_openmp.argtypes = [pointer]
    loaded.exl3_set_openmp.restype = None
    loaded.exl3_linear.argtypes = [ctypes.POINTER(LinearCall)]
    loaded.exl3_dequantize.argtypes = [
        *(pointer, integer, pointer, pointer, pointer, integer, integer, pointer, long, integer)
    ]
    loaded.exl3_hadamard.argtypes = [pointer, long, integer]
    loaded.exl3_gather_rows.argtypes = [ctypes.POINTER(RowCall)]
    loaded.exl3_moe.argtypes = [ctypes.POINTER(MoECallStruct)]
    loaded.exl3_moe_reserve.argtypes = [ctypes.POINTER(MoECallStruct)]
    loaded.exl3_context_create.argtypes = [integer, ctypes.POINTER(ctypes.c_int32), integer, ctypes.POINTER(pointer)]
    loaded.exl3_context_destroy.argtypes = [pointer]
    loaded.exl3_context_destroy.restype = None
    loaded.exl3_context_bytes.argtypes = [pointer]
    loaded.exl3_context_bytes.restype = long
    loaded.exl3_set_driver.argtypes = [pointer] * 4
    loaded.exl3_set_driver.restype = None
    loaded.exl3_set_share_driver.argtypes = [pointer]
    loaded.exl3_set_share_driver.restype = None
    loaded.exl3_enqueue_share.argtypes = [pointer]
    loaded.exl3_launch.argtypes = [pointer, *[ctypes.c_uint64] * 10, pointer]
    loaded.exl3_encode.argtypes = [pointer, long, long, long, integer, integer, pointer, pointer, integer]
