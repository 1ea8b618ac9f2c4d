"""Parameters that no quantization method sees (norms, routers, biases of routers) and no tensor was loaded into."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from vllm.compilation.backends import set_model_tag
from vllm.model_executor.layers.linear import UnquantizedLinearMethod

from tests.serving.conftest import DENSE, MOE, PACKS, Tensors
from tests.serving.engine import engine, generate
from vllm_exl3.pack.check import find_faults
from vllm_exl3.pack.errors import Exl3PackError
from vllm_exl3.pack.pack import Pack
from vllm_exl3.serving.missing import ParameterWatch, _watch
from vllm_exl3.serving.unloaded import watched

ODD, QWEN, GEMMA = "llama_odd-4.0-mul1", "qwen3_moe-3.0-mul1", "gemma2-6.0-mcg"


def without(*names: str) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        for name in names:
            del tensors[name]

    return change


def slow(*values: str) -> object:
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("name", "absent"),
    [
        (ODD, "model.layers.1.input_layernorm.weight"),
        (QWEN, "model.layers.0.self_attn.k_norm.weight"),
        (QWEN, "model.layers.1.mlp.gate.weight"),
        slow(ODD, "model.layers.0.post_attention_layernorm.weight"),
        slow(GEMMA, "model.layers.1.pre_feedforward_layernorm.weight"),
        slow("phi3-5.0-mul1", "model.layers.0.input_layernorm.weight"),
        slow("mixtral-4.0-3inst", "model.layers.1.block_sparse_moe.gate.weight"),
    ],
)
def test_a_parameter_that_the_pack_lacks_is_refused_at_load(
    variant: Callable[..., Path], name: str, absent: str
) -> None:
    """With two layers the headers cannot tell: one of them may be made so."""
    folder = variant(name, without(absent))
    assert not list(find_faults(Pack.open(folder)))
    with pytest.raises(Exl3PackError, match=absent.replace(".", r"\.")), engine(folder):
        pass


@pytest.mark.slow
def test_several_are_counted_and_may_be_done_without(variant: Callable[..., Path]) -> None:
    names = [
        f"model.layers.{layer}.{kind}_layernorm.weight" for layer in (0, 1) for kind in ("input", "post_attention")
    ]
    folder = variant(ODD, without(*names, "model.norm.weight"))
    with pytest.raises(Exl3PackError, match=r"input_layernorm.* and 1 more into which"), engine(folder):
        pass
    with engine(folder, model_loader_extra_config={"enable_weights_track": False}) as llm:
        assert len(generate(llm, [[1, 2, 3]], 4)[0]) == 4


@pytest.mark.parametrize("name", [slow(name) for name in (*DENSE, *MOE) if name != GEMMA])
def test_whole_packs_keep_every_value(name: str) -> None:
    """Dummy weights, too, count as loaded; what is served is in test_golden.py."""
    with engine(PACKS / name, load_format="dummy") as llm:
        assert len(generate(llm, [[1, 2, 3]], 4)[0]) == 4


def model(watch: ParameterWatch) -> dict[str, torch.nn.Module]:
    """A root with a layer and a norm inside, a tower that is not part of it, and a linear that is watched elsewhere."""
    modules = {name: torch.nn.Module() for name in ("root", "inner", "norm", "layer", "tower", "gate", "linear", "kv")}
    modules["gate"].quant_method = UnquantizedLinearMethod()
    modules["linear"].quant_method = watched(UnquantizedLinearMethod(), "linear")
    modules["kv"].quant_method = object()
    for parent, name in (("root", "inner"), ("inner", "norm"), ("inner", "layer"), ("inner", "gate")):
        modules[parent].add_module(name, modules[name])
        watch.note_child(modules[parent], name, modules[name])
    for name in ("norm", "tower", "gate", "linear", "kv"):
        modules[name].register_parameter("weight", torch.nn.Parameter(torch.full((2, 3), 7.0)))
        watch.note(modules[name], "weight", modules[name].weight)
    return modules


@pytest.mark.parametrize(
    ("loaded", "refused"),
    [
        (("norm", "gate"), None),
        (("norm",), r"inner\.gate\.weight into"),
        (("gate",), r"inner\.norm\.weight into"),
        ((), r"inner\.gate\.weight, inner\.norm\.weight into"),
    ],
)
def test_only_what_is_in_the_model_and_was_not_written_is_missing(loaded: tuple[str, ...], refused: str | None) -> None:
    watch = ParameterWatch()
    modules = model(watch)
    assert modules["norm"].weight[0, 0].isnan() and not modules["norm"].weight[1].isnan().any()
    assert not any(modules[name].weight.isnan().any() for name in ("linear", "kv"))
    for name in loaded:
        modules[name].weight.data.fill_(1)
    if refused is None:
        watch.check(modules["layer"], "pack")
    else:
        with pytest.raises(Exl3PackError, match=refused):
            watch.check(modules["layer"], "pack")
    for name in ("norm", "tower", "gate"):
        assert (modules[name].weight == (1 if name in loaded else 7)).all(), "what the class put there is back"
    watch.check(modules["layer"], "pack")  # as reloading does


def test_nothing_is_spoiled_once_loading_has_begun() -> None:
    watch = ParameterWatch()
    watch.close()
    module = torch.nn.Module()
    module.weight = torch.nn.Parameter(torch.ones(2))
    watch.note(module, "weight", module.weight)
    assert (module.weight == 1).all()


def test_what_cannot_be_spoiled_is_let_alone() -> None:
    watch, module = ParameterWatch(), torch.nn.Module()
    for name, values in (
        ("ints", torch.ones(2, dtype=torch.int32)),
        ("none", torch.ones(0)),
        ("meta", torch.ones(2, device="meta")),
        ("fp8", torch.ones(2).to(torch.float8_e4m3fn)),
    ):
        module.register_parameter(name, torch.nn.Parameter(values, requires_grad=False))
        watch.note(module, name, getattr(module, name))
    scalar = torch.nn.Parameter(torch.tensor(2.0))
    module.register_parameter("scalar", scalar)
    watch.note(module, "scalar", scalar)
    assert scalar.isnan()
    with pytest.raises(Exl3PackError, match="found scalar into"):
        watch.check(module, "pack")
    assert scalar == 2 and (module.ints == 1).all()


def test_drafts_and_values_that_come_later_are_not_noticed() -> None:
    """What docs/limitations.md says of it."""
    target, draft = object(), SimpleNamespace(model="draft", revision=None)
    speculation = SimpleNamespace(target_model_config=target, draft_model_config=draft)
    quantization = SimpleNamespace(watch=ParameterWatch())
    served = SimpleNamespace(quant_config=quantization, speculative_config=speculation, model_config=target)
    assert _watch(served) is quantization.watch and _watch(None) is None
    with set_model_tag("eagle_head"):
        assert _watch(served) is None
    module = torch.nn.Module()
    module.weight = torch.nn.Parameter(torch.zeros(3))
    quantization.watch.note(module, "weight", module.weight)
    torch.nn.init.ones_(module.weight)
    quantization.watch.check(module, "pack")
