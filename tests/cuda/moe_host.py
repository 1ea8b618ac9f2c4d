"""The MoE op on the host, launch by launch: what its tests share. ``host/moe.cpp`` runs the kernels themselves."""

import ctypes
from collections.abc import Sequence

import numpy as np
import torch

from tests.cuda.host_kernels import HostKernels
from tests.ops.moe_layers import MoELayer
from vllm_exl3.cuda.binding import ELEMENTS
from vllm_exl3.cuda.compiler import Instance
from vllm_exl3.cuda.moe_geometry import ACTIVATION_KINDS, Layer, MoeArgs, MoeForm, MoeStage
from vllm_exl3.cuda.moe_plan import (
    COMBINE,
    COMBINE_ROWS,
    COUNT,
    GROUP_ROWS,
    ROUTE,
    ROWS,
    SCHEDULE,
    SWIGLU_ROWS,
    MoePlan,
    plan_moe,
)
from vllm_exl3.cuda.survey import typical_limits
from vllm_exl3.ops.experts import pack_table, projection_kinds, shift_trellises
from vllm_exl3.pack.stored import Codebook

H200 = typical_limits("sm_90a")
IDENTITY, THIN, WIDE = MoeForm(True, 4), MoeForm(False, 32), MoeForm(False, 64)
WIDER, WIDEST = MoeForm(False, 128), MoeForm(False, 256)
NUMBERS = {
    ROUTE: 0,
    ROWS: 1,
    GROUP_ROWS[0]: 2,
    GROUP_ROWS[1]: 3,
    COMBINE: 4,
    COMBINE_ROWS: 5,
    COUNT: 6,
    SCHEDULE: 12,
    SWIGLU_ROWS: 13,
}
GEMM_NUMBERS = {IDENTITY: 7, THIN: 8, WIDE: 9, WIDEST: 10, WIDER: 11}
"""What host/moe.cpp calls the kernels."""

BLOCKS = 2
"""Thread blocks of what goes round over work: few, so that every block has some of it."""

WIDEST_BLOCKS = 256
"""Hadamard blocks of an input of 32,768 channels, wider than any known model's."""

UNIFORM = [(4, Codebook.MUL1)]
MIXED = [(3, Codebook.MCG), (4, Codebook.MUL1), (2.5, Codebook.MUL1), (4, Codebook.MUL1), (3, Codebook.MCG)]
"""What host/moe.cpp knows."""


class Memory:
    """Arrays at addresses that are multiples of 256, like a GPU's allocations; kept as long as this lives."""

    def __init__(self) -> None:
        self._kept: list[np.ndarray] = []

    def place(self, values: np.ndarray) -> int:
        """Address of a copy."""
        raw = np.full(values.nbytes + 512, 0xFF, np.uint8)  # NaN, and slots that do not exist
        start = -raw.ctypes.data % 256
        raw[start : start + values.nbytes] = np.ascontiguousarray(values).view(np.uint8).ravel()
        self._kept.append(raw)
        return raw.ctypes.data + start


def arguments_of(
    memory: Memory,
    layer: MoELayer,
    plan: MoePlan,
    table: torch.Tensor,
    on_input: bool,
    elsewhere: Sequence[int] = (),
) -> MoeArgs:
    """What vllm_exl3.cuda.moe fills in, with addresses of this process.

    Trellises of the experts ``elsewhere`` are found outside of the flat tensors, where nothing is left of them.
    """
    stages = []
    for name, sizes in zip(("w13", "w2"), plan.stages, strict=True):
        tensors = {leaf: layer.tensors[f"{name}_{leaf}"] for leaf in ("trellis", "suh", "svh", "bias")}
        places = {leaf: memory.place(tensor.numpy()) for leaf, tensor in tensors.items() if tensor is not None}
        stages.append(MoeStage(**sizes, **places))
    if elsewhere:
        shifts = []
        for name, stage, projections in (("w13", stages[0], slice(0, -1)), ("w2", stages[1], slice(-1, None))):
            words = layer.tensors[f"{name}_trellis"].numpy()
            copy = memory.place(words)
            for expert in elsewhere:
                for part in layer.projections[expert][projections]:
                    ctypes.memset(stage.trellis + 2 * part.trellis, 0x5A, 2 * part.trellis_words)
            shifts.append((copy - stage.trellis) // 2)
        table = shift_trellises(table, elsewhere, *shifts)
    alpha, beta, limit = layer.activation[1:]
    args = MoeArgs(
        stages=(MoeStage * 2)(*stages), table=memory.place(table.numpy()), out_type=2, wide_ids=0,
        x_stride=layer.hidden, out_stride=layer.hidden, weight_on_input=on_input, alpha=alpha, beta=beta, limit=limit,
        activation=ACTIVATION_KINDS.index(layer.activation[0]), **plan.values,
    )  # fmt: skip
    plan.scratch.place(args, memory.place(np.full(plan.scratch.size, 0xFF, np.uint8)))
    return args


def launch_alone(library: HostKernels, args: MoeArgs, plan: MoePlan, *instances: Instance) -> None:
    """Run the first of a plan's launches of each of these kernels."""
    for instance in instances:
        launch = next(launch for launch in plan.launches if launch.instance == instance)
        library.run_kernel(ctypes.byref(args), NUMBERS[instance], 0, *launch.grid, launch.threads, launch.shared)


def run(
    library: HostKernels,
    layer: MoELayer,
    x: torch.Tensor,
    route: tuple[torch.Tensor, torch.Tensor],
    form: MoeForm,
    *,
    on_input: bool = False,
    table: torch.Tensor | None = None,
    fat_rows: int | None = None,
    expert_map: torch.Tensor | None = None,
    elsewhere: Sequence[int] = (),
) -> torch.Tensor:
    """The whole op, launch by launch."""
    kinds = projection_kinds(layer.projections)
    experts, (tokens, top_k) = len(layer.projections), route[1].shape
    total = experts if expert_map is None else len(expert_map)
    shape = Layer(
        tuple(zip(kinds[::3], kinds[1::3], kinds[2::3], strict=True)),
        experts, total, top_k, layer.hidden, layer.intermediate,
        layer.activation[0] == "swiglu" and layer.tensors["w13_bias"] is None,
    )  # fmt: skip
    fat_rows = form.tile_rows // 2 if fat_rows is None else fat_rows
    plan, memory = plan_moe(shape, tokens, form, fat_rows, H200), Memory()
    table = pack_table(layer.projections) if table is None else table
    args = arguments_of(memory, layer, plan, table, on_input, elsewhere)
    out = np.full((tokens, layer.hidden), np.nan, np.float32)
    raw = x if x.dtype == torch.float32 else x.view(torch.int16)
    args.x, args.out, args.x_type = memory.place(raw.numpy()), out.ctypes.data, ELEMENTS[x.dtype]
    args.weights, args.ids = memory.place(route[0].numpy()), memory.place(route[1].numpy())
    if expert_map is not None:
        args.expert_map = memory.place(expert_map.numpy())
    mixed = len({kinds[i + 1 : i + 3][0] * 4 + kinds[i + 2] for i in range(0, len(kinds), 3)}) > 1

    for launch in plan.launches:
        args.stage, threads, grid = launch.stage, launch.threads, launch.grid
        if launch.instance in NUMBERS:
            number = NUMBERS[launch.instance]
        else:
            number = GEMM_NUMBERS[form]
            threads = threads if form.wide else 256  # the host builds one of two numbers of warps
        if launch.instance in (*GROUP_ROWS, SWIGLU_ROWS) or number == GEMM_NUMBERS[form]:
            grid = (BLOCKS, 1)
        library.run_kernel(ctypes.byref(args), number, int(mixed), *grid, threads, launch.shared)
    return torch.from_numpy(out)


def read(address: int, count: int) -> np.ndarray:
    """Words that kernels wrote."""
    return np.ctypeslib.as_array((ctypes.c_int32 * count).from_address(address)).copy()
