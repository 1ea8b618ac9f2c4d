"""``quantization_config`` of an EXL3 pack, as vLLM's quantization interface wants it.

The config decides per layer from the pack's tensor headers. It is pickled to every worker, so it
carries only where the pack is; headers are read again there (and memoised per file).
"""

import hashlib
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from vllm.config import get_current_vllm_config_or_none
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.models.utils import WeightsMapper

from vllm_exl3 import __version__, env
from vllm_exl3.ops import backends
from vllm_exl3.ops.linear import linear_reference
from vllm_exl3.ops.moe import moe_reference
from vllm_exl3.pack import Pack
from vllm_exl3.pack.check import check
from vllm_exl3.pack.errors import Exl3PackError
from vllm_exl3.pack.metadata import architectures
from vllm_exl3.pack.names import NameResolver, Part, Resolution
from vllm_exl3.pack.stored import StoredNgramTable
from vllm_exl3.pack.support import unserved
from vllm_exl3.serving.delegate import SourceFormat
from vllm_exl3.serving.dependent_launch import let_compiled_kernels_overlap
from vllm_exl3.serving.linear import Exl3LinearMethod
from vllm_exl3.serving.loading import check_load_format
from vllm_exl3.serving.metrics import leave_counters
from vllm_exl3.serving.models import gpt_oss, qwen4_exp
from vllm_exl3.serving.moe import Exl3MoEMethod
from vllm_exl3.serving.ngram import NgramEmbeddingMethod
from vllm_exl3.serving.offload import compute_device, validate_exl3_moe_uva_layer
from vllm_exl3.serving.progress import LoadProgress, phase
from vllm_exl3.serving.report import Report, is_first_rank
from vllm_exl3.serving.skipping import OtherStages, SkippedTensors, is_draft
from vllm_exl3.serving.unloaded import watched
from vllm_exl3.serving.vocabulary import VocabularyMethods

__all__ = ["Exl3Config", "fingerprint"]

logger = logging.getLogger("vllm.exl3")

_DECLARED = "in the format that non_routed_quantization declares"

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
)
"""Attributes that are not pickled: each process finds them anew while it builds its model."""


def fingerprint(pack: Pack) -> str:
    """What compiled graphs depend on: this package's version, and name, dtype and shape of every stored tensor."""
    lines = sorted(f"{tensor.name} {tensor.dtype} {tensor.shape}" for tensor in pack.tensors.values())
    return f"{__version__} {hashlib.sha256(repr(lines).encode()).hexdigest()}"


class Exl3Config(QuantizationConfig):
    """How to serve one EXL3 pack.

    Args:
        raw: the ``quantization_config`` of ``config.json``, if it has one. Informational: tensor headers decide.

    Attributes:
        claimed: keys of the stored modules that some layer of the model has asked for.
        report: what is served and how.
    """

    def __init__(self, raw: dict[str, Any] | None = None) -> None:
        super().__init__()
        self.raw = raw or {}
        self.source: str | None = None
        self.revision: str | None = None
        self._mappers: list[WeightsMapper] = []
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

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        for name in _PER_PROCESS:
            del state[name]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset()

    def __deepcopy__(self, memo: dict[int, Any]) -> "Exl3Config":
        # vLLM copies configs for draft models; a copy serves another model and must share no state.
        copy = type(self).__new__(type(self))
        copy.__setstate__({**self.__getstate__(), "_mappers": [], "packed_modules_mapping": {}})
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
        """Ampere: the kernels need ``mma.sync.m16n8k16`` and ``cp.async``."""
        return 80

    @staticmethod
    def get_config_filenames() -> list[str]:
        """None, so that ``--quantization exl3`` needs no file: the pack is asked, and says what it is if not EXL3."""
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "Exl3Config":
        """Keep the declaration; the pack itself is opened in `maybe_update_config`."""
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
        return "exl3" if str(method).lower() == "exl3" else None

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
        self.source = str(model_name)
        # The commit pins what a branch name may move away from between here and the download. Under
        # --hf-config-path the configuration comes from elsewhere, and its commit is not this repository's.
        same = getattr(hf_config, "_name_or_path", None) in (None, "", self.source)
        self.revision = (getattr(hf_config, "_commit_hash", None) if same else None) or revision
        for warning in check(self.pack):
            logger.warning("EXL3 pack %s: %s", self.source, warning)
        for refusal in unserved(self.pack):
            raise refusal
        self._source()  # refuses what it cannot read, before any weight is read
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
            # Before this process builds a layer, each of which asks for the pack.
            for architecture in architectures(self._pack.config):
                if qwen4_exp.is_qwen4_exp(architecture):
                    qwen4_exp.install()
                if gpt_oss.is_gpt_oss(architecture):
                    gpt_oss.install()
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
        if hf_to_vllm_mapper not in self._mappers:
            self._mappers.append(hf_to_vllm_mapper)
            self._resolver = None

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """The method for one layer, from the headers of the tensors that its name stands for."""
        current = get_current_vllm_config_or_none()
        check_load_format(current, self.source or "the pack")
        let_compiled_kernels_overlap(current)
        prefix = prefix.removeprefix(_DRAFT_PREFIX)
        if isinstance(layer, ParallelLMHead):
            return self._vocabulary.head(prefix)
        if isinstance(layer, VocabParallelEmbedding):
            return self._vocabulary.embedding(layer, prefix)
        if isinstance(layer, RoutedExperts):
            return self._experts_method(layer, prefix)
        if isinstance(layer, LinearBase):
            return self._linear_method(layer, prefix)
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
        if self.report.layer_ready(where, layer, self.pack):
            with phase("making kernels ready"):
                self._prepare_kernels(compute_device(layer))
            self.report.publish()
            current = get_current_vllm_config_or_none()
            leave_counters(current.cache_config.cache_dtype if current is not None else "unknown")

    def _prepare_kernels(self, device: torch.device) -> None:
        backend = backends.select("linear", device.type, linear_reference).backend
        if backend.prepare is not None:
            layouts = [layout for _, layout in self.report.layers.values()]
            backend.prepare(dict.fromkeys((layout.shards, layout.input_width) for layout in layouts), device)
        if not self.report.experts:
            return
        backend = backends.select("moe", device.type, moe_reference).backend
        if backend.prepare is not None:
            backend.prepare(dict.fromkeys(layout.kernel_key for layout in self.report.experts.values()), device)

    def verify_names(self) -> None:
        """Once the model is built: every EXL3 tensor must have found its layer.

        Raises:
            Exl3PackError: none did, or some were left over that no rule skips.
            RuntimeError: experts are not where ``VLLM_EXL3_REQUIRE_UVA_EXPERTS`` wants them.
        """
        if self._names_verified:
            return
        self._names_verified = True
        for where, layer in self.report.built_experts():
            validate_exl3_moe_uva_layer(layer, where)
        self._vocabulary.attach_head()
        self._vocabulary.embeddings.clear()  # vLLM keeps configs longer than models; this would keep a table with it
        self._source().check(self.pack, self.map_name)
        names = self.names()
        names.draft = is_draft(self.pack, self.claimed)
        elsewhere = OtherStages(self.pack)
        names.raise_if_unmatched(lambda key: "built earlier" if key in self.claimed else elsewhere.reason(key))
        if not names.draft:
            self._check_embeddings_claimed(elsewhere)

    def _check_embeddings_claimed(self, elsewhere: OtherStages) -> None:
        for key, table in (*self.pack.embeddings.items(), *self.pack.ngram_tables.items()):
            if key not in self.claimed and elsewhere.reason(key) is None:
                ngram = isinstance(table, StoredNgramTable)
                raise Exl3PackError(
                    found=f"{'an n-gram table' if ngram else 'a quantized embedding'} of {table.rows} rows that no "
                    "layer of the model asks for",
                    expected="a Qwen4Exp model, whose n-gram embeddings are known"
                    if ngram
                    else "a VocabParallelEmbedding of that vocabulary and the table's width",
                    where=f"{key} in {self.pack.source}",
                    remedy="vLLM's class for this model builds its embedding in another way: use a pack whose "
                    "embedding is in 16 bits.",
                )

    def _linear_method(self, layer: LinearBase, prefix: str) -> QuantizeMethodBase:
        resolution = self.resolve(prefix)
        parts = resolution.parts if resolution is not None else ()
        if all(part.linear is None for part in parts):
            keys = [part.key for part in parts]
            method = self._source().linear(layer, prefix, keys, self._mappers, self.packed_modules_mapping)
            if type(method) is UnquantizedLinearMethod:
                watched(method, prefix)
            self.report.add_dense(prefix, self.why_dense(method, parts))
            return method
        return Exl3LinearMethod(self, prefix, parts)

    def _experts_method(self, layer: RoutedExperts, prefix: str) -> QuantizeMethodBase | None:
        group = self.names().resolve_experts(prefix)
        if group is None:
            method = self._source().experts(layer, prefix, self._mappers, self.packed_modules_mapping)
            self.report.add_dense(prefix, "no EXL3 experts stored" if method is None else _DECLARED)
            return method
        self.claimed.update(key for roles in group.members.values() for key in roles.values())
        return Exl3MoEMethod(self, prefix, layer, group)

    @staticmethod
    def why_dense(method: QuantizeMethodBase, parts: Sequence[Part]) -> str:
        """What the report says of a layer that is not EXL3."""
        if not isinstance(method, UnquantizedLinearMethod):
            return _DECLARED
        dtypes = dict.fromkeys(part.dense.dtype for part in parts if part.dense is not None)
        return f"stored as {' and '.join(dtypes)}" if dtypes else "nothing of this name stored"

    def _source(self) -> SourceFormat:
        if self._source_format is None:
            # vLLM hands over config.json's block alone; quantization_config.json may say more.
            self._source_format = SourceFormat({**self.pack.quantization, **self.raw}, str(self.source))
        return self._source_format

    def map_name(self, name: str) -> str:
        """A checkpoint tensor's name as the model's classes rename it."""
        for mapper in self._mappers:
            rename: Callable[[str], str | None] = getattr(mapper, "map_name", None) or mapper._map_name
            name = rename(name) or name
        return name
