"""What `vllm-exl3 inspect` says of tensor and expert parallelism is what vLLM and this package's layers do.

Models are built as each rank of so many would build them, in one process: nothing is loaded, and nobody else is there.
"""

import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm.config import set_current_vllm_config
from vllm.distributed import cleanup_dist_env_and_memory, parallel_state
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.utils.network_utils import get_open_port

from tests.serving.conftest import DENSE, MOE, PACKS
from vllm_exl3.pack import Pack
from vllm_exl3.pack.errors import Exl3PackError
from vllm_exl3.plan.parallel import Degree, expert_parallel, tensor_parallel

DEGREES = (2, 3, 4, 8)


@contextlib.contextmanager
def as_rank(rank: int, ranks: int, config: Any) -> Iterator[None]:
    """Groups of one process that say they are larger, for as long as a model is built."""
    with set_current_vllm_config(config):
        parallel_state.init_distributed_environment(1, 0, f"tcp://127.0.0.1:{get_open_port()}", 0, "gloo")
        parallel_state.initialize_model_parallel(1)
        try:
            for group in (parallel_state.get_tp_group(), parallel_state._EP):
                if group is not None:  # models without experts have none of theirs
                    group.world_size, group.rank_in_group = ranks, rank
            yield
        finally:
            cleanup_dist_env_and_memory()


def refusal(pack: Path, ranks: int, **options: Any) -> str | None:
    """Why an engine over so many ranks does not start; None if each of them builds its model."""
    common: dict[str, Any] = {"skip_tokenizer_init": True, "dtype": "float32", "max_model_len": 64}
    try:
        for rank in (0, ranks - 1):
            arguments = EngineArgs(model=str(pack), tensor_parallel_size=ranks, **common, **options)
            config = arguments.create_engine_config()
            with as_rank(rank, ranks, config):
                initialize_model(config)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def assert_agreed(found: dict[int, str | None], said: Iterable[Degree]) -> None:
    assert {degree for degree, why in found.items() if why is None} == {
        answer.degree for answer in said if answer.blocker is None
    }, found


QUICK = ("llama_odd-4.0-mul1", "mixtral-4.0-3inst")


@pytest.mark.parametrize(
    "name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in (*DENSE, *MOE) if name not in QUICK)]
)
def test_tensor_parallel_degrees(name: str) -> None:
    found = {degree: refusal(PACKS / name, degree) for degree in DEGREES}
    assert_agreed(found, tensor_parallel(Pack.open(PACKS / name), DEGREES))


@pytest.mark.parametrize("name", [MOE[0], pytest.param(MOE[1], marks=pytest.mark.slow)])
def test_expert_parallel_degrees(name: str) -> None:
    found = {degree: refusal(PACKS / name, degree, enable_expert_parallel=True) for degree in DEGREES}
    assert_agreed(found, expert_parallel(Pack.open(PACKS / name), DEGREES))


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"tensor_parallel_size": 4}, "1 block of 128 channels for 4 ranks"),
        ({"data_parallel_size": 2}, "1 block of 128 channels for 2 ranks"),
        (
            {"tensor_parallel_size": 2, "data_parallel_size": 8, "enable_expert_parallel": True},
            "8 experts for 16 ranks",
        ),
        ({"tensor_parallel_size": 2, "data_parallel_size": 4, "enable_expert_parallel": True}, None),
    ],
    ids=str,
)
def test_a_split_that_experts_do_not_allow_is_refused_with_the_configuration(
    options: dict[str, Any], found: str | None
) -> None:
    """Before a worker starts: this process makes the configuration, and no other has been asked."""
    pack = PACKS / "qwen3_moe-3.0-mul1"
    arguments = EngineArgs(model=str(pack), skip_tokenizer_init=True, dtype="float32", max_model_len=64, **options)
    if found is None:
        assert arguments.create_engine_config().parallel_config.enable_expert_parallel
        return
    with pytest.raises(Exl3PackError, match=rf"experts.*found {found}"):
        arguments.create_engine_config()
