"""The C++ library under AddressSanitizer and UndefinedBehaviorSanitizer, called at its C interface by the million.

    python -m tests.fuzz.abi --calls 10000000 --state .cache/fuzz/abi.json
    python -m tests.fuzz.abi --guided --calls 1000000 --state .cache/fuzz/guided.json

A seed and a number decide an input, hence a call's arguments. A run resumes at the number after the last. With
``--guided``, which needs clang, libFuzzer chooses inputs by what they reach and keeps its corpus between runs. A
finding ends the run with the sanitizer's report; the next run begins behind its input.
"""

import argparse
import concurrent.futures
import json
import os
import platform
import re
import resource
import shutil
import subprocess
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Outcome", "build", "build_against", "run", "run_guided"]

ROOT = Path(__file__).parents[2]
_SANITIZERS = "address,undefined,float-cast-overflow"
_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq")
_VBMI = (*_AVX512, "-mavx512vnni", "-mavx512vbmi", "-mavx512vbmi2")
_FP16 = (*_VBMI, "-mavx512fp16")
_SETS: dict[str, tuple[str, ...]] = {
    "avx2": _AVX2,
    "avx2_vnni": (*_AVX2, "-mavxvnni"),
    "avx512": _AVX512,
    "avx512_vnni": (*_AVX512, "-mavx512vnni"),
    "avx512_vbmi": _VBMI,
    "avx512_words": _VBMI,
    "avx512_fp16": _FP16,
    "amx": (*_FP16, "-mamx-tile", "-mamx-int8"),
}
_COMMON = (
    *("abi", "decode", "encode", "isa", "linear", "moe", "moe_check", "moe_plan", "parallel", "pool", "rings", "rows"),
    "kernels_scalar",
)
_CALLS = ("abi", "abi_linear", "abi_moe", "abi_rows", "abi_launch")


@dataclass(frozen=True)
class Outcome:
    """Counts of one run.

    Attributes:
        inputs: how many inputs were tried.
        computed: calls that computed something, by function.
        refused: calls that were refused, as expected, by function.
        compared: calls of the scalar instruction set that another one's result was compared with, by function.
        cpu_seconds: processor time.
        report: what was found, or None.
        found_by: the number of the input that found it.
    """

    inputs: int
    computed: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    compared: Counter[str] = field(default_factory=Counter)
    cpu_seconds: float = 0.0
    report: str | None = None
    found_by: int | None = None

    @property
    def calls(self) -> int:
        """Calls of the library."""
        return self.computed.total() + self.refused.total()


def build(folder: Path, *, guided: bool = False) -> Path:
    """Compile what changed of the library, with sanitizers, and its caller; takes some minutes of a processor.

    Raises:
        RuntimeError: a source does not compile, or there is no clang for libFuzzer.
    """
    if guided and shutil.which("clang++") is None:
        raise RuntimeError("libFuzzer needs clang++, which was not found on PATH")
    folder.mkdir(parents=True, exist_ok=True)
    sources = [ROOT / "csrc" / "cpu" / f"{name}.cpp" for name in _COMMON]
    sources += [ROOT / "csrc" / "cuda" / "launch.cpp"]
    if platform.machine() in ("x86_64", "AMD64"):
        sources += [ROOT / "csrc" / "cpu" / f"kernels_{name}.cpp" for name in _SETS]
    here = Path(__file__).parent
    sources += [here / f"{name}.cpp" for name in (*_CALLS, *(() if guided else ("abi_random",)))]
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(lambda source: _compile(source, folder, guided), sources))
    program = folder / ("abi_guided" if guided else "abi")
    kinds = _SANITIZERS.removesuffix(",float-cast-overflow")
    sanitizers = f"-fsanitize={'fuzzer,' if guided else ''}{kinds}"
    _compiler([_compiler_name(), sanitizers, *map(str, objects), "-o", str(program), "-lpthread"])
    return program


def build_against(library: Path, folder: Path) -> Path:
    """Compile the caller alone, with random inputs, for a library that is built without sanitizers.

    Raises:
        RuntimeError: a source does not compile.
    """
    sources = [str(Path(__file__).with_name(f"{name}.cpp")) for name in (*_CALLS, "abi_random")]
    program = folder / "abi"
    command = [_compiler_name(), "-std=c++17", "-O0", *sources, str(library), f"-Wl,-rpath,{library.parent}"]
    _compiler([*command, "-o", str(program), "-lpthread"])
    return program


def _compiler_name() -> str:
    return "clang++" if shutil.which("clang++") else "g++"


def _current(made: Path) -> bool:
    """Whether an object file is newer than all that it was compiled from, which the compiler listed beside it."""
    listed = made.with_suffix(".d")
    if not made.exists() or not listed.exists():
        return False
    sources = listed.read_text().replace("\\\n", " ").partition(": ")[2].split()
    return all(Path(source).exists() and Path(source).stat().st_mtime < made.stat().st_mtime for source in sources)


def _compile(source: Path, folder: Path, guided: bool) -> Path:
    # Loops over numbers reach nothing new: to count what they reach would take most of the time.
    guided = guided and not source.stem.startswith("kernels_")
    made = folder / f"{source.parent.name}_{source.stem}{'_guided' if guided else ''}.o"
    if _current(made):
        return made
    # The portable kernels' loops, instrumented, take clang ten minutes to optimize, and half a one at -O1.
    level = "-O1" if "scalar" in source.stem else "-O2"
    flags = ["-std=c++17", level, "-g1", "-fno-omit-frame-pointer", "-ffp-contract=off", "-fno-sanitize-recover=all"]
    flags += [f"-fsanitize={'fuzzer-no-link,' if guided else ''}{_SANITIZERS}"]
    # The driver's functions take structures of cuda.h, which launch.cpp declares under names of its own.
    flags += ["-fno-sanitize=function"] if source.stem == "launch" and _compiler_name() == "clang++" else []
    flags += ["-fno-sanitize-coverage=trace-cmp"] if guided else []  # which took 60 % of the time
    flags += _SETS.get(source.stem.removeprefix("kernels_"), ())
    if source.stem == "isa" and platform.machine() in ("x86_64", "AMD64"):
        flags += ["-DEXL3_AVX_VNNI", "-DEXL3_AVX512_FP16", "-DEXL3_AMX"]
    part = made.with_suffix(".part")
    _compiler(
        [_compiler_name(), *flags, "-c", str(source), "-o", str(part), "-MMD", "-MF", str(made.with_suffix(".d"))]
    )
    part.replace(made)
    return made


def _compiler(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr[-4000:]}")


def run(program: Path, *, inputs: int, seed: int = 0, first: int = 0, **environment: str) -> Outcome:
    """Try so many inputs of a seed, from a number on."""
    return _run([str(program), str(seed), str(first), str(inputs)], **environment)


def run_guided(program: Path, folder: Path, *, inputs: int, seed: int = 0) -> Outcome:
    """Let libFuzzer choose so many inputs; the corpus, and an input that finds something, lie in the folder."""
    corpus = folder / "corpus"
    corpus.mkdir(parents=True, exist_ok=True)
    options = [f"-runs={inputs}", "-max_len=224", "-len_control=0", f"-artifact_prefix={corpus}/", f"-seed={seed + 1}"]
    options += ["-print_final_stats=1", "-detect_leaks=0", "-timeout=600"]
    return _run([str(program), str(corpus), *options])


def _run(command: list[str], **environment: str) -> Outcome:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    # Without leak detection, which needs ptrace; nothing in the library outlives a call except by design.
    sanitizers = {"ASAN_OPTIONS": "detect_leaks=0", "UBSAN_OPTIONS": "print_stacktrace=1"}
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
        env={**os.environ, **sanitizers, **environment},
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    output = done.stdout + done.stderr
    counts: dict[str, Counter[str]] = {"computed": Counter(), "refused": Counter(), "compared": Counter()}
    for name, *numbers in re.findall(r"^CALLS (\w+) (\d+) (\d+) (\d+)$", output, re.MULTILINE):
        for count, number in zip(counts.values(), numbers, strict=True):
            count[name] += int(number)
    tried = re.search(r"(?:Done |number_of_executed_units: +)(\d+)", output)
    failed = done.returncode != 0 or tried is None or not counts["computed"]
    number = re.search(r"in input (\d+)", output)
    return Outcome(
        inputs=int(tried[1]) if tried else 0,
        **counts,
        cpu_seconds=after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
        report=output[-6000:] if failed else None,
        found_by=int(number[1]) if failed and number else None,
    )


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="abi.py", description="Call the C++ library under sanitizers.")
    parser.add_argument("--calls", type=int, default=10_000_000, help="how many in all, over every run")
    parser.add_argument("--state", type=Path, default=Path(".cache/fuzz/abi.json"), help="where the run resumes from")
    parser.add_argument("--inputs", type=int, default=100_000, help="inputs of one process, after which is counted")
    parser.add_argument("--seed", type=int, default=1, help="of a campaign that begins")
    parser.add_argument("--guided", action="store_true", help="let libFuzzer choose the inputs")
    return parser.parse_args()


def _add(state: dict[str, Any], done: Outcome, first: int, inputs: int) -> None:
    """Count a run in the campaign's state."""
    state["next"] = first + inputs if done.found_by is None else done.found_by + 1
    state["inputs"] += done.inputs
    state["calls"] += done.calls
    state["cpu_seconds"] = round(state["cpu_seconds"] + done.cpu_seconds, 1)
    for kind in ("computed", "refused", "compared"):
        state[kind] = dict(Counter(state[kind]) + getattr(done, kind))
    if done.report is not None:
        state["found"].append({"input": done.found_by, "report": done.report[:600]})


def main() -> int:
    """Resume the campaign; the exit status is 1 where something was found."""
    arguments = _parse()
    folder = ROOT / ".cache" / "fuzz" / "abi"
    program = build(folder, guided=arguments.guided)
    state: dict[str, Any] = {
        "seed": arguments.seed,
        "next": 0,
        "inputs": 0,
        "calls": 0,
        "cpu_seconds": 0.0,
        "found": [],
    }
    state |= {kind: {} for kind in ("computed", "refused", "compared")}
    if arguments.state.exists():
        state = json.loads(arguments.state.read_text())
    while state["calls"] < arguments.calls:
        first = state["next"]
        if arguments.guided:
            done = run_guided(program, folder, inputs=arguments.inputs, seed=first)
        else:
            done = run(program, inputs=arguments.inputs, seed=state["seed"], first=first)
        _add(state, done, first, arguments.inputs)
        arguments.state.parent.mkdir(parents=True, exist_ok=True)
        arguments.state.write_text(json.dumps(state, indent=1))
        print(f"{state['inputs']} inputs, {state['calls']} calls, {len(state['found'])} found", flush=True)
        if done.report is not None:
            print(done.report)
            return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
