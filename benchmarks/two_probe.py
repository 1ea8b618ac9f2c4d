"""What ``gpu_two.py`` asks of each rank of an engine, as vLLM's ``worker_extension_cls``."""

from typing import Any

import numpy as np
import torch

from benchmarks.engine_start import leave_out_top_k
from vllm_exl3.ops import backends

__all__ = ["Probe"]

leave_out_top_k()


class Probe:
    """Methods that every worker gets; each is called on all ranks and answers for its own."""

    def probe_record(self) -> None:
        """Keep from now on what the model's ``compute_logits`` returns."""
        model = self.model_runner.model  # type: ignore[attr-defined]
        kept = self.probed_logits = []
        backends.reset_calls()
        original = model.compute_logits

        def record(hidden_states: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor | None:
            logits = original(hidden_states, *arguments, **options)
            if logits is not None:
                kept.append(logits.detach().float().cpu().numpy())
            return logits

        self.probed_model, self.probed_original = model, original
        model.compute_logits = record

    def probe_logits(self, length: int) -> np.ndarray | None:
        """Stop recording: logits ``[length, vocabulary]`` of the one prompt since, None on a rank that has none."""
        self.probed_model.compute_logits = self.probed_original
        parts = self.probed_logits
        prompt = [part for part in parts if part.shape[0] >= length - 1]
        sampled = [part for part in parts if part.shape[0] == 1]
        if not prompt or not sampled:
            return None
        # the last position comes on its own, to be sampled from; then the others, for prompt_logprobs
        return np.concatenate([prompt[0][: length - 1], sampled[0]])

    def probe_profile(self, begin: bool) -> dict[str, float]:
        """Begin to record kernels, or stop: this rank's microseconds of the GPU by kernel."""
        if begin:
            self.probed_profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
            self.probed_profile.start()
            return {}
        torch.cuda.synchronize()
        self.probed_profile.stop()
        return {event.key: event.self_device_time_total for event in self.probed_profile.key_averages()}

    def probe_state(self) -> dict[str, Any]:
        """This rank's memory in bytes and which backend served which op how often."""
        model = self.model_runner.model  # type: ignore[attr-defined]
        parameters = {parameter.data_ptr(): parameter.nbytes for parameter in model.parameters()}
        device = next(model.parameters()).device
        return {
            "device": str(device),
            "weight_bytes": sum(parameters.values()),
            "allocated_bytes": torch.cuda.memory_allocated(device) if device.type == "cuda" else 0,
            "peak_bytes": torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0,
            "calls": {f"{op} {backend}": count for (op, backend, _), count in backends.calls().items()},
        }
