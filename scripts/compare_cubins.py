"""Says whether a change of the kernels' sources left their machine code alone.

    python scripts/compare_cubins.py BASE_TREE [--all] [--only PATTERN] [--show]

Compiles a representative list of kernel instances with the sources of another checkout and with those of this one, and
names the instances whose SASS, constants, registers or shared memory differ. Names of entries and functions do not
count. For a change that should rename or move code, not change it. The instances come from each tree's own survey of
kernels, so names of files and macros may differ between the trees; the survey must list as many kernels in the same
order. Results are cached by a fingerprint that leaves comments out, so that comments cost nothing.

Needs cuda-bindings, NVRTC and Triton (which brings cuobjdump); no GPU.
"""

import argparse
import difflib
import hashlib
import json
import os
import re
import struct
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
CACHE = ROOT / ".cache" / "compare_cubins"

INST3, MCG, MUL1 = range(3)
CODES = (((6, MUL1),), ((7, MUL1),), ((6, MCG),), ((10, INST3),), ((6, MCG), (8, MUL1)))
"""(half_bits, codebook) of the layers whose kernels are compared: whole and odd K, every codebook, a mixed layer."""

FAST_CODES = (((6, MUL1),),)
"""The same in the fast mode, for the kernels that multiply int8."""

ARCHITECTURES = ("sm_90a", "sm_80")

MOST = {
    "sm_90a": {
        "narrow": 6,
        "gemm": 5,
        "linear_wide": 3,
        "kv_decode": 3,
        "prefill": 3,
        "moe_gemm": 3,
        "moe_wide": 3,
        "moe_group_rows": 3,
        "embedding": 3,
    },
    "sm_80": {"narrow": 3, "moe_gemm": 2, "prefill_mma": 2, "kv_decode": 1, "narrow_rotate": 1, "dequantize": 1},
}
"""Instances of a kernel that are compared, spread over all that the survey lists; of others `FEW`, or none on sm_80."""

FEW = {"sm_90a": 2, "sm_80": 0}


def main() -> int:
    """Compare; 1 where something differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", type=Path, help="a checkout with the sources to compare with")
    parser.add_argument("--only", default="", help="a regular expression for labels of instances of this tree")
    parser.add_argument("--all", action="store_true", help="every instance of the survey: several hundred")
    parser.add_argument("--show", action="store_true", help="print the first lines of each difference")
    parser.add_argument("--compile", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.compile:
        print(json.dumps(compile_tree(json.loads(sys.stdin.read()), arguments.all)))
        return 0
    here = in_tree(ROOT, None, arguments.all)
    wanted = [index for index, entry in enumerate(here) if re.search(arguments.only, entry["label"])]
    base = in_tree(arguments.base, None, arguments.all)
    if len(base) != len(here):
        sys.exit(f"found {len(here)} instances here and {len(base)} in {arguments.base}, expected as many")
    after, before = (in_tree(tree, wanted, arguments.all) for tree in (ROOT, arguments.base))
    different = [pair for pair in zip(before, after, strict=True) if pair[0]["code"] != pair[1]["code"]]
    for old, new in different:
        print(f"differs: {new['architecture']} {new['label']}")
        if arguments.show:
            show(old["code"], new["code"])
    print(f"{len(after)} instances of {len({entry['source'] for entry in after})} files, {len(different)} differ")
    return 1 if different else 0


def show(old: str, new: str) -> None:
    """The first lines in which two listings differ."""
    texts = ((CACHE / name).read_text().splitlines() for name in (old, new))
    for line in list(difflib.unified_diff(*texts, "before", "after", lineterm="", n=1))[:30]:
        print(f"    {line}")


def in_tree(tree: Path, wanted: list[int] | None, every: bool) -> list[dict[str, Any]]:
    """What `compile_tree` gives, by an interpreter that imports the package from a tree."""
    environment = {**os.environ, "PYTHONPATH": str(tree.resolve() / "src")}
    command = [sys.executable, __file__, "--compile", str(tree), *(["--all"] if every else [])]
    result = subprocess.run(
        command, env=environment, input=json.dumps(wanted), stdout=subprocess.PIPE, text=True, check=True
    )
    found: list[dict[str, Any]] = json.loads(result.stdout)
    return found


def compile_tree(wanted: list[int] | None, every: bool) -> list[dict[str, Any]]:
    """Compile instances of the package that this process imports.

    Args:
        wanted: which of the list; None lists all and compiles none.
        every: whether the list is everything that the survey gives.

    Returns:
        For each instance its architecture, source, label and, where compiled, the file of its code in the cache.
    """
    chosen = list(representative(every))
    if wanted is None:
        return [{"architecture": arch, "source": item.source, "label": item.label} for arch, item in chosen]
    CACHE.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        return list(pool.map(lambda index: code_of(*chosen[index]), wanted))


def representative(every: bool) -> Iterator[tuple[str, Any]]:
    """(architecture, instance) of everything that is compared."""
    for architecture in ARCHITECTURES:
        by_source = defaultdict(list)
        for instance in surveyed(architecture):
            by_source[instance.source, instance.entry].append(instance)
        for (_, entry), instances in by_source.items():
            if every:
                yield from ((architecture, instance) for instance in instances)
                continue
            most = MOST[architecture].get(entry.removeprefix("exl3_"), FEW[architecture])
            step = max(1.0, len(instances) / most) if most else len(instances)
            picked = {int((place + 0.5) * step) for place in range(min(most, len(instances)))}
            yield from ((architecture, instances[index]) for index in sorted(picked))


def surveyed(architecture: str) -> list[Any]:
    """Every instance that layers of `CODES`, embeddings and the int4 cache use, each once."""
    from vllm_exl3.attention import native_cut
    from vllm_exl3.cuda import embedding, moe_survey, survey

    limits = survey.typical_limits(architecture)
    found = survey.instances_for(CODES, limits) + moe_survey.expert_instances(CODES, limits)
    os.environ["VLLM_EXL3_PRECISION"] = "fast"
    found += survey.instances_for(FAST_CODES, limits)
    del os.environ["VLLM_EXL3_PRECISION"]
    found += [*embedding.every_instance(), *native_cut.every_instance(limits.shared_memory)]
    return list(dict.fromkeys(found))


def code_of(architecture: str, instance: Any) -> dict[str, Any]:
    """The file with an instance's code, compiled where the cache lacks it."""
    from vllm_exl3.cuda.compiler import compile_instance

    key = fingerprint(architecture, instance)
    link = CACHE / f"{key}.key"
    if not link.exists():
        print(f"compiling {architecture} {instance.label[:100]}", file=sys.stderr, flush=True)
        cubin = compile_instance(instance, architecture)
        listing = code_text(cubin.image, f"registers {cubin.registers} stack {cubin.stack_bytes}")
        name = hashlib.sha256(listing.encode()).hexdigest()
        (CACHE / name).write_text(listing)
        link.write_text(name)
    return {
        "architecture": architecture, "source": instance.source, "label": instance.label, "code": link.read_text(),
    }  # fmt: skip


_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_INCLUDE = re.compile(r'^\s*#include "([^"]+)"', re.MULTILINE)


def fingerprint(architecture: str, instance: Any) -> str:
    """A digest of everything that decides an instance's code: without comments, and what is not included."""
    from vllm_exl3.cuda import compiler

    sources, seen, pending = compiler.kernel_sources(), {}, [instance.source]
    while pending:
        name = pending.pop()
        if name not in seen:
            seen[name] = re.sub(r"\s+", " ", _COMMENT.sub(" ", sources[name]))
            pending += _INCLUDE.findall(sources[name])
    parts = [
        compiler.compiler_version(),
        *compiler._options(architecture),
        repr(instance.macros),
        *sorted(seen.items()),
    ]
    return hashlib.sha256(repr(["listing 2", *parts]).encode()).hexdigest()


def code_text(image: bytes, head: str) -> str:
    """Machine code in words, without names: what the compiler says, the sections of data, the instructions."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(image)
        file.flush()
        sass = subprocess.run([tool, "-sass", file.name], capture_output=True, text=True, check=True).stdout
    lines = [line for line in sass.splitlines() if re.match(r"\s+/\*", line)]
    assert len(lines) > 10, "no instruction was recognized in what the disassembler printed"
    return "\n".join([head, *sorted(data_sections(image)), *lines]) + "\n"


def data_sections(image: bytes) -> Iterator[str]:
    """Constants, and sizes of shared memory, of a cubin; names of functions left out.

    Variables that C++ makes of constants at namespace scope, and the table of their addresses (bank 4), are left out:
    instructions have the values, and the compiler keeps such variables of every header.
    """
    (table,) = struct.unpack_from("<Q", image, 40)
    entry_size, count, names_at = struct.unpack_from("<HHH", image, 58)
    headers = [struct.unpack_from("<IIQQQQ", image, table + index * entry_size) for index in range(count)]
    names = headers[names_at][4]
    for name_offset, _, _, _, offset, size in headers:
        start = names + name_offset
        kind = ".".join(image[start : image.index(b"\0", start)].decode().split(".")[:3])
        if kind.startswith(".nv.constant") and kind != ".nv.constant4":
            yield f"{kind} {size} {hashlib.sha256(image[offset : offset + size]).hexdigest()}"
        if kind.startswith(".nv.shared"):
            yield f"{kind} {size}"


if __name__ == "__main__":
    sys.exit(main())
