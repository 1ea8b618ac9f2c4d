"""The installed vLLM has everything that this package uses, and calls its methods the way they are written."""

import inspect
import re
from typing import Any

import pytest
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.linear import LinearMethodBase
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase

from vllm_exl3.serving.config import Exl3Config
from vllm_exl3.serving.contract import TOUCHED, Touched, imported, moved, verdict
from vllm_exl3.serving.embedding import QuantizedEmbeddingMethod
from vllm_exl3.serving.head import Exl3HeadMethod
from vllm_exl3.serving.kv_contract import mismatches
from vllm_exl3.serving.linear import Exl3LinearMethod
from vllm_exl3.serving.moe import Exl3MoEMethod
from vllm_exl3.serving.tied_head import TiedHeadMethod


def test_nothing_has_moved() -> None:
    assert moved() == []
    assert "a tested release" in verdict()


def test_the_int4_attention_finds_what_it_replaces() -> None:
    assert mismatches() == []


def test_the_table_covers_what_is_imported_in_functions_too() -> None:
    found = set(imported())
    assert ("serving/skipping.py", "vllm.distributed.utils", "get_pp_indices") in found
    assert ("serving/config.py", "vllm.model_executor.layers.linear", "LinearBase") in found


LINEAR = "vllm.model_executor.layers.linear"


@pytest.mark.parametrize(
    ("touched", "message"),
    [
        (Touched(f"{LINEAR}:NoSuchLayer", "x"), "NoSuchLayer is gone"),
        (Touched("vllm.no_such_module:x", "x"), r"no_such_module:x is gone"),
        (Touched(f"{LINEAR}:LinearBase.no_such_method", "x"), "no_such_method is gone"),
        (Touched(f"{LINEAR}:LinearMethodBase.apply", "x", ("layer", "rows")), "no longer takes rows; needed for: x"),
        (Touched(f"{LINEAR}:LinearBase", "y", mentions=("tp_rank", "no_such_field")), "no_such_field; needed for: y"),
    ],
)
def test_what_moved_is_named(touched: Touched, message: str) -> None:
    assert re.search(message, touched.fault() or "")


def test_every_entry_says_what_needs_it() -> None:
    assert all(touched.why and ":" in touched.where for touched in TOUCHED)
    assert len({touched.where for touched in TOUCHED}) == len(TOUCHED)


OVERRIDES = [
    (QuantizationConfig, Exl3Config),
    (LinearMethodBase, Exl3LinearMethod),
    (LinearMethodBase, Exl3HeadMethod),
    (FusedMoEMethodBase, Exl3MoEMethod),
    (QuantizeMethodBase, QuantizedEmbeddingMethod),
    (QuantizeMethodBase, TiedHeadMethod),
]


@pytest.mark.parametrize(("base", "ours"), OVERRIDES)
def test_no_abstract_method_is_left(base: type, ours: type) -> None:
    assert not inspect.isabstract(ours), ours.__abstractmethods__


@pytest.mark.parametrize(("base", "ours"), OVERRIDES)
def test_overrides_take_what_vllm_passes(base: type, ours: type) -> None:
    theirs = {name for owner in base.__mro__ for name in vars(owner) if name[0] != "_"}
    shared = [name for name in vars(ours) if name in theirs and inspect.isroutine(getattr(ours, name))]
    untaken = {name: _untaken(getattr(base, name), getattr(ours, name)) for name in shared}
    assert shared and not {name: parameters for name, parameters in untaken.items() if parameters}


def _untaken(theirs: Any, ours: Any) -> list[str]:
    """Parameters of vLLM's method that ours takes neither by name nor as one of any."""
    mine = _parameters(ours)
    kinds = {parameter.kind for parameter in mine}
    if inspect.Parameter.VAR_POSITIONAL in kinds:
        return []
    names = {parameter.name for parameter in mine}
    wanted = [p.name for p in _parameters(theirs) if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    return [name for name in wanted if name not in names and inspect.Parameter.VAR_KEYWORD not in kinds]


def _parameters(method: Any) -> list[inspect.Parameter]:
    return [p for p in inspect.signature(method).parameters.values() if p.name not in ("self", "cls")]
