"""The CPU library under AddressSanitizer and UndefinedBehaviorSanitizer, called at its C interface by the million.

    python -m tests.fuzz.abi --calls 10000000 --state .cache/fuzz/abi.json

With clang, libFuzzer chooses the arguments by what they reach, and keeps its corpus between runs; with g++ alone they
are random. A finding ends the run with the sanitizer's report; its input goes into the corpus, with which the next run
begins.
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Outcome", "build", "run"]

ROOT = Path(__file__).parents[2]
_SANITIZERS = "address,undefined,float-cast-overflow"
_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq")
_SETS: dict[str, tuple[str, ...]] = {
    "avx2": _AVX2,
    "avx2_vnni": (*_AVX2, "-mavxvnni"),
    "avx512": _AVX512,
    "avx512_vnni": (*_AVX512, "-mavx512vnni"),
    "avx512_vbmi": (*_AVX512, "-mavx512vnni", "-mavx512vbmi", "-mavx512vbmi2"),
}
_COMMON = ("abi", "decode", "encode", "isa", "linear", "parallel", "rings", "rows", "kernels_scalar")


@dataclass(frozen=True)
class Outcome:
    """Counts of one run.

    Attributes:
        inputs: how many inputs were tried.
        calls: calls of the library in them.
        cpu_seconds: processor time.
        report: what was found, or None.
    """

    inputs: int
    calls: int
    cpu_seconds: float
    report: str | None


def build(folder: Path) -> Path:
    """Compile what changed of the library and the fuzzer into a folder; takes some minutes of a processor.

    Raises:
        RuntimeError: a source does not compile.
    """
    folder.mkdir(parents=True, exist_ok=True)
    sources = [ROOT / "csrc" / "cpu" / f"{name}.cpp" for name in _COMMON]
    if platform.machine() in ("x86_64", "AMD64"):
        sources += [ROOT / "csrc" / "cpu" / f"kernels_{name}.cpp" for name in _SETS]
    fuzzed = shutil.which("clang++") is not None
    sources += [Path(__file__).with_name(name) for name in ("abi.cpp", *(() if fuzzed else ("abi_random.cpp",)))]
    newest = max(header.stat().st_mtime for header in (ROOT / "csrc" / "cpu").glob("*.h"))
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(lambda source: _compile(source, folder, fuzzed, newest), sources))
    program = folder / "abi"
    kinds = _SANITIZERS.removesuffix(",float-cast-overflow")
    linked = ["clang++", f"-fsanitize=fuzzer,{kinds}"] if fuzzed else ["g++", f"-fsanitize={kinds}"]
    _compiler([*linked, *map(str, objects), "-o", str(program), "-lpthread"])
    return program


def _compile(source: Path, folder: Path, fuzzed: bool, newest: float) -> Path:
    name = f"{'fuzz_' if source.parent.name == 'fuzz' else ''}{source.stem}"
    made = folder / f"{name}.o"
    if made.exists() and made.stat().st_mtime > max(newest, source.stat().st_mtime):
        return made
    # The portable kernels' loops, instrumented, take clang ten minutes to optimize, and half a one at -O1.
    level = "-O1" if "scalar" in name else "-O2"
    flags = ["-std=c++17", level, "-g1", "-fno-omit-frame-pointer", "-ffp-contract=off", "-fno-sanitize-recover=all"]
    # Loops over numbers reach nothing new: to count what they reach would take most of the time.
    guided = fuzzed and not name.startswith("kernels_")
    flags += [f"-fsanitize={'fuzzer-no-link,' if guided else ''}{_SANITIZERS}"]
    flags += ["-fno-sanitize-coverage=trace-cmp"] if guided else []  # which took 60 % of the time
    flags += _SETS.get(name.removeprefix("kernels_"), ())
    flags += ["-DEXL3_AVX_VNNI"] if name == "isa" and platform.machine() in ("x86_64", "AMD64") else []
    part = made.with_suffix(".part")
    _compiler(["clang++" if fuzzed else "g++", *flags, "-c", str(source), "-o", str(part)])
    part.replace(made)
    return made


def _compiler(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr[-4000:]}")


def run(program: Path, folder: Path, *, inputs: int, seed: int = 0) -> Outcome:
    """Try so many inputs; the corpus, and an input that finds something, lie in the folder."""
    corpus = folder / "corpus"
    corpus.mkdir(parents=True, exist_ok=True)
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    if (program.parent / "fuzz_abi_random.o").exists():
        command = [str(program), str(seed * inputs), str(inputs)]
    else:
        # Without leak detection, which needs ptrace; nothing in the library outlives a call except by design.
        options = [
            f"-runs={inputs}",
            "-max_len=160",
            "-len_control=0",
            f"-artifact_prefix={corpus}/",
            f"-seed={seed + 1}",
        ]
        command = [str(program), str(corpus), *options, "-print_final_stats=1", "-detect_leaks=0", "-timeout=600"]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
        env={**os.environ, "ASAN_OPTIONS": "detect_leaks=0", "UBSAN_OPTIONS": "print_stacktrace=1"},
    )
    used = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before
    output = done.stdout + done.stderr
    tried = re.search(r"(?:Done |number_of_executed_units: +)(\d+)", output)
    called = re.search(r"CALLS (\d+)", output)
    report = output[-6000:] if done.returncode or tried is None or called is None else None
    return Outcome(int(tried[1]) if tried else 0, int(called[1]) if called else 0, used, report)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="abi.py", description="Call the CPU library under sanitizers.")
    parser.add_argument("--calls", type=int, default=10_000_000, help="how many in all, over every run")
    parser.add_argument("--state", type=Path, default=Path(".cache/fuzz/abi.json"), help="where the run resumes from")
    parser.add_argument("--inputs", type=int, default=50_000, help="inputs of one process, after which is counted")
    return parser.parse_args()


def main() -> int:
    """Resume the campaign; the exit status is 1 where something was found."""
    arguments = _parse()
    folder = arguments.state.with_suffix("")
    program = build(folder)
    state: dict[str, Any] = {"next": 0, "inputs": 0, "calls": 0, "cpu_seconds": 0.0, "found": []}
    if arguments.state.exists():
        state = json.loads(arguments.state.read_text())
    while state["calls"] < arguments.calls:
        done = run(program, folder, inputs=arguments.inputs, seed=state["next"])
        state["next"] += 1
        state["inputs"] += done.inputs
        state["calls"] += done.calls
        state["cpu_seconds"] = round(state["cpu_seconds"] + done.cpu_seconds, 1)
        if done.report is not None:
            state["found"].append(done.report[:600])
        arguments.state.write_text(json.dumps(state, indent=1))
        print(f"{state['inputs']} inputs, {state['calls']} calls, {len(state['found'])} found", flush=True)
        if done.report is not None:
            print(done.report)
            return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
