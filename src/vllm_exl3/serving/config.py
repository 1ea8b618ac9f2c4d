"""``quantization_config`` of an EXL3 pack, as vLLM's quantization interface wants it.

The config decides per layer from the pack's tensor headers. It is pickled to every worker, so it
carries only where the pack is; headers are read again there (and memoised per file).
"""

import logging
import os
from collections.abc import Callable
from typing import Any

import torch
from vllm.config import get_current_vllm_config_or_none
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.models.utils import WeightsMapper

from vllm_exl3 import env
from vllm_exl3.env_unused import unused
from vllm_exl3.pack import Pack
from vllm_exl3.pack.check import check
from vllm_exl3.pack.metadata import architectures
from vllm_exl3.pack.names import NameResolver
from vllm_exl3.pack.parts import Resolution
from vllm_exl3.pack.spelling import renamed
from vllm_exl3.pack.stored import StoredNgramTable
from vllm_exl3.pack.support import unserved
from vllm_exl3.serving.adapters import install_adapter_mask
from vllm_exl3.serving.capability import LEAST_CAPABILITY, refuse_old_gpus
from vllm_exl3.serving.degrees import refuse_degrees
from vllm_exl3.serving.delegate import SourceFormat
from vllm_exl3.serving.dependent_launch import let_compiled_kernels_overlap
from vllm_exl3.serving.drafts import refuse_pack_as_draft
from vllm_exl3.serving.expert_tiers import ExpertTiers
from vllm_exl3.serving.fingerprint import fingerprint
from vllm_exl3.serving.kernels import prepare_kernels
from vllm_exl3.serving.loading import check_load_format
from vllm_exl3.serving.methods import experts_method, linear_method
from vllm_exl3.serving.metrics import leave_counters
from vllm_exl3.serving.missing import ParameterWatch
from vllm_exl3.serving.models import install_for
from vllm_exl3.serving.ngram import NgramEmbeddingMethod
from vllm_exl3.serving.norm_fusion import fuse_into_linears
from vllm_exl3.serving.offload import compute_device, validate_exl3_moe_uva_layer
from vllm_exl3.serving.parents import end_with_parent
from vllm_exl3.serving.progress import LoadProgress, phase
from vllm_exl3.serving.report import Report, is_first_rank
from vllm_exl3.serving.rewritten import refuse_rewritten
from vllm_exl3.serving.skipping import OtherStages, SkippedTensors, check_tables_claimed, is_draft
from vllm_exl3.serving.specialized_decode import refuse_specialized_decode
from vllm_exl3.serving.transformers_backend import check_logit_factors
from vllm_exl3.serving.vocabulary import VocabularyMethods
from vllm_exl3.serving.whole_model import watch_loading

__all__ = ["Exl3Config"]

logger = logging.getLogger("vllm.exl3")

_DRAFT_PREFIX = "draft_model."
"""What vLLM puts before the names of a draft model's layers, to tell them from the target's. Its pack knows no such."""

_PER_PROCESS = (
    "_pack",
    "_resolver",
    "_packed_modules",
    "claimed",
    "_vocabulary",
    "_names_verified",
    "_source_format",
    "report",
    "_progress",
    "watch",
    "expert_tiers",
)
"""Attributes that are not pickled: each process finds them anew while it builds its model."""

_SENDER = "_sender"
"""What is pickled in their place: the process that sends a config."""


class Exl3Config(QuantizationConfig):
    """How to serve one EXL3 pack.

    Args:
        raw: the ``quantization_config`` of ``config.json``, if it has one. Informational: tensor headers decide.

    Attributes:
        mappers: how the model's classes rename checkpoint modules, outermost first.
        claimed: keys of the stored modules that some layer of the model has asked for.
        report: what is served and how.
        watch: the parameters that belong to no layer of this package.
        expert_tiers: where routed experts are kept.
    """

    def __init__(self, raw: dict[str, Any] | None = None) -> None:
        super().__init__()
        self.raw = raw or {}
        self.source: str | None = None
        self.revision: str | None = None
        self.mappers: list[WeightsMapper] = []
        self._reset()

    def _reset(self) -> None:
        self._pack: Pack | None = None
        self._resolver: NameResolver | None = None
        self._packed_modules: dict[str, list[str]] = {}
        self.claimed: set[str] = set()
        self._vocabulary = VocabularyMethods(self)
        self._names_verified = False
        self._source_format: SourceFormat | None = None
        self.report = Report()
        self._progress = LoadProgress()
        self.watch = ParameterWatch()
        self.expert_tiers = ExpertTiers(self)

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        for name in _PER_PROCESS:
            del state[name]
        return {**state, _SENDER: os.getpid()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        sender = state.pop(_SENDER, None)
        self.__dict__.update(state)
        self._reset()
        end_with_parent(sender)  # an engine's process gets this before it waits for its API server, and plugins after

    def __deepcopy__(self, memo: dict[int, Any]) -> "Exl3Config":
        # vLLM copies configs for draft models; a copy serves another model and must share no state.
        copy = type(self).__new__(type(self))
        copy.__setstate__({**self.__getstate__(), "mappers": [], "packed_modules_mapping": {}})
        return copy

    @classmethod
    def get_name(cls) -> str:
        """The ``quant_method`` this serves."""
        return "exl3"

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        """Activation dtypes that the ops take."""
        return [torch.float16, torch.bfloat16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        """Ampere."""
        return LEAST_CAPABILITY

    @staticmethod
    def get_config_filenames() -> list[str]:
        """None, so that ``--quantization exl3`` needs no file: the pack is asked, and says what it is if not EXL3."""
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "Exl3Config":
        """Keep the declaration; the pack itself is opened in `maybe_update_config`."""
        refuse_old_gpus()  # ahead of vLLM's own check, which does not say which GPU
        # quantization_config.json holds a record of every tensor too: megabytes to pickle, and never asked for.
        return cls({key: value for key, value in config.items() if key != "tensor_storage"})

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: Any, user_quant: str | None, hf_config: Any = None, **_: Any
    ) -> str | None:
        """Claim exactly the packs that declare ``quant_method: exl3``."""
        if isinstance(hf_quant_cfg, dict):
            method = hf_quant_cfg.get("quant_method")
        else:
            method = getattr(hf_quant_cfg, "quant_method", None)
        # Claiming a pack for which --quantization names another method would drop the flag; vLLM refuses the two names.
        return "exl3" if str(method).lower() == "exl3" and user_quant in (None, "exl3") else None

    def maybe_update_config(
        self, model_name: str, hf_config: Any = None, revision: str | None = None, **_: Any
    ) -> None:
        """Open the pack's headers and check them, before any weight is read.

        Args:
            model_name: a folder or a Hub repository.
            hf_config: its configuration; it knows the commit that ``config.json`` came from.
            revision: the branch, tag or commit that the user asked for.

        Raises:
            Exl3PackError: the pack is damaged, contradicts itself, or needs what is not served yet.
            ValueError: an environment variable of this package holds what it does not take.
        """
        env.validate()
        for sentence in unused():
            logger.warning("EXL3: %s", sentence)
        self.source = str(model_name)
        refuse_pack_as_draft(get_current_vllm_config_or_none(), self.source)
        # The commit pins what a branch name may move away from between here and the download. Under
        # --hf-config-path the configuration comes from elsewhere, and its commit is not this repository's.
        same = getattr(hf_config, "_name_or_path", None) in (None, "", self.source)
        self.revision = (getattr(hf_config, "_commit_hash", None) if same else None) or revision
        for warning in check(self.pack):
            logger.warning("EXL3 pack %s: %s", self.source, warning)
        for refusal in unserved(self.pack):
            raise refusal
        refuse_rewritten(self.pack)
        refuse_degrees(self.pack)
        self.source_format()  # refuses what it cannot read, before any weight is read
        if hf_config is not None:
            # vLLM keeps compiled graphs under a hash of its configuration, of which the tensors' shapes and this
            # package's version are no part; they are in the graphs all the same. What is in hf_config is hashed.
            hf_config.vllm_exl3 = fingerprint(self.pack)

    @property
    def pack(self) -> Pack:
        """The pack's headers, read on first use in each process."""
        if self._pack is None:
            if self.source is None:
                raise RuntimeError("Exl3Config: maybe_update_config has not named the pack yet")
            self._pack = Pack.open(self.source, self.revision)
            install_adapter_mask()
            # Before this process builds a layer, each of which asks for the pack.
            install_for(architectures(self._pack.config))
        return self._pack

    def resolve(self, prefix: str) -> Resolution | None:
        """The stored tensors of one vLLM module, noted as claimed."""
        resolution = self.names().resolve(prefix)
        if resolution is not None:
            self.claimed.update(part.key for part in resolution.parts)
        return resolution

    def names(self) -> NameResolver:
        """Finds the stored tensors of vLLM's modules, under all renames that are known by now."""
        # Inner models add to the mapping (and to the renames) after their wrapper's first layers are built.
        if self._resolver is None or self._packed_modules != self.packed_modules_mapping:
            self._packed_modules = dict(self.packed_modules_mapping)
            self._resolver = NameResolver(self.pack, self.map_name, self._packed_modules)
        return self._resolver

    def apply_vllm_mapper(self, hf_to_vllm_mapper: WeightsMapper) -> None:
        """Note how a model class renames checkpoint modules; wrappers and inner models each say theirs."""
        # The first to call is the root class, which builds no layer itself where its tower takes no config.
        watch_loading(get_current_vllm_config_or_none())
        if hf_to_vllm_mapper not in self.mappers:
            self.mappers.append(hf_to_vllm_mapper)
            self._resolver = None

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """The method for one layer, from the headers of the tensors that its name stands for."""
        current = get_current_vllm_config_or_none()
        check_load_format(current, self.source or "the pack")
        check_logit_factors(current, self.source or "the pack")
        refuse_specialized_decode(current, self.source or "the pack")
        let_compiled_kernels_overlap(current)
        fuse_into_linears(current)
        watch_loading(current)
        prefix = prefix.removeprefix(_DRAFT_PREFIX)
        if isinstance(layer, ParallelLMHead):
            return self._vocabulary.head(prefix)
        if isinstance(layer, VocabParallelEmbedding):
            return self._vocabulary.embedding(layer, prefix)
        if isinstance(layer, RoutedExperts):
            return experts_method(self, layer, prefix)
        if isinstance(layer, LinearBase):
            return linear_method(self, layer, prefix)
        return None

    def ngram_method(self, prefix: str) -> NgramEmbeddingMethod | None:
        """The method of an n-gram embedding, or None where its table is not EXL3."""
        stored = self.names().resolve_embedding(prefix)
        if not isinstance(stored, StoredNgramTable):
            return None
        self.claimed.add(stored.key)
        return NgramEmbeddingMethod(self, prefix, stored)

    def get_checkpoint_weight_mapper(self) -> WeightsMapper:  # type: ignore[override]
        """Checkpoint names that differ from parameter names. vLLM asks once the model is built."""
        self.verify_names()
        return WeightsMapper(
            orig_to_new_regex={SkippedTensors(self.pack, self.claimed): None, **self._vocabulary.head_rename},
            # Packs up to exllamav3 0.0.2 store signs as bits; the loaders unpack them.
            orig_to_new_suffix={".su": ".suh", ".sv": ".svh"},
        )

    def trellis_arrived(self, trellis: torch.Tensor) -> None:
        """Note that a stored trellis has been handed over, for the lines that say how far loading is."""
        if not trellis.is_meta and is_first_rank():
            self._progress.add(trellis.nbytes, self._claimed_bytes)

    def _claimed_bytes(self) -> int:
        return sum(self.pack.linears[key].trellis.nbytes for key in self.claimed if key in self.pack.linears)

    def layer_ready(self, where: str, layer: torch.nn.Module) -> None:
        """Note a loaded layer; after the last one, make the kernels ready and log the report."""
        current = get_current_vllm_config_or_none()
        extra = getattr(current.load_config, "model_loader_extra_config", None) if current is not None else None
        tracked = not isinstance(extra, dict) or extra.get("enable_weights_track") is not False
        self.watch.check(layer, str(self.source), refuse=tracked)
        self.report.tiers = self.expert_tiers.placement
        if self.report.layer_ready(where, layer, self.pack):
            with phase("making kernels ready"):
                prepare_kernels(self.report, compute_device(layer))
            self.report.publish()
            leave_counters(current.cache_config.cache_dtype if current is not None else "unknown")

    def verify_names(self) -> None:
        """Once the model is built: every EXL3 tensor must have found its layer.

        Raises:
            Exl3PackError: none did, or some were left over that no rule skips.
            RuntimeError: experts are not where ``VLLM_EXL3_REQUIRE_UVA_EXPERTS`` wants them.
        """
        if self._names_verified:
            return
        self._names_verified = True
        self.watch.close()
        for where, layer in self.report.built_experts():
            validate_exl3_moe_uva_layer(layer, where)
        self._vocabulary.attach_head()
        self._vocabulary.embeddings.clear()  # vLLM keeps configs longer than models; this would keep a table with it
        self.source_format().check(self.pack, self.map_name)
        names = self.names()
        names.draft = is_draft(self.pack, self.claimed)
        elsewhere = OtherStages(self.pack)
        names.raise_if_unmatched(lambda key: "built earlier" if key in self.claimed else elsewhere.reason(key))
        if not names.draft:
            check_tables_claimed(self.pack, self.claimed, elsewhere)

    @property
    def weight_block_size(self) -> list[int] | None:
        """That of the format of the layers that are not EXL3, which some model classes read here; None without one."""
        if self.source is None:
            return SourceFormat(self.raw, "the pack").weight_block_size
        # A class that fills shared experts up to whole blocks would do so to a trellis.
        if any(".shared_expert" in key for key in self.pack.linears):
            return None
        return self.source_format().weight_block_size

    def source_format(self) -> SourceFormat:
        """The format that the pack declares for what is not EXL3."""
        if self._source_format is None:
            # vLLM hands over config.json's block alone; quantization_config.json may say more.
            self._source_format = SourceFormat({**self.pack.quantization, **self.raw}, str(self.source))
        return self._source_format

    def map_name(self, name: str) -> str:
        """A checkpoint tensor's name as the model's classes rename it."""
        for mapper in self.mappers:
            rename: Callable[[str], str | None] = getattr(mapper, "map_name", None) or mapper._map_name
            name = renamed(name, rename)
        return name
