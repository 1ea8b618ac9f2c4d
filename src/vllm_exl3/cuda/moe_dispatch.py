"""Which kernels serve how many tokens of a MoE layer, and how many tokens are in work at once.

Two classes: the decode path (the codebooks' identities, rows stored slot by slot) and the grouped prefill (fp16, an
expert's rows stored together). Inside a class a row's bits do not depend on the other rows. Which one serves is decided
by numbers that the host has: the routing stays on the device.
"""

from dataclasses import dataclass

from vllm_exl3 import env
from vllm_exl3.cuda.geometry import GpuLimits
from vllm_exl3.cuda.moe_gemm import FEW_KINDS
from vllm_exl3.cuda.moe_geometry import Layer, MoeForm

__all__ = ["Choice", "choose", "every_form"]

_MUL1_ROWS, _LIGHT_ROWS, _PAIR_ROWS = 3.5, 4.0, 8.0
"""Up to how many tokens an expert, on average, the identities win. mul1: measured on an H200, 3.5 with K = 3, between 4
and 4.5 with K = 2 and 4; mcg and 3INST: what one decoding serves."""

_LIGHT_HALF_BITS = frozenset((4, 8))
"""2·K of mul1 whose states are cheapest to cut, of those measured."""

_WIDE_ROWS = {32: 24.0, 64: 52.0}
"""Up to how many tokens an expert, on average, row blocks of this size win; above them those of 256 do. Measured on an
H200 (benchmarks/results/h200/moe.json) between 16 and 32, and between 48 and 64."""

_MIXED_WIDE_ROWS = _WIDE_ROWS | {128: 106.0}
"""The same for layers of more than a few kinds, whose widest kernel has two widths of product. Measured between 96 and
128, where experts come to need two row blocks of 128. For one kind those won 2 % at 96 tokens an expert and nothing at
64."""

_LARGEST_INTEGER_WIDTH = 16384
"""Input channels up to which sums of products of bytes fit 32 bits."""


@dataclass(frozen=True, slots=True)
class Choice:
    """How a call is served.

    Attributes:
        form: how experts are multiplied.
        window: tokens in work at once.
        fat_rows: experts with more rows take row blocks of the form's full size.
    """

    form: MoeForm
    window: int
    fat_rows: int


def choose(layer: Layer, tokens: int, limits: GpuLimits, *, one_class: bool = False) -> Choice:
    """How ``tokens`` tokens of a layer are served.

    Args:
        layer: what the layer is like.
        tokens: of the call.
        limits: the GPU.
        one_class: serve any number of tokens by the fp16 class, so that a row's bits never depend on the batch.
    """
    decode, prefill = decode_form(layer, one_class=one_class), env.GROUPED_PREFILL.get()
    if not one_class and (not prefill or tokens <= decode_rows(layer)):
        window = env.FUSED_TEMP_ROWS.get()
        return Choice(decode, window, _fat_rows(decode))
    window = env.GROUPED_PREFILL_MAX_ROWS.get()
    form = prefill_form(layer, min(tokens, window), limits)
    return Choice(form, window, _fat_rows(form))


def decode_rows(layer: Layer) -> int:
    """Up to how many tokens the decode path serves the layer."""
    bits = {min(8, -(-half_bits // 2)) for half_bits, _ in layer.codes}
    general = env.NATIVE_MOE_MAX_ROWS.get()
    caps = [env.NATIVE_MOE_MAX_ROWS_BY_BITS[each].get() for each in bits]
    chosen = [cap if cap is not None else general for cap in caps]
    light = all(half_bits in _LIGHT_HALF_BITS for half_bits, _ in layer.codes)
    rows = (_LIGHT_ROWS if light else _MUL1_ROWS) if layer.mul1 else _PAIR_ROWS
    measured = max(4 if layer.mul1 else 8, int(rows * layer.total_experts / layer.top_k))
    return min(cap if cap is not None else measured for cap in chosen)


def decode_form(layer: Layer, *, one_class: bool = False) -> MoeForm:
    """The decode path's form."""
    wide = layer.mul1 and max(layer.hidden, layer.intermediate) > _LARGEST_INTEGER_WIDTH
    if one_class or wide:
        return MoeForm(False, 16)
    return MoeForm(True, 4 if layer.mul1 else 8)


def prefill_form(layer: Layer, tokens: int, limits: GpuLimits) -> MoeForm:
    """The grouped prefill's form: with wgmma by the tokens an expert has on average."""
    rows = tokens * layer.top_k / layer.total_experts
    if limits.warpgroups:
        return MoeForm(False, next((size for size, most in _wide_rows(layer).items() if rows <= most), 256))
    return MoeForm(False, 8 if rows <= 4 else 16)


def _wide_rows(layer: Layer) -> dict[int, float]:
    return _WIDE_ROWS if len(layer.codes) <= FEW_KINDS else _MIXED_WIDE_ROWS


def _fat_rows(form: MoeForm) -> int:
    chosen = env.FAT_THRESHOLD.get()
    return form.tile_rows // 2 if chosen is None else chosen


def every_form(layer: Layer, limits: GpuLimits) -> list[MoeForm]:
    """The forms that some number of tokens chooses for a layer, whatever the variables say."""
    forms = [decode_form(layer), decode_form(layer, one_class=True)]
    grouped = (*_wide_rows(layer), 256) if limits.warpgroups else (8, 16)
    forms += [MoeForm(False, rows) for rows in grouped]
    return list(dict.fromkeys(forms))
