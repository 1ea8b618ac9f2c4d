"""Whole plans: what fits, the command, advice that works, and speeds against committed measurements."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.conftest import DATA
from tests.plan.shapes import EXPERTS, LLAMA_8B, hollow
from vllm_exl3.cli import app
from vllm_exl3.pack.pack import Pack
from vllm_exl3.plan.advice import advice, command, environment, shell
from vllm_exl3.plan.as_data import CARDS, plan_as_data
from vllm_exl3.plan.cpu_plan import cpu_experts_us, make_cpu_plan
from vllm_exl3.plan.estimate import HostShare, decode_us
from vllm_exl3.plan.gpus import GPUS, find_gpu, gpu_by_memory
from vllm_exl3.plan.placement import EXPERT_PARAMETERS
from vllm_exl3.plan.serving_plan import Plan, Wish, make_plan
from vllm_exl3.plan.sizes import parse_gib, parse_gibs
from vllm_exl3.plan.weights import rank_weights

GIB = 1 << 30
RESULTS = Path(__file__).resolve().parents[2] / "benchmarks/results"
PHI3 = DATA / "packs/phi3-5.0-mul1"


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Pack:
    pack = hollow(tmp_path_factory.mktemp("llama") / "pack", **LLAMA_8B)
    pack.config |= {"max_position_embeddings": 131072}  # type: ignore[operator]
    return pack


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Pack:
    return hollow(tmp_path_factory.mktemp("experts") / "pack", **{**EXPERTS, "layers": 12})


def wish(memory: float, gpu: str = "RTX 3090", **options: Any) -> Wish:
    return Wish(find_gpu(gpu), (int(memory * GIB),), **options)


def test_nothing_is_spent_twice(llama: Pack) -> None:
    plan = make_plan(llama, wish(24))
    (rank,) = plan.ranks
    assert rank.placement.gpu + sum(rank.workspace.values()) + rank.cache_bytes == rank.budget == int(0.92 * 24 * GIB)
    assert plan.fits == (plan.capacity["auto"].longest >= 131072)  # type: ignore[union-attr]
    tokens = {name: found.tokens for name, found in plan.capacity.items() if found}
    assert tokens["auto"] * 1.99 < tokens["fp8"] < tokens["int4_per_token_head"] / 1.8


@pytest.mark.parametrize("memory", [6, 8, 12, 24])
def test_advice_helps(llama: Pack, memory: int) -> None:
    """Each line that names an option is tried: with it, the pack fits."""
    plan = make_plan(llama, wish(memory))
    lines = list(advice(llama, plan))
    assert bool(lines) != plan.fits
    changes: dict[str, Any] = {}
    for line in lines:
        option, _, rest = line.partition(" ")
        value = rest.partition(":")[0]
        changes = {
            "--kv-cache-dtype": {"cache_type": value},
            "--max-model-len": {"length": int(value) if value.isdecimal() else 0},
            "--max-num-seqs": {"seqs": int(value) if value.isdecimal() else 0},
            "--host-memory:": {"host_bytes": 64 * GIB},
        }.get(option, {})
        if changes:
            assert make_plan(llama, replace(plan.wish, **changes)).fits, line


def test_too_large_a_pack_names_every_way(experts: Pack) -> None:
    plan = make_plan(experts, wish(4, length=2048))
    lines = " | ".join(advice(experts, plan))
    for part in ("embed-quant", "--host-memory", "--tensor-parallel-size", "bits per weight"):
        assert part in lines


def test_experts_in_host_memory(experts: Pack) -> None:
    small = wish(5, host_bytes=32 * GIB, length=2048)
    plan = make_plan(experts, small)
    (rank,) = plan.ranks
    assert plan.fits and rank.placement.experts_only
    words = command(experts, plan)
    assert words[words.index("--cpu-offload-params") + 1 :] == list(EXPERT_PARAMETERS)
    assert float(words[words.index("--cpu-offload-gb") + 1]) == rank.placement.offload_gib
    roomy = make_plan(experts, wish(24, length=2048))
    assert roomy.decode[1] > 1.5 * plan.decode[1] and "--cpu-offload-gb" not in command(experts, roomy)
    assert not make_plan(experts, replace(small, host_bytes=GIB // 4)).fits


def test_the_parameters_are_those_of_the_guard() -> None:
    pytest.importorskip("vllm")
    from vllm_exl3.serving.offload import PARAMETERS

    assert PARAMETERS == EXPERT_PARAMETERS


def test_two_unequal_gpus_are_a_pipeline(llama: Pack) -> None:
    plan = make_plan(llama, Wish(find_gpu("RTX 3090"), (24 * GIB, 12 * GIB), gpus=2, length=8192))
    assert plan.fits and plan.wish.stages == 2
    counts = [rank.layers for rank in plan.ranks]
    assert sum(counts) == 32 and counts[0] > counts[1]
    assert environment(plan) == {"VLLM_PP_LAYER_PARTITION": ",".join(map(str, counts))}
    line = shell(llama, plan)
    assert line.startswith("VLLM_PP_LAYER_PARTITION=") and "--pipeline-parallel-size 2" in line
    single = make_plan(llama, wish(12, length=8192))
    assert plan.capacity["auto"].tokens > single.capacity["auto"].tokens  # type: ignore[union-attr]


def test_an_illegal_degree_is_a_reason(llama: Pack, experts: Pack) -> None:
    plan = make_plan(llama, wish(24, gpus=3))
    assert not plan.fits and "do not divide by 3" in str(plan.blocker)
    assert "1, 2, 4" in next(iter(advice(llama, plan)))
    cut = make_plan(experts, wish(24, gpus=8))
    assert not cut.fits and "6 blocks" in str(cut.blocker)
    assert make_plan(experts, wish(24, gpus=8, whole_experts=True)).blocker is None


def _measured(name: str, **wanted: Any) -> dict[str, Any]:
    rows = json.loads((RESULTS / name).read_text())["rows"]
    return [row for row in rows if all(row.get(key) == value for key, value in wanted.items())][-1]


@pytest.mark.parametrize("batch", [1, 8, 32, 64, 128])
def test_speed_on_the_measured_gpu(llama: Pack, batch: int) -> None:
    """The whole model that was measured; linears' rates and the rest's come from different files."""
    found = decode_us(rank_weights(llama), llama.config, find_gpu("H200"), batch=batch)
    assert found == pytest.approx(
        _measured("h200/serve.json", subject="decode", kernel="native", m=batch)["us"], rel=0.03
    )


@pytest.mark.parametrize("batch", [1, 8, 32])
def test_speed_on_two_gpus_was_not_fitted(llama: Pack, batch: int) -> None:
    """Measured a day earlier, with slower kernels: how much faster two are than one has to agree."""
    one, two = (
        decode_us(rank_weights(llama, ranks), llama.config, find_gpu("H200"), batch=batch, ranks=ranks)
        for ranks in (1, 2)
    )
    measured = [
        _measured("h200-x2/two.json", subject="decode", kernel="native", m=batch, ranks=ranks)["us"] for ranks in (1, 2)
    ]
    assert one / two == pytest.approx(measured[0] / measured[1], rel=0.15)


def test_slower_gpus_are_slower(llama: Pack) -> None:
    weights = rank_weights(llama)
    speeds = {gpu.name: decode_us(weights, llama.config, gpu, batch=1) for gpu in GPUS}
    assert speeds["H200"] < speeds["RTX 4090"] < speeds["RTX 3060"] < speeds["RTX 3050"]
    host = decode_us(weights, llama.config, find_gpu("RTX 4090"), batch=1, host=HostShare(dense=0.5))
    assert host > 5 * speeds["RTX 4090"]


def test_only_the_h200_counts_as_measured(llama: Pack) -> None:
    for name, said in (("H200", "measured on this GPU model"), ("RTX 4090", "on which nothing has run")):
        data = plan_as_data(llama, make_plan(llama, wish(24, name, length=8192)))
        assert said in data["estimate"]["note"] and data["estimate"]["sources"]
        assert data["estimate"]["measured_on_this_gpu"] == (name == "H200")


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("24GiB", 24 * GIB),
        ("24 gb", 24 * GIB),
        ("24", 24 * GIB),
        ("1.5g", 3 * GIB // 2),
        ("512MiB", GIB // 2),
        ("1TiB", 1 << 40),
    ],
)
def test_sizes(text: str, nbytes: int) -> None:
    assert parse_gib(text) == nbytes and parse_gibs(f"{text},{text}") == (nbytes, nbytes)


@pytest.mark.parametrize("text", ["", "GiB", "-1", "0", "24 PiB", "1e3", "24,,12"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ValueError, match="expected an amount"):
        parse_gibs(text)


@pytest.mark.parametrize(("name", "found"), [("rtx4090", "RTX 4090"), ("NVIDIA GeForce RTX 4060 Ti", "RTX 4060 Ti"),
                                             ("h200", "H200"), ("dgx-spark", "DGX Spark")])  # fmt: skip
def test_gpus_by_name(name: str, found: str) -> None:
    assert find_gpu(name).name == found


@pytest.mark.parametrize("name", ["a100", "GTX 1080", "", "RTX"])
def test_unknown_gpus_are_listed(name: str) -> None:
    with pytest.raises(ValueError, match="expected one of"):
        find_gpu(name)


def test_a_size_stands_for_a_slow_gpu_of_it() -> None:
    assert gpu_by_memory(24).name == "L4" and gpu_by_memory(141).name == "H200" and gpu_by_memory(999).name == "B200"
    assert all(find_gpu(name).memory_gib >= gib - 1 for gib, name in CARDS.items())


def test_a_cpu(llama: Pack) -> None:
    plan = make_cpu_plan(llama, 32 * GIB, length=8192)
    assert plan.fits and plan.weights == llama.nbytes and plan.capacity is not None and plan.capacity.requests >= 4
    assert not make_cpu_plan(llama, 6 * GIB).fits
    assert make_cpu_plan(llama, 32 * GIB, threads=8).tokens_per_second == pytest.approx(4 * plan.tokens_per_second)
    assert "VLLM_CPU_KVCACHE_SPACE=" in plan.command("x")


def test_experts_on_a_cpu_are_arithmetic_only(experts: Pack) -> None:
    assert cpu_experts_us(experts, 4) == pytest.approx(cpu_experts_us(experts, 2) / 2)
    assert cpu_experts_us(experts, 2, batch=8) > 4 * cpu_experts_us(experts, 2)
    plan = make_plan(experts, wish(5, host_bytes=32 * GIB, length=2048))
    assert "cpu" not in json.dumps(plan_as_data(experts, plan)["command"]).replace("cpu-offload", "")


def _cli(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["plan", *arguments], env={"COLUMNS": "200"})
    return result.exit_code, result.output


def test_the_command_prints_what_it_planned() -> None:
    code, text = _cli(str(PHI3), "--gpu-memory", "24GiB")
    assert code == 0 and f"\nvllm serve {PHI3} --max-model-len 2048" in text
    for part in ("weights", "workspace", "auto:", "fp8:", "int4_per_token_head:", "tokens/s", "nothing has run"):
        assert part in text
    code, text = _cli(
        str(PHI3), "--gpu", "h200", "--gpus", "2", "--kv-cache-dtype", "fp8", "--max-num-seqs", "8", "--json"
    )
    data = json.loads(text)
    assert code == 0 and data["fits"] and data["gpu"] == "H200" and data["ranks"][0]["cache"] > 100 * GIB
    assert "--tensor-parallel-size 2" in data["command"] and "--max-num-seqs 8" in data["command"]
    code, text = _cli(str(PHI3), "--gpu-memory", "512MiB")
    assert code == 1 and "Does not fit" in text
    code, text = _cli(str(PHI3), "--gpu", "cpu", "--host-memory", "16GiB")
    assert code == 0 and "VLLM_CPU_KVCACHE_SPACE=1 vllm serve" in text


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "--gpu-memory or --gpu"),
        (["--gpu-memory", "much"], "amount of memory"),
        (["--gpu", "voodoo"], "expected one of"),
        (["--gpu-memory", "8,8", "--gpus", "3"], "names 2 GPUs"),
        (["--gpu", "cpu"], "--host-memory"),
    ],
)
def test_wrong_options(options: list[str], said: str) -> None:
    code, text = _cli(str(PHI3), *options)
    assert code == 2 and said in " ".join(text.replace("│", " ").split())


def test_neither_torch_nor_vllm_is_imported() -> None:
    script = (
        "import sys; from vllm_exl3.cli import app\n"
        f"try: app(['plan', {str(PHI3)!r}, '--gpu-memory', '8'])\n"
        "except SystemExit as done: assert not done.code\n"
        "print([name for name in ('torch', 'vllm', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip().endswith("[]")


def test_inspect_has_a_line_for_each_card(golden_pack: Path) -> None:
    result = CliRunner().invoke(app, ["inspect", str(golden_pack), "--json"])
    cards = json.loads(result.output)["cards"]
    assert list(cards) == [str(gib) for gib in CARDS] and all("fits" in line for line in cards.values())


def test_a_card_that_is_too_small_says_what_helps(llama: Pack) -> None:
    from vllm_exl3.plan.as_data import card_line

    assert "lack" in card_line(llama, 8) and "--kv-cache-dtype" in card_line(llama, 12)
    assert isinstance(make_plan(llama, wish(8)), Plan)


_ENORMOUS = 10**400


@pytest.mark.parametrize(
    ("options", "status", "says"),
    [
        (["--gpu-memory", f"{_ENORMOUS}GiB"], 2, "expected an amount of memory"),
        (["--gpu-memory", "24", "--host-memory", f"{_ENORMOUS}"], 2, "expected an amount of memory"),
        (["--gpu-memory", "0.0000000001"], 2, "expected an amount of memory"),
        (["--gpu-memory", "nan"], 2, "expected an amount of memory"),
        (["--gpu-memory", "24", "--kv-cache-dtype", "nonsense"], 1, "nonsense is not modelled"),
        (["--gpu-memory", "24", "--gpu-memory-utilization", "nan"], 2, ""),
        (["--gpu-memory", "24", "--max-model-len", str(_ENORMOUS)], 2, "a context"),
        (["--gpu-memory", "24", "--max-num-seqs", str(_ENORMOUS)], 2, "sequences"),
        (["--gpu-memory", "24", "--gpus", str(10**9), "--tp", "1"], 1, "1000000000 pipeline stages for 2 decoder"),
        (["--gpu-memory", "24,12,8"], 1, "3 pipeline stages for 2 decoder layers"),
        (["--gpu-memory", "24", "--gpus", str(_ENORMOUS)], 2, "GPUs"),
        (["--gpu", "cpu", "--host-memory", "8", "--threads", str(_ENORMOUS)], 2, "threads"),
        (["--gpu", "cpu", "--host-memory", "8", "--max-model-len", str(10**30)], 2, "a context"),
    ],
)
@pytest.mark.parametrize("as_json", [False, True])
def test_numbers_out_of_range(options: list[str], status: int, says: str, as_json: bool) -> None:
    result = CliRunner().invoke(app, ["plan", str(PHI3), *options, *["--json"] * as_json], env={"COLUMNS": "200"})
    assert result.exit_code == status and says in result.output, result.output
    assert result.exception is None or isinstance(result.exception, SystemExit)
    if status == 1 and as_json:
        found = json.loads(result.output)
        assert not found["fits"] and found["command"] is None and found["advice"]


def test_a_context_that_no_config_means(llama: Pack) -> None:
    config = dict(llama.config)
    try:
        llama.config |= {"max_position_embeddings": _ENORMOUS}  # type: ignore[operator]
        plan = make_plan(llama, wish(24))
        assert not plan.fits and list(advice(llama, plan))
        assert not make_cpu_plan(llama, 64 * GIB).fits
    finally:
        llama.config |= config  # type: ignore[operator]


def test_the_command_for_a_cpu_can_be_pasted(tmp_path: Path) -> None:
    made = make_cpu_plan(Pack.open(PHI3), 8 * GIB)
    assert "vllm serve 'my packs/a' --max-model-len" in made.command("my packs/a")
