"""How far the served pack's next-token distributions are from the 16-bit model's, as a KL divergence.

The 16-bit model is evaluated here with transformers; the pack's numbers come from the running server,
through the same kernels that answer its users.
"""

import json
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm_exl3.demo.smollm2 import DenseModel

__all__ = ["dense_log_probabilities", "kl_divergence", "served_log_probabilities"]


def dense_log_probabilities(model: DenseModel, ids: Sequence[int]) -> npt.NDArray[np.float32]:
    """The 16-bit model's log probabilities after each token, ``[len(ids), vocab]``.

    Weights are rounded to float16, as the pack's dense tensors are; the arithmetic is float32.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = {key: value for key, value in model.config.items() if key not in ("architectures", "torch_dtype")}
    with torch.device("meta"):
        dense = LlamaForCausalLM(LlamaConfig(**config))
    state = {name: torch.from_numpy(weight.astype(np.float16)).float() for name, weight in model.tensors.items()}
    dense.load_state_dict(state, strict=False, assign=True)
    dense.tie_weights()
    # the rotary frequencies are no part of the state, and were made on the meta device
    dense.model.rotary_emb = type(dense.model.rotary_emb)(dense.config)
    with torch.inference_mode():
        logits = dense.eval()(torch.tensor([list(ids)])).logits[0].float()
        return np.asarray(torch.log_softmax(logits, -1).numpy(), np.float32)


def served_log_probabilities(url: str, model: str, ids: Sequence[int], top: int) -> list[dict[int, float]]:
    """The server's log probabilities of the ``top`` likeliest tokens after each token but the last.

    Args:
        url: the server's base address.
        model: the name it serves the pack under.
        ids: the prompt.
        top: how many tokens a position; the server's ``--max-logprobs`` allows as many.
    """
    body = {"model": model, "prompt": list(ids), "max_tokens": 1, "temperature": 0, "prompt_logprobs": top}
    request = urllib.request.Request(  # noqa: S310  of the demo's own server
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=300) as answer:  # noqa: S310
        positions: list[dict[str, dict[str, Any]]] = json.load(answer)["choices"][0]["prompt_logprobs"][1:]
    return [{int(token): entry["logprob"] for token, entry in position.items()} for position in positions]


def kl_divergence(reference: npt.NDArray[np.float32], served: Sequence[Mapping[int, float]]) -> float:
    """Mean over positions of KL(reference ‖ served), in nats per token.

    Tokens that ``served`` does not list are counted as one event of the remaining probability. That can only
    lower the divergence: on the demo's pack by 0.7 % with 4,000 of the 49,152 tokens listed.

    Args:
        reference: log probabilities ``[positions, vocab]``.
        served: for each position, token → log probability.

    Raises:
        ValueError: the two differ in their number of positions.
    """
    if len(reference) != len(served):
        raise ValueError(f"found {len(served)} served positions, expected {len(reference)}")
    return float(np.mean([_position(row, listed) for row, listed in zip(reference, served, strict=True)]))


def _position(reference: npt.NDArray[np.float32], served: Mapping[int, float]) -> float:
    tokens = np.fromiter(served, np.int64, len(served))
    q_log = np.fromiter(served.values(), np.float64, len(served))
    p_all = np.exp(reference.astype(np.float64))
    p_all /= p_all.sum()
    p = p_all[tokens]
    listed = float(np.sum(p * (np.log(np.maximum(p, 1e-300)) - q_log)))
    p_rest = max(1.0 - float(p.sum()), 0.0)
    if p_rest < 1e-12:
        return listed
    q_rest = max(1.0 - float(np.exp(q_log).sum()), 1e-12)
    return listed + p_rest * float(np.log(p_rest / q_rest))
