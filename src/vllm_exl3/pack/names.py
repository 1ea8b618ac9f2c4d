"""From a vLLM module prefix to the stored tensors that fill it, and what is left over.

vLLM renames (weights mappers), fuses (q/k/v, gate/up), nests (multimodal wrappers) and renumbers
(MTP layers after the main stack). A name is looked up exactly first; the tolerant look-up drops
wrapper components and must end at one candidate, else it is an error that lists them.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal

from vllm_exl3.pack.errors import Exl3PackError
from vllm_exl3.pack.experts import EXPERT
from vllm_exl3.pack.pack import Pack
from vllm_exl3.pack.parts import Part, Resolution
from vllm_exl3.pack.skip import Skipper, main_layers
from vllm_exl3.pack.spelling import (
    EMBEDDING_NAMES,
    HEAD_NAMES,
    SPLITS,
    WITH_GATE,
    WITHOUT_GATE,
    canonical,
    is_head_name,
    is_outside_layers,
    keys_are_values,
)
from vllm_exl3.pack.stored import (
    ExpertGroup,
    StoredLinear,
    StoredNgramTable,
    StoredRowTable,
    StoredScaledTable,
)

__all__ = ["NameResolver"]

_SLICE = re.compile(r"^(?P<key>.+)\.slice\.(?P<index>\d+)$")
_IN_LAYER = re.compile(r"^(?:.*\.)?layers\.\d+\.")
_SAMPLES = 4


def _identity(name: str) -> str | None:
    return name


class NameResolver:
    """Resolves vLLM module prefixes against one pack and records what has been claimed.

    Args:
        pack: the opened pack.
        map_name: vLLM's renaming of checkpoint tensor names; None drops a tensor.
        packed_modules: vLLM's ``packed_modules_mapping``, fused name to the names it packs.
        draft: whether the model being built is the pack's own MTP draft, not its main model.
    """

    def __init__(
        self,
        pack: Pack,
        map_name: Callable[[str], str | None] = _identity,
        packed_modules: Mapping[str, Sequence[str]] | None = None,
        *,
        draft: bool = False,
    ) -> None:
        self.pack = pack
        self.draft = draft
        self._packed = dict(packed_modules or {})
        self._skipper = Skipper(pack)
        self._main_layers = main_layers(pack.config)
        self._exact: defaultdict[str, list[str]] = defaultdict(list)
        self._loose: defaultdict[str, list[str]] = defaultdict(list)
        self._slices: defaultdict[str, dict[int, StoredLinear]] = defaultdict(dict)
        self._experts: dict[str, ExpertGroup] = {}
        self._dropped: set[str] = set()
        self._claimed: set[str] = set()
        self._asked: list[str] = []
        self._fill(map_name)

    def resolve(self, prefix: str) -> Resolution | None:
        """The stored modules for the vLLM module ``prefix``; '' means the token embedding.

        Returns:
            The parts in the order that vLLM fuses them, or None when the pack has nothing for it.

        Raises:
            Exl3PackError: the name fits several modules, or only some parts of a fused one are stored.
        """
        self._asked.append(prefix)
        return self.find(prefix)

    def find(self, prefix: str) -> Resolution | None:
        """The same for a name that need not be a module's of the model, such as another path to one."""
        keys = self._keys(prefix)
        if keys is None:
            return None
        parts = tuple(self._part(key) for key in keys)
        self._claimed.update(keys, (linear.key for part in parts for linear in part.slices))
        return Resolution(prefix, parts)

    def resolve_embedding(self, prefix: str = "") -> StoredRowTable | StoredScaledTable | StoredNgramTable | None:
        """The quantized table for an embedding module, or None when it is dense or absent."""
        key = self._unique(prefix) if prefix else self._by_leaf(EMBEDDING_NAMES)
        if key is None:
            return None
        return self.pack.embeddings.get(key) or self.pack.ngram_tables.get(key)

    def resolve_experts(self, prefix: str) -> ExpertGroup | None:
        """The routed experts for ``<mlp>.experts``; every one of their linears counts as claimed."""
        self._asked.append(prefix)
        group = self._expert_group(prefix.removesuffix(".experts"))
        if group is not None:
            self._claimed.update(key for roles in group.members.values() for key in roles.values())
        return group

    def _expert_group(self, mlp: str) -> ExpertGroup | None:
        """The experts under this name, or else the only ones of the layer: some classes give them another prefix."""
        name = self._canonical_mlp(mlp)
        if (group := self._experts.get(name)) is not None:
            return group
        match = _IN_LAYER.match(name)
        others = [key for key in self._experts if match is not None and key.startswith(match[0])]
        return self._experts[others[0]] if len(others) == 1 else None

    def unclaimed(self, skip: Callable[[str], str | None] | None = None) -> list[str]:
        """EXL3 linears that no module asked for and no rule skips.

        Args:
            skip: says why a key is left out on purpose (a tower that is not built, another
                pipeline stage), or None.
        """
        return [
            key
            for key in self.pack.linears
            if key not in self._claimed
            and key not in self._dropped
            and self._wanted(key)
            and (skip is None or skip(key) is None)
        ]

    def _wanted(self, key: str) -> bool:
        if self.draft and not self._skipper.is_mtp(key):
            return False  # the main model's, or shared with it
        return self._skipper.rule_for_module(key, draft=self.draft) is None

    def raise_if_unmatched(self, skip: Callable[[str], str | None] | None = None) -> None:
        """Refuse a pack whose names and the model's do not meet.

        Raises:
            Exl3PackError: no module matched, or EXL3 linears remain that nothing claims.
        """
        left = self.unclaimed(skip)
        if not left:
            return
        matched = sum(1 for key in self._claimed if key in self.pack.linears)
        stored = ", ".join(left[:_SAMPLES])
        asked = [prefix for prefix in self._asked if prefix]
        unmatched = [prefix for prefix in asked if not self._has_match(prefix)]
        if asked and not unmatched:
            without = "all modules of the model have their tensors"
            remedy = (
                "These are left over from another revision, or config.json is of another model: fetch the pack again. "
                "If both are as its maker published them, report it"
            )
        else:
            without = f"the model's modules without a match: {', '.join(unmatched[:_SAMPLES]) or 'none'}"
            remedy = (
                "The pack is of another architecture than config.json says, or vLLM's model class names its "
                "modules in a new way: report it"
            )
        raise Exl3PackError(
            found=f"{len(left)} EXL3 linears that no module of the model asks for ({stored}), {matched} matched",
            expected=f"every one to be asked for; {without}",
            where=self.pack.source,
            remedy=f"{remedy} with the output of `vllm-exl3 inspect`.",
        )

    def _fill(self, map_name: Callable[[str], str | None]) -> None:
        for key, leaf in self._stored_modules():
            mapped = map_name(f"{key}.{leaf}")
            if mapped is None:
                self._dropped.add(key)
                continue
            name = mapped.removesuffix(f".{leaf}")
            if match := EXPERT.match(name):
                self._add_expert(key, match["mlp"])
                continue
            if (match := _SLICE.match(key)) and (linear := self.pack.linears.get(key)):
                slices = self._slices[match["key"]]
                slices[int(match["index"])] = linear
                if len(slices) == 1:
                    self._add(match["key"], _SLICE.sub(r"\g<key>", name))
            else:
                self._add(key, name)

    def _add(self, key: str, name: str) -> None:
        self._exact[name].append(key)
        self._loose[self._canonical(name)].append(key)

    def _stored_modules(self) -> Iterator[tuple[str, str]]:
        pack = self.pack
        for modules in (pack.linears, pack.embeddings, pack.ngram_tables):
            yield from ((key, "trellis") for key in modules)
        for key in pack.dense:
            if self._skipper.rule_for_module(key, draft=True) is None:
                yield key, "weight"

    def _add_expert(self, key: str, mapped_mlp: str) -> None:
        match = EXPERT.match(key)
        group = self.pack.experts.get(match["mlp"]) if match else None
        if group is not None:
            self._experts[self._canonical_mlp(mapped_mlp)] = group

    def _keys(self, prefix: str) -> tuple[str, ...] | None:
        if not prefix:
            key = self._by_leaf(EMBEDDING_NAMES)
            return None if key is None else (key,)
        if (key := self._unique(prefix)) is not None:
            return (key,)
        for names in self._fusions(prefix):
            if (keys := self._fused(prefix, names)) is not None:
                return keys
        if is_head_name(prefix) and (key := self._by_leaf(HEAD_NAMES)) is not None:
            return (key,)
        return None

    def _has_match(self, prefix: str) -> bool:
        """Whether the pack stores something for a module, for messages."""
        if prefix.endswith(".experts"):
            stored = self._expert_group(prefix.removesuffix(".experts")) is not None
            return stored or any(name.startswith(f"{prefix}.") for name in self.pack.tensors)  # in 16 bits
        try:
            return self._keys(prefix) is not None
        except Exl3PackError:
            return False

    def _fusions(self, prefix: str) -> Iterator[tuple[str, ...]]:
        """Full names of the parts that ``prefix`` may be stored as, vLLM's own mapping first."""
        base, dot, leaf = prefix.rpartition(".")
        gate, gated = WITH_GATE.get(leaf, ("", ()))
        if gate and self._unique(base + dot + gate) is not None:
            yield tuple(base + dot + name for name in gated)
        gate, ungated = WITHOUT_GATE.get(leaf, ("", ()))
        if gate and self._unique(base + dot + gate) is None:
            yield tuple(base + dot + name for name in ungated)
        for fused, names in self._packed.items():
            if prefix == fused or prefix.endswith(f".{fused}"):
                start = prefix[: -len(fused)]
                # vLLM calls rows that only align the others by a name with an underscore; no checkpoint has them.
                yield tuple(start + name for name in names if not name.startswith("_"))
        for split in SPLITS.get(leaf, ()):
            yield tuple(base + dot + name for name in split)

    def _fused(self, prefix: str, names: Sequence[str]) -> tuple[str, ...] | None:
        keys = [self._unique(name) for name in names]
        found = {name: key for name, key in zip(names, keys, strict=True) if key is not None}
        if not found:
            return None
        missing = [name for name in names if name not in found]
        if [name.rpartition(".")[2] for name in missing] == ["v_proj"] and keys_are_values(self.pack.config):
            found[missing.pop()] = found[names[1]]  # such layers store k once, and vLLM loads it into v as well
        if missing:
            raise Exl3PackError(
                found=f"only {', '.join(found.values())}",
                expected=f"also {', '.join(missing)}",
                where=f"{prefix} in {self.pack.source}",
                remedy="A file of the pack is missing or of another revision: fetch the pack again.",
            )
        return tuple(found[name] for name in names)

    def _unique(self, name: str) -> str | None:
        candidates = self._exact.get(name) or self._loose.get(self._canonical(name)) or []
        if len(candidates) > 1:
            raise self._ambiguity(name, candidates)
        return candidates[0] if candidates else None

    def _by_leaf(self, leaves: Sequence[str]) -> str | None:
        """The one stored module outside the layers whose last component is the first leaf that occurs."""
        for leaf in leaves:
            names = [name for name in self._exact if is_outside_layers(name, leaf) and not name.startswith("mtp.")]
            keys = sorted((key for name in names for key in self._exact[name]), key=lambda key: key.count("."))
            # The text model's own has the shorter name; deeper ones belong to towers.
            if len(keys) > 1 and keys[0].count(".") == keys[1].count("."):
                raise self._ambiguity(leaf, keys)
            if keys:
                return keys[0]
        return None

    def _ambiguity(self, name: str, candidates: Sequence[str]) -> Exl3PackError:
        return Exl3PackError(
            found=f"{len(candidates)} candidates: {', '.join(candidates[:_SAMPLES])}",
            expected="one stored module",
            where=f"{name} in {self.pack.source}",
            remedy="Two parts of the pack answer to the same name: report it with the output of `vllm-exl3 inspect`.",
        )

    def _part(self, key: str) -> Part:
        if key in self._slices:
            parts = self._slices[key]
            axis: Literal["in", "out"] = "in" if key.endswith("down_proj") else "out"
            return Part(key, None, None, tuple(parts[index] for index in sorted(parts)), axis)
        return Part(key, self.pack.linears.get(key), self.pack.dense.get(key))

    def _canonical(self, name: str) -> str:
        return canonical(name, self._main_layers)

    def _canonical_mlp(self, name: str) -> str:
        # gemma-4's class puts a `.moe` component in by itself, outside any mapper.
        return self._canonical(name).removesuffix(".moe")
