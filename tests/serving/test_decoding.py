"""Modules that take their weight decoded: what the report says of them, and the limit that a user may set."""

from pathlib import Path

import pytest
import torch

from tests.families.family import write
from tests.families.rows import FAMILIES
from tests.serving.engine import PROMPTS, engine, generate, logits_of, model_of
from vllm_exl3.pack.errors import Exl3PackError
from vllm_exl3.serving.report import reports

ROUTER = next(family for family in FAMILIES if family.name == "dots1_router")


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(ROUTER, tmp_path_factory.mktemp("router"))[0]


@pytest.mark.slow
def test_a_limit_refuses_and_names_the_modules(pack: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_EXL3_DECODE_LIMIT", "0")
    message = r"2\.0 KiB of weights .*mlp\.gate.*at most 0 MiB, as VLLM_EXL3_DECODE_LIMIT says"
    with pytest.raises(Exl3PackError, match=message), engine(pack):
        pass


@pytest.mark.slow
def test_reloading_decodes_again_and_the_report_names_what_it_costs(pack: Path) -> None:
    with engine(pack) as llm:
        facts = reports()[-1].as_dict()
        where = [name for name, why in facts["dense_linears"].items() if why.startswith("decoded while loading")]
        assert len(where) == 1 and where[0].endswith(".gate")
        assert facts["bytes"]["decoded weights"] == 4 * 128 * 4  # experts, channels, bytes of a float32
        ids = PROMPTS[2]
        before = logits_of(llm, ids)
        gate = model_of(llm).get_submodule(where[0])
        # vLLM multiplies by a packed copy on CPUs, which it makes anew from what is loaded.
        gate.cpu_linear = lambda x, weight, bias: x.new_zeros(*x.shape[:-1], gate.output_size)
        assert not torch.equal(logits_of(llm, ids), before)
        llm.collective_rpc("reload_weights")
        torch.testing.assert_close(logits_of(llm, ids), before, rtol=0, atol=0)
        assert generate(llm, [ids], 2)
