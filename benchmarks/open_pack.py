"""How long it takes, and how much memory, to open and check a pack of very many tensors.

Generates the headers of a mixture-of-experts pack (weights are a hole in the file, so it takes no
disk space), then opens it in fresh processes. Target: 300,000 tensors in 3 s and 1 GiB.

    python benchmarks/open_pack.py [--tensors 300000] [--files 1] [--repeats 5] [--write]
"""

import argparse
import json
import statistics
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from vllm_exl3.tools.results import write_results

RESULTS = Path(__file__).parent / "results/cpu/load.json"
COMMAND = "python benchmarks/open_pack.py --write"
EXPERTS = 512
MARKER = struct.pack("<i", -2082680531)

MEASURE = """
import json, sys, time
folder = sys.argv[1]
begin = time.perf_counter()
from vllm_exl3.pack import NameResolver, Pack
imported = time.perf_counter()
pack = Pack.open(folder)
opened = time.perf_counter()
assert Pack.open(folder) is pack
again = time.perf_counter()

def peak():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))

memory = peak()
resolver = NameResolver(pack)
for key in pack.experts:
    resolver.resolve_experts(key + ".experts")
resolved = time.perf_counter()
from vllm_exl3.pack.check import check
begin_check = time.perf_counter()
warnings = check(pack)
checked = time.perf_counter()
print(json.dumps({
    "tensors": len(pack.tensors), "linears": len(pack.linears), "warnings": len(warnings),
    "import": imported - begin, "open": opened - imported, "open_again": again - opened,
    "resolve": resolved - again, "check": checked - begin_check,
    "open_rss": memory, "check_rss": peak(),
}))
"""


def tensor_rows(count: int) -> Iterator[tuple[str, str, list[int]]]:
    """Name, dtype and shape of about ``count`` tensors of a pack with 512 experts a layer."""
    yield "model.embed_tokens.weight", "BF16", [1024, 2048]
    yield "model.norm.weight", "BF16", [2048]
    made = 2
    layer = 0
    while made < count:
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.input_layernorm.weight", "BF16", [2048]
        made += 1
        for expert in range(EXPERTS):
            for name, rows, columns in (("gate_proj", 128, 32), ("up_proj", 128, 32), ("down_proj", 32, 128)):
                key = f"{prefix}.mlp.experts.{expert}.{name}"
                yield f"{key}.mul1", "I32", []
                yield f"{key}.suh", "F16", [16 * rows]
                yield f"{key}.svh", "F16", [16 * columns]
                yield f"{key}.trellis", "I16", [rows, columns, 48]
                made += 4
        layer += 1


def generate(folder: Path, count: int, files: int) -> int:
    """Write the pack and return the bytes of its headers."""
    rows = list(tensor_rows(count))
    rows.sort(key=lambda row: row[1] != "I32")  # as safetensors orders them: widest type first
    layers = max(int(name.split(".")[2]) for name, _, _ in rows if name.startswith("model.layers.")) + 1
    config = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_hidden_layers": layers,
        "num_experts": EXPERTS,
        "quantization_config": {"quant_method": "exl3", "bits": 3.0, "codebook": "mul1"},
    }
    (folder / "config.json").write_text(json.dumps(config))
    weight_map = {}
    size = 0
    for number in range(files):
        name = f"model-{number + 1:05d}-of-{files:05d}.safetensors" if files > 1 else "model.safetensors"
        part = rows[number::files]
        size += write_file(folder / name, part)
        weight_map.update({row[0]: name for row in part})
    if files > 1:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    write_ledger(folder, rows)
    return size


def write_file(path: Path, rows: list[tuple[str, str, list[int]]]) -> int:
    """Write one file whose data is a hole apart from the markers; return the bytes of its header."""
    header = {}
    position = markers = 0
    for name, dtype, shape in rows:
        size = 4 if dtype == "I32" else 2
        for dimension in shape:
            size *= dimension
        markers += dtype == "I32"
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [position, position + size]}
        position += size
    text = json.dumps(header, separators=(",", ":")).encode()
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text + MARKER * markers)
        file.truncate(8 + len(text) + position)
    return len(text)


def write_ledger(folder: Path, rows: list[tuple[str, str, list[int]]]) -> None:
    """quantization_config.json with an entry per module, indented as exllamav3 writes it."""
    storage: dict[str, dict] = {}
    for name, dtype, shape in rows:
        key, _, leaf = name.rpartition(".")
        entry = storage.setdefault(key, {"stored_tensors": {}})
        entry["stored_tensors"][name] = {"shape": shape, "n_bytes": 2, "dtype": dtype}
        if leaf == "trellis":
            entry |= {"quant_format": "exl3", "bits_per_weight": 3, "mul1_multiplier": 0x83DCD12D}
    text = json.dumps({"quant_method": "exl3", "bits": 3.0, "tensor_storage": storage}, indent=4)
    (folder / "quantization_config.json").write_text(text)


def measure(folder: Path, repeats: int) -> list[dict]:
    """Run the measurement in fresh processes."""
    command = [sys.executable, "-c", MEASURE, str(folder)]
    return [json.loads(subprocess.run(command, check=True, capture_output=True).stdout) for _ in range(repeats)]


def summarise(runs: list[dict], files: int, header_bytes: int) -> list[dict]:
    """One row a step: median time, and the peak of resident memory after it where it was taken."""
    rows = []
    for step in ("open", "open_again", "resolve", "check"):
        row = {
            "kernel": step,
            "tensors": runs[0]["tensors"],
            "linears": runs[0]["linears"],
            "files": files,
            "header_bytes": header_bytes,
            "us": round(statistics.median(run[step] for run in runs) * 1e6, 1),
            "us_min": round(min(run[step] for run in runs) * 1e6, 1),
            "command": COMMAND,
        }
        if f"{step}_rss" in runs[0]:
            row["rss_bytes"] = max(run[f"{step}_rss"] for run in runs)
        rows.append(row)
    return rows


def main() -> None:
    """Measure, print, and write the results if asked to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tensors", type=int, default=300_000)
    parser.add_argument("--files", type=int, nargs="+", default=[1, 40])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--write", action="store_true", help=f"write {RESULTS}")
    arguments = parser.parse_args()
    rows = []
    for files in arguments.files:
        with tempfile.TemporaryDirectory() as folder:
            header_bytes = generate(Path(folder), arguments.tensors, files)
            rows += summarise(measure(Path(folder), arguments.repeats), files, header_bytes)
    for row in rows:
        memory = f", {row['rss_bytes'] / 2**20:.0f} MiB" if "rss_bytes" in row else ""
        print(f"{row['kernel']:>10}  {row['tensors']} tensors, {row['files']} files: {row['us'] / 1e6:.3f} s{memory}")
    if arguments.write:
        steps = {row["kernel"] for row in rows}
        write_results(RESULTS, rows, machine="cpu", command=COMMAND, replaces=lambda row: row["kernel"] in steps)


if __name__ == "__main__":
    main()
