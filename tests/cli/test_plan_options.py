"""`vllm-exl3 plan`: an option that would have no effect is refused, a GPU that nobody named is called assumed."""

import json

import pytest
from typer.testing import CliRunner

from tests.conftest import DATA
from vllm_exl3.cli import app

PACK = str(DATA / "packs/phi3-5.0-mul1")
ON_CPU = ("--gpu", "cpu", "--host-memory", "16GiB")


def _plan(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["plan", PACK, *arguments], env={"COLUMNS": "200"})
    return result.exit_code, result.output


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        *(
            ((*ON_CPU, *given), given[0])
            for given in (
                ("--gpu-memory", "24GiB"),
                ("--gpus", "2"),
                ("--tp", "2"),
                ("--ep",),
                ("--kv-cache-dtype", "fp8"),
                ("--max-num-seqs", "4"),
                ("--gpu-memory-utilization", "0.5"),
            )
        ),
        (("--gpu-memory", "24GiB", "--threads", "4"), "--threads"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_option_without_effect_is_refused(arguments: tuple[str, ...], option: str) -> None:
    code, said = _plan(*arguments)
    assert code == 2 and f"{option} has no effect" in said, said


def test_options_of_a_cpu_are_accepted() -> None:
    code, said = _plan(*ON_CPU, "--threads", "4", "--max-model-len", "1024")
    assert code == 0 and "with 4 threads" in said and "contexts of 1,024" in said, said


@pytest.mark.parametrize("memory", ["8GiB", "24GiB", "141GiB"])
def test_a_gpu_taken_for_its_memory_is_called_assumed(memory: str) -> None:
    code, said = _plan("--gpu-memory", memory)
    assert code == 0 and "assumed: name yours with --gpu" in said.splitlines()[0], said
    assert json.loads(_plan("--gpu-memory", memory, "--json")[1])["gpu_assumed"] is True


def test_a_named_gpu_is_not() -> None:
    for arguments in (("--gpu", "RTX 3090"), ("--gpu", "RTX 3090", "--gpu-memory", "24GiB")):
        code, said = _plan(*arguments)
        assert code == 0 and "(RTX 3090)" in said and "assumed" not in said, said
    assert json.loads(_plan("--gpu", "RTX 3090", "--json")[1])["gpu_assumed"] is False
