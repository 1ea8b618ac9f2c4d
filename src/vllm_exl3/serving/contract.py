"""What this package relies on in vLLM beyond documented hooks, as a table that any installed vLLM is held against.

`vllm-exl3 doctor` prints the verdict, and the tests hold every supported release against it. When a new vLLM moves
something, the failing line says what moved and what it was needed for.
"""

import ast
import importlib
import inspect
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

__all__ = ["TESTED", "TOUCHED", "Touched", "imported", "moved", "verdict"]

TESTED = ("0.30", "0.31", "0.32", "0.33")
"""Releases that the whole suite of engines runs against."""


@dataclass(frozen=True)
class Touched:
    """One thing of vLLM's that is called, overridden or read.

    Attributes:
        where: ``module:name`` or ``module:Class.member``.
        why: what stops working without it.
        accepts: parameters that it must have, by name.
        mentions: names that its source must contain: attributes that are set in methods, calls that are counted on.
    """

    where: str
    why: str
    accepts: tuple[str, ...] = ()
    mentions: tuple[str, ...] = field(default=())

    def fault(self) -> str | None:
        """What is not as expected in the installed vLLM, or None."""
        module, _, path = self.where.partition(":")
        try:
            found: Any = importlib.import_module(module)
            for name in path.split("."):
                found = getattr(found, name)
        except (ImportError, AttributeError) as error:
            return f"{self.where} is gone ({error}); needed for: {self.why}"
        missing = [name for name in self.accepts if not _takes(found, name)]
        if missing:
            return f"{self.where} no longer takes {', '.join(missing)}; needed for: {self.why}"
        if self.mentions:
            source = inspect.getsource(found)
            missing = [name for name in self.mentions if name not in source]
        return f"{self.where} no longer has {', '.join(missing)}; needed for: {self.why}" if missing else None


_LAYERS = "vllm.model_executor.layers"
_NGRAM = "vllm.models.qwen4_exp.nvidia.ngram_embedding"
_CREATE = (
    "layer",
    "input_size_per_partition",
    "output_partition_sizes",
    "input_size",
    "output_size",
    "params_dtype",
)

_SHRINK = ("inputs", "lora_b_weights", "output_tensor", "lora_indices_tensor", "scaling")

TOUCHED = (
    Touched("vllm.plugins:load_general_plugins", "being called in every process"),
    Touched(
        "vllm.v1.engine.utils:CoreEngineProcManager",
        "an engine that ends when its API server is gone",
        mentions=("EngineCore",),
    ),
    Touched("vllm.third_party.pynvml:nvmlDeviceGetComputeRunningProcesses", "naming who holds a GPU's memory (doctor)"),
    Touched("vllm.envs:VLLM_CACHE_ROOT", "finding compiled graphs of earlier versions (doctor)"),
    Touched(
        "vllm.compilation.passes.inductor_pass:InductorPass.is_applicable_for_range",
        "norms as part of linears",
        ("compile_range",),
    ),
    Touched(
        "vllm.compilation.backends:VllmBackend.configure_post_pass",
        "norms as part of linears",
        mentions=("self.compilation_config.inductor_compile_config[self.pass_key]",),
    ),
    Touched("vllm.config:CompilationConfig.get_compile_ranges", "norms as part of linears of 9 to 128 tokens"),
    *(
        Touched(f"vllm.ir.ops:{name}.torch_op", "norms as part of linears")
        for name in ("rms_norm", "fused_add_rms_norm")
    ),
    *(
        Touched(f"vllm.lora.{where}:bgmv_shrink", "keeping adapters off tokens of the base model, on CPUs", _SHRINK)
        for where in ("ops.torch_ops.lora_ops", "punica_wrapper.punica_cpu")
    ),
    Touched(f"{_LAYERS}.quantization:register_quantization_config", "registering exl3", ("quantization",)),
    *(
        Touched(f"{_LAYERS}.quantization.base_config:QuantizationConfig.{name}", why, accepts)
        for name, why, accepts in (
            ("override_quantization_method", "recognising a pack", ("hf_quant_cfg", "user_quant")),
            ("maybe_update_config", "checking a pack before the model is built", ("model_name", "revision")),
            ("apply_vllm_mapper", "finding a layer's tensors under its model class' names", ("hf_to_vllm_mapper",)),
            ("get_checkpoint_weight_mapper", "skipping tensors and renaming old scales", ()),
            ("get_quant_method", "giving layers their method", ("layer", "prefix")),
        )
    ),
    *(
        Touched(f"{_LAYERS}.quantization.base_config:QuantizeMethodBase.{name}", why, accepts)
        for name, why, accepts in (
            ("embedding", "quantized embeddings", ("layer",)),
            ("tie_weights", "a pack's own head in a tied model", ("layer", "embed_tokens")),
            ("process_weights_after_loading", "refusing layers that were not loaded", ("layer",)),
        )
    ),
    Touched(f"{_LAYERS}.linear:LinearMethodBase.create_weights", "allocating a linear", _CREATE),
    Touched(f"{_LAYERS}.linear:LinearMethodBase.apply", "running a linear", ("layer", "x", "bias")),
    Touched(f"{_LAYERS}.linear:LinearBase", "tensor parallelism", mentions=("tp_rank", "tp_size")),
    Touched(f"{_LAYERS}.linear:QKVParallelLinear", "repeated key and value heads", mentions=("num_kv_head_replicas",)),
    Touched(f"{_LAYERS}.linear:MergedColumnParallelLinear.load_weights", "fused layers", mentions=("shard_id",)),
    Touched(
        f"{_LAYERS}.vocab_parallel_embedding:VocabParallelEmbedding.__init__",
        "embeddings and heads of classes that pass no quantization config",
        ("num_embeddings", "embedding_dim", "org_num_embeddings", "quant_config", "prefix"),
        ("shard_indices", "org_vocab_size", "num_embeddings_per_partition", "num_added_embeddings", "tp_size"),
    ),
    Touched(
        f"{_LAYERS}.vocab_parallel_embedding:VocabParallelEmbeddingShardIndices",
        "a rank's rows of the vocabulary",
        mentions=("padded_org_vocab_start_index", "num_org_elements_padded", "org_vocab_start_index"),
    ),
    Touched(
        f"{_NGRAM}:Qwen4ExpPLEEmbeddingMethod.from_quant_config",
        "EXL3 n-gram tables",
        ("quant_config", "prefix"),
    ),
    Touched(f"{_NGRAM}:Qwen4ExpPLEPinnedHostEmbedding.__init__", "EXL3 n-gram tables", ("embedding_method",)),
    Touched(
        "vllm.forward_context:create_forward_context",
        "telling the n-gram tables of several models in a process apart",
        mentions=("no_compile_layers=vllm_config.compilation_config.static_forward_context",),
    ),
    Touched(f"{_NGRAM}:Qwen4ExpPLEDeviceEmbedding.forward", "EXL3 n-gram tables", ("ngram_ids",)),
    Touched(
        f"{_NGRAM}:Qwen4ExpNGramEmbedding.__init__",
        "the hash of an n-gram table",
        mentions=("ngram_heads_offsets", "ngram_heads_vocab_sizes", "layer_multipliers", ".ngram_embedding"),
    ),
    Touched(
        "vllm.compilation.breakable_cudagraph:eager_break_during_capture",
        "n-gram tables on disk beside CUDA graphs",
        ("fn",),
    ),
    Touched(
        "vllm.model_executor.custom_op:PluggableLayer.register_oot",
        "giving embeddings the quantization config",
        ("name",),
    ),
    Touched(
        f"{_LAYERS}.fused_moe.fused_moe_method_base:FusedMoEMethodBase.create_weights",
        "allocating experts",
        ("layer", "num_experts", "hidden_size", "intermediate_size_per_partition", "params_dtype"),
    ),
    Touched(
        f"{_LAYERS}.fused_moe.fused_moe_method_base:FusedMoEMethodBase.apply",
        "running experts",
        ("layer", "x", "topk_weights", "topk_ids", "shared_experts", "shared_experts_input"),
    ),
    Touched(
        f"{_LAYERS}.fused_moe:RoutedExperts",
        "an expert layer's sizes, activation and routing",
        mentions=(
            "def _map_global_expert_id_to_local_expert_id",
            "def load_weights",
            *("moe_config", "global_num_experts", "activation", "swiglu_limit", "swiglu_alpha", "swiglu_beta"),
            *("apply_router_weight_on_input", "expert_map", "layer_name"),
        ),
    ),
    Touched(
        f"{_LAYERS}.fused_moe.runner.moe_runner:MoERunner.load_weights",
        "loading a trellis, which has three dimensions, as one expert's",
        mentions=("routed_experts.load_weights(",),
    ),
    Touched(
        "vllm.model_executor.models.utils:WeightsMapper",
        "names of stored tensors",
        ("orig_to_new_regex", "orig_to_new_suffix", "orig_to_new_prefix"),
        ("def _map_name",),
    ),
    Touched("vllm.model_executor.utils:set_weight_attrs", "giving parameters their loaders", ("weight_attrs",)),
    Touched(
        "vllm.model_executor.model_loader.weight_utils:default_weight_loader",
        "an expert layer's other parameters",
        ("param", "loaded_weight"),
    ),
    Touched("vllm.model_executor.models.gpt_oss:GptOssForCausalLM.load_weights", "gpt-oss' experts", ("weights",)),
    Touched(
        "vllm.model_executor.models.mimo_v2:MiMoV2Attention.__init__",
        "MiMo-V2's scale of values, which its o_proj holds",
        ("v_scale", "quant_config", "prefix"),
        ("self.v_scale = v_scale",),
    ),
    Touched(
        f"{_LAYERS}.mamba.gdn.olmo_gdn_linear_attn:_make_fused_conv1d_weight_loader",
        "OLMo hybrid's convolutions, which its class has no loader for",
        mentions=("def weight_loader(param, loaded_weight, loaded_shard_id=None)", "dims[loaded_shard_id]"),
    ),
    Touched(
        "vllm.model_executor.models.llama4:Llama4ForCausalLM.permute_qk_weight_for_rotary",
        "Llama 4's order of q and k",
        ("name", "loaded_weight"),
        ('"wq"', '"wk"', '"weight_packed"', ".view(n_heads, f_out // n_heads // 2, 2, f_in)", ".transpose(1, 2)"),
    ),
    Touched("vllm.distributed:get_pp_group", "pipeline stages"),
    Touched("vllm.distributed.utils:get_pp_indices", "pipeline stages", ("num_hidden_layers", "pp_rank", "pp_size")),
    Touched(
        f"{_LAYERS}.quantization.utils.quant_utils:get_and_maybe_dequant_weights",
        "multi-head latent attention, which reads its kv_b_proj",
        mentions=('"weight_packed"', "apply"),
    ),
    Touched(
        "vllm.lora.layers.utils:_get_lora_device",
        "LoRA beside EXL3 layers",
        mentions=("weight_packed", "w2_weight_packed"),
    ),
    Touched(
        "vllm.config:VllmConfig.__post_init__",
        "refusing splits of experts once, before workers start",
        mentions=("_get_quantization_config(", "verify_with_parallel_config"),
    ),
    Touched(
        "vllm.config:ModelConfig.using_transformers_backend",
        "refusing factors on logits that it leaves out, and decoding what code of transformers reads",
    ),
    Touched(
        "vllm.compilation.backends:set_model_tag",
        "telling a draft from the model that it drafts for",
        ("tag",),
        ("global model_tag",),
    ),
    Touched(
        "vllm.v1.spec_decode.llm_base_proposer:SpecDecodeBaseProposer._get_model",
        "telling a draft from the model that it drafts for",
        mentions=('set_model_tag("eagle_head")', "get_model("),
    ),
    Touched(
        "vllm.engine.arg_utils:EngineArgs.create_speculative_config",
        "VLLM_EXL3_SPEC_SCHEDULE",
        ("target_model_config", "target_parallel_config"),
        ("SpeculativeConfig(",),
    ),
    Touched(
        "vllm.v1.spec_decode.dynamic.utils:build_dynamic_sd_schedule_lookup",
        "VLLM_EXL3_SPEC_SCHEDULE, whose schedule vLLM's scheduler looks up in this table",
        ("num_speculative_tokens_per_batch_size", "vllm_max_batch_size", "vllm_num_speculative_tokens"),
    ),
    Touched(
        "vllm.config:SpeculativeConfig.uses_dynamic_speculative_decoding",
        "VLLM_EXL3_SPEC_SCHEDULE",
        mentions=("num_speculative_tokens_per_batch_size",),
    ),
    Touched(
        "vllm.model_executor.offloader.uva:UVAOffloader",
        "VLLM_EXL3_REQUIRE_UVA_EXPERTS",
        mentions=("_vllm_is_uva_offloaded",),
    ),
)
"""Beside what is imported, which `imported` lists by itself."""


def moved() -> list[str]:
    """Everything that the installed vLLM lacks of what this package uses; empty where all is there."""
    faults = [fault for touched in TOUCHED if (fault := touched.fault()) is not None]
    for file, module, name in imported():
        try:
            found = importlib.import_module(module)
            hasattr(found, name) or importlib.import_module(f"{module}.{name}")
        except ImportError as error:
            faults.append(f"{module}:{name} cannot be imported ({error}); {file} does")
    return faults


def imported() -> Iterator[tuple[str, str, str]]:
    """(file, module, name) of every import from vLLM in this package, but for guarded ones and types' only."""
    package = Path(__file__).resolve().parents[1]
    for path in sorted(package.rglob("*.py")):
        for node in _unguarded(ast.parse(path.read_text(encoding="utf-8")).body):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
                for alias in node.names:
                    yield str(path.relative_to(package)), str(node.module), alias.name


def verdict() -> str:
    """One line on the installed vLLM.

    Raises:
        RuntimeError: it lacks something that this package uses, which the message lists.
        importlib.metadata.PackageNotFoundError: vLLM is not installed.
    """
    installed = version("vllm")
    if faults := moved():
        raise RuntimeError(f"{installed} is not served: " + "; ".join(faults))
    known = ".".join(installed.split(".")[:2]) in TESTED
    tested = "a tested release" if known else f"not among the tested releases {', '.join(TESTED)}"
    return f"{installed}, {tested}; all {len(TOUCHED) + len(set(imported()))} names that this package uses are there"


def _takes(found: Any, name: str) -> bool:
    parameters = inspect.signature(found).parameters
    return name in parameters or any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())


def _unguarded(nodes: Iterable[ast.AST]) -> Iterator[ast.AST]:
    for node in nodes:
        if isinstance(node, ast.Try):  # has another way where the import fails
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        yield node
        yield from _unguarded(ast.iter_child_nodes(node))
