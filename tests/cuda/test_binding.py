"""What a call puts into the launch arguments of a linear."""

import pytest
import torch

from vllm_exl3.cuda.binding import ELEMENTS, bind
from vllm_exl3.cuda.geometry import Form, GpuLimits, LinearArgs
from vllm_exl3.cuda.narrow import NarrowArgs, plan_narrow
from vllm_exl3.cuda.wide import plan_wide
from vllm_exl3.ops.shards import Shard

SHARDS = (Shard(8, 2, 256, 256, 0, 200), Shard(6, 1, 256, 128, 0, 128))


@pytest.mark.parametrize("form", [Form(False, 16), Form(False, 32)], ids=lambda form: form.name)
def test_every_shard_gets_its_place_in_the_flat_tensors(form: Form) -> None:
    make = plan_wide if form.wide else plan_narrow
    plan = make(SHARDS, 20, 256, form, GpuLimits("sm_90a", 132, 232448))
    assert plan.arguments_type is (LinearArgs if form.wide else NarrowArgs)
    arguments = plan.arguments_type.from_buffer_copy(plan.arguments)
    trellis = torch.empty(sum(shard.trellis_words for shard in SHARDS), dtype=torch.int16)
    suh, svh = torch.empty(512, dtype=torch.float16), torch.empty(384, dtype=torch.float16)
    x, out = torch.empty(20, 300, dtype=torch.bfloat16)[:, :256], torch.empty(20, 328)
    scratch, bias = torch.empty(plan.scratch, dtype=torch.uint8), torch.empty(328, dtype=torch.float16)
    bind(arguments, plan.offsets, scratch, plan.scratch_parts, x, trellis, suh, svh, bias, out)

    words = SHARDS[0].trellis_words
    first, second = arguments.shards[:2]
    assert (first.trellis, second.trellis) == (trellis.data_ptr(), trellis[words:].data_ptr())
    assert (first.suh, second.suh) == (suh.data_ptr(), suh[256:].data_ptr())
    assert (first.svh, second.svh) == (svh.data_ptr(), svh[256:].data_ptr())
    assert (arguments.x, arguments.x_stride, arguments.x_type) == (x.data_ptr(), 300, ELEMENTS[torch.bfloat16])
    assert (arguments.out, arguments.out_stride, arguments.out_type) == (out.data_ptr(), 328, ELEMENTS[torch.float32])
    assert (arguments.bias, arguments.bias_type) == (bias.data_ptr(), ELEMENTS[torch.float16])
    for name, offset in plan.scratch_parts.items():
        assert getattr(arguments, name) == scratch.data_ptr() + offset


def test_no_bias_leaves_none() -> None:
    plan = plan_narrow(SHARDS, 1, 256, Form(False, 16), GpuLimits("sm_90a", 132, 232448))
    arguments = NarrowArgs.from_buffer_copy(plan.arguments)
    flat, x = torch.empty(1, dtype=torch.float16), torch.empty(1, 256)
    scratch = torch.empty(plan.scratch, dtype=torch.uint8)
    bind(arguments, plan.offsets, scratch, plan.scratch_parts, x, flat, flat, flat, None, x)
    assert arguments.bias == 0
