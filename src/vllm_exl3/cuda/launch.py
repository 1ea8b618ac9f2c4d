"""Launches the kernels of a plan: by a program of the C++ library where there is one, else by cuda-bindings.

Filling in arguments field by field and describing each launch takes Python longer than the driver takes to launch. So
what a plan, the dtypes and the device determine is laid out once, as an `exl3_program` (csrc/cpu/abi.h), and a call
passes ten numbers to it. CUDA graphs gain nothing; prompts of a length that was not captured do.
"""

import ctypes
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch

from vllm_exl3.cuda import runtime
from vllm_exl3.cuda.binding import ELEMENTS, bind
from vllm_exl3.cuda.compiler import Instance
from vllm_exl3.cuda.declarations import constants
from vllm_exl3.cuda.driver import DriverError
from vllm_exl3.cuda.geometry import LinearPlan
from vllm_exl3.cuda.prefill_arguments import PrefillArgs
from vllm_exl3.cuda.prefill_plan import FINISH, FINISH_SHARED, GemmPlan

__all__ = ["Step", "launch_kernels", "run"]

_FINISH_THREADS = constants("prefill/shape.cuh")["PAIR_THREADS"]

_X, _OUT, _TRELLIS, _SUH, _SVH, _BIAS, _SCRATCH, _COUNTERS, _X_STRIDE, _OUT_STRIDE = range(10)
"""Numbers of a call's values, as ``exl3_launch`` takes them."""

Plan = LinearPlan | GemmPlan


@dataclass(frozen=True, slots=True)
class _Launch:
    instance: Instance
    grid: tuple[int, int]
    threads: int
    shared: int
    cluster: int


@dataclass(eq=False, slots=True)
class Step:
    """One launch of a linear's kernels on some of its rows.

    Attributes:
        rows: of the input and output; None: all.
        plan: the kernels and their arguments.
        finish: the kernel that reduces split tiles, where the plan has one.
    """

    rows: slice | None
    plan: Plan
    finish: Instance = FINISH
    _programs: dict[tuple[object, ...], "_Program"] = field(default_factory=dict)

    def launch(
        self,
        device: runtime.Device,
        x: torch.Tensor,
        trellis: torch.Tensor,
        suh: torch.Tensor,
        svh: torch.Tensor,
        bias: torch.Tensor | None,
        out: torch.Tensor,
    ) -> None:
        """Launch on the current stream; arguments as `vllm_exl3.cuda.linear.linear` has them, all rows."""
        if self.rows is not None:
            x, out = x[self.rows], out[self.rows]
        launcher = device.launcher
        if launcher is None or _clears_counters(self.plan):
            return launch_kernels(device, self.plan, x, trellis, suh, svh, bias, out, self.finish)
        vectors = isinstance(self.plan, GemmPlan) and self.plan.rotation is not None and _in_vectors(x)
        key = (device.index, x.dtype, out.dtype, None if bias is None else bias.dtype, vectors)
        program = self._programs.get(key)
        if program is None:
            kernels = list(_launches(self.plan, vectors, self.finish))
            program = self._programs[key] = _Program(device, self.plan, kernels, x.dtype, out.dtype, bias)
        program.run(launcher, device, x, trellis, suh, svh, bias, out)


def _launches(plan: Plan, vectors: bool, finish: Instance) -> Iterator[_Launch]:
    """The kernels of a plan in their order."""
    if isinstance(plan, LinearPlan):
        if (transform := plan.transform) is not None:
            yield _Launch(transform.instance, transform.grid, transform.threads, transform.shared, 1)
        yield _Launch(plan.instance, plan.grid, plan.threads, plan.shared, plan.cluster)
        return
    ahead = plan.rotation if plan.rotation is not None and vectors else plan.transform
    yield _Launch(ahead.instance, ahead.grid, ahead.threads, ahead.shared, ahead.cluster)
    yield _Launch(plan.instance, (plan.grid, 1), plan.threads, plan.shared, plan.cluster)
    if plan.finish is not None:
        yield _Launch(finish, plan.finish, _FINISH_THREADS, FINISH_SHARED, 1)


def _in_vectors(x: torch.Tensor) -> bool:
    """True where rows are of 16-bit elements in whole vectors of 16 bytes, as prefill/rotate.cu loads them."""
    return x.element_size() == 2 and x.data_ptr() % 16 == 0 and (x.stride(0) | x.shape[1]) % 8 == 0


def _clears_counters(plan: Plan) -> bool:
    """True where counters lie in scratch, and no kernel ahead clears them: torch does so then."""
    return isinstance(plan, LinearPlan) and "counters" in plan.scratch_parts and plan.transform is None


def run(
    steps: tuple[Step, ...],
    device: runtime.Device,
    x: torch.Tensor,
    trellis: torch.Tensor,
    suh: torch.Tensor,
    svh: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """Launch all steps, one after the other."""
    for step in steps:
        step.launch(device, x, trellis, suh, svh, bias, out)


def launch_kernels(
    device: runtime.Device,
    plan: Plan,
    x: torch.Tensor,
    trellis: torch.Tensor,
    suh: torch.Tensor,
    svh: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    finish: Instance = FINISH,
    *,
    fields: Mapping[str, float] | None = None,
) -> None:
    """Launch a plan's kernels without the C++ library.

    Arguments as `Step.launch` has them, of the plan's rows; ``fields``: further fields of the kernels' arguments.
    """
    # Scratch belongs to this call: torch's allocator orders its reuse on this stream, and the kernels touch it only
    # after everything ahead of them has finished. So any number of streams and captured graphs may run at once.
    stream = runtime.current_stream(x.device.index)
    scratch = torch.empty(plan.scratch, dtype=torch.uint8, device=x.device)
    arguments = _arguments_type(plan).from_buffer_copy(plan.arguments)
    if isinstance(plan, LinearPlan) and plan.counters:
        arguments.counters = device.counters(stream, plan.counters)
    elif _clears_counters(plan):
        scratch[plan.scratch_parts["counters"] :].zero_()
    bind(arguments, plan.offsets, scratch, plan.scratch_parts, x, trellis, suh, svh, bias, out)
    for name, value in (fields or {}).items():
        setattr(arguments, name, value)
    for launch in _launches(plan, _in_vectors(x), finish):
        kernel = device.kernel(launch.instance)
        kernel.allow_shared(launch.shared)
        dependent = device.limits.dependent_launch
        kernel.launch(launch.grid, launch.threads, launch.shared, stream, [arguments], dependent, launch.cluster)


def _arguments_type(plan: Plan) -> type[ctypes.Structure]:
    return plan.arguments_type if isinstance(plan, LinearPlan) else PrefillArgs


class _Patch(ctypes.Structure):
    """``exl3_patch``."""

    _fields_ = (("at", ctypes.c_uint32), ("value", ctypes.c_uint32), ("addend", ctypes.c_uint64))


class _Kernel(ctypes.Structure):
    """``exl3_kernel``."""

    _fields_ = (
        ("function", ctypes.c_void_p),
        *((name, ctypes.c_uint32) for name in ("grid_x", "grid_y", "threads", "shared_bytes", "cluster", "dependent")),
    )


class _ProgramStruct(ctypes.Structure):
    """``exl3_program``."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("arguments", "patches", "kernels", "context")),
        *((name, ctypes.c_uint32) for name in ("argument_bytes", "patch_count", "kernel_count", "padding")),
    )


class _Program:
    """A plan with all that does not change from call to call.

    Args:
        device: of the kernels.
        plan: whose arguments they take.
        launches: the kernels in their order.
        x_dtype: of the input.
        out_dtype: of the output.
        bias: of that dtype, or None.
    """

    def __init__(
        self,
        device: runtime.Device,
        plan: Plan,
        launches: list[_Launch],
        x_dtype: torch.dtype,
        out_dtype: torch.dtype,
        bias: torch.Tensor | None,
    ) -> None:
        kind = _arguments_type(plan)
        arguments = kind.from_buffer_copy(plan.arguments)
        arguments.x_type, arguments.out_type = ELEMENTS[x_dtype], ELEMENTS[out_dtype]
        if bias is not None:
            arguments.bias_type = ELEMENTS[bias.dtype]
        self.scratch = plan.scratch
        self.counters = plan.counters if isinstance(plan, LinearPlan) else 0
        self.label = launches[-1].instance.label
        patches = list(_patches(kind, plan, with_bias=bias is not None, with_counters=self.counters > 0))
        kernels = [device.kernel(launch.instance) for launch in launches]
        for kernel, launch in zip(kernels, launches, strict=True):
            kernel.allow_shared(launch.shared)
        dependent = int(device.limits.dependent_launch)
        # All of it stays as long as the program, which points to it.
        self._arguments, self._functions = arguments, kernels
        self._patches = (_Patch * len(patches))(*patches)
        self._kernels = (_Kernel * len(kernels))(
            *(
                (int(kernel.function), *launch.grid, launch.threads, launch.shared, launch.cluster, dependent)
                for kernel, launch in zip(kernels, launches, strict=True)
            )
        )
        self._program = _ProgramStruct(
            ctypes.addressof(arguments), ctypes.addressof(self._patches), ctypes.addressof(self._kernels),
            kernels[0].context_address, ctypes.sizeof(arguments), len(patches), len(kernels), 0,
        )  # fmt: skip
        self._address = ctypes.addressof(self._program)

    def run(
        self,
        launcher: ctypes.CDLL,
        device: runtime.Device,
        x: torch.Tensor,
        trellis: torch.Tensor,
        suh: torch.Tensor,
        svh: torch.Tensor,
        bias: torch.Tensor | None,
        out: torch.Tensor,
    ) -> None:
        """Launch with a call's tensors.

        Raises:
            DriverError: the driver refuses a launch.
        """
        stream = runtime.current_stream(device.index)
        scratch = torch.empty(self.scratch, dtype=torch.uint8, device=x.device)  # see `launch_kernels`
        status = launcher.exl3_launch(
            self._address,
            x.data_ptr(),
            out.data_ptr(),
            trellis.data_ptr(),
            suh.data_ptr(),
            svh.data_ptr(),
            0 if bias is None else bias.data_ptr(),
            scratch.data_ptr(),
            device.counters(stream, self.counters) if self.counters else 0,
            x.stride(0),
            out.stride(0),
            stream,
        )
        if status < 0:  # EXL3_BAD_PROGRAM
            raise DriverError(f"{self.label}: {launcher.exl3_error_text(status).decode()}")
        if status:
            raise DriverError(f"{self.label}: the driver's status is {status}")


def _patches(
    kind: type[ctypes.Structure], plan: Plan, *, with_bias: bool, with_counters: bool
) -> Iterator[tuple[int, int, int]]:
    """(offset in the arguments, number of the call's value, what is added to it) of each field that a call fills in.

    Raises:
        TypeError: a field that is not of eight bytes, which is what the library writes.
    """

    def at(name: str, structure: type[ctypes.Structure] = kind) -> int:
        field = getattr(structure, name)
        if name != "shards" and field.size != 8:
            raise TypeError(f"{structure.__name__}.{name} has {field.size} bytes, expected 8: a launch writes so many")
        return int(field.offset)

    for name, value in (("x", _X), ("out", _OUT), ("x_stride", _X_STRIDE), ("out_stride", _OUT_STRIDE)):
        yield at(name), value, 0
    if with_bias:
        yield at("bias"), _BIAS, 0
    if with_counters:
        yield at("counters"), _COUNTERS, 0
    for name, offset in plan.scratch_parts.items():
        yield at(name), _SCRATCH, offset
    array = {entry[0]: entry[1] for entry in kind._fields_}["shards"]
    shard = array._type_  # type: ignore[attr-defined]
    for index, offsets in enumerate(plan.offsets):
        first = at("shards") + index * ctypes.sizeof(shard)
        for name, value, elements in (
            ("trellis", _TRELLIS, offsets.trellis),
            ("suh", _SUH, offsets.suh),
            ("svh", _SVH, offsets.svh),
        ):
            yield first + at(name, shard), value, 2 * elements
