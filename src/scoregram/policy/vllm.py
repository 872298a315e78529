"""vLLM as the one that draws, where it is installed; the policy itself says how probable its tokens are.

An inference engine has kernels of its own, and its probabilities differ from the policy's by their rounding. Scores are
taken of the policy, so `log_probs` come from a forward pass of it, and `behaviour_log_probs` from the engine: the two
are what a correction by importance weights needs.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from scoregram.checks import fail
from scoregram.policy.bias import warn_of_bias
from scoregram.policy.config import SamplingConfig
from scoregram.policy.log_probs import token_log_probs
from scoregram.policy.modes import evaluating
from scoregram.policy.record import Completions, assembled
from scoregram.policy.sampler import refuse_request
from scoregram.rollouts import Rollouts


def vllm_engine(folder: str, *, dtype: str = "bfloat16", memory: float = 0.3, context: int | None = None) -> Any:
    """A vLLM engine beside the training process, on the same GPU.

    Args:
        folder: Hub id or folder of the model; its weights are replaced at every call of `sample_with_vllm`.
        dtype: In which the engine computes.
        memory: Share of the GPU's memory that the engine may take.
        context: Longest text; the model's own limit by default.
    """
    vllm = installed()
    # the distribution that tokens are really drawn from, after temperature, top-k and top-p
    probabilities = {"logprobs_mode": "processed_logprobs"}
    return vllm.LLM(folder, dtype=dtype, gpu_memory_utilization=memory, max_model_len=context, **probabilities)


def sample_with_vllm(
    engine: Any,
    model: Any,
    prompts: Sequence[Sequence[int]],
    *,
    rollouts_per_prompt: int,
    sampling: SamplingConfig,
    stop_ids: Sequence[int],
    pad_id: int,
    generator: torch.Generator | None = None,
) -> Rollouts:
    """As `sample`, drawn by the engine from the weights that `model` has now.

    One number of `generator` seeds the engine, whose tokens need not be the same on another machine.

    Raises:
        ScoregramError: If vLLM is missing, or for a model with adapters, whose weights the engine does not know.
    """
    vllm = installed()
    if hasattr(model, "get_base_model"):
        fail("sample_with_vllm", "needs a model without adapters", type(model).__name__, "Merge them, or use sample.")
    refuse_request(model, prompts, rollouts_per_prompt, sampling)
    warn_of_bias(sampling)
    weights = [(name, weight.detach()) for name, weight in model.state_dict().items()]
    engine.apply_model(lambda inner: inner.load_weights(weights))
    engine.reset_prefix_cache()  # what it holds was computed with other weights
    greedy = sampling.temperature == 0
    settings = vllm.SamplingParams(
        n=1 if greedy else rollouts_per_prompt,
        max_tokens=sampling.max_new_tokens,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        stop_token_ids=sorted(set(stop_ids)),
        ignore_eos=True,
        logprobs=0,
        detokenize=False,
        seed=int(torch.randint(2**31, (), generator=generator)),
    )
    answers = engine.generate([{"prompt_token_ids": list(ids)} for ids in prompts], settings, use_tqdm=False)
    outputs = [out for answer in answers for out in answer.outputs for _ in range(rollouts_per_prompt if greedy else 1)]
    return scored(model, prompts, outputs, sampling, stop_ids, pad_id)


def scored(
    model: Any,
    prompts: Sequence[Sequence[int]],
    outputs: Sequence[Any],
    sampling: SamplingConfig,
    stop_ids: Sequence[int],
    pad_id: int,
) -> Rollouts:
    """Rollouts of what the engine drew, with the probabilities of the policy beside the engine's own."""
    device = next(model.parameters()).device
    tokens = torch.zeros(len(outputs), sampling.max_new_tokens, dtype=torch.int64, device=device)
    engine = torch.zeros(tokens.shape, device=device)
    for row, output in enumerate(outputs):
        ids = list(output.token_ids)
        chances = [place[token].logprob for place, token in zip(output.logprobs, ids, strict=True)]
        tokens[row, : len(ids)] = torch.tensor(ids, device=device)
        engine[row, : len(ids)] = torch.tensor(chances, device=device)
    stops = torch.tensor(sorted(set(stop_ids)), dtype=torch.int64, device=device)
    found = assembled(prompts, Completions(tokens, engine, engine), stops, pad_id)
    with evaluating(model):
        where = found.input_ids, found.attention_mask, found.completion_mask
        own = token_log_probs(model, *where, temperature=sampling.temperature or 1.0).float()
    behaviour = torch.zeros_like(own) if sampling.temperature == 0 else found.log_probs
    return replace(found, log_probs=own, behaviour_log_probs=behaviour)


def installed() -> Any:
    """The package, or an error that says how to get it."""
    try:
        import vllm  # pyright: ignore[reportMissingImports]
    except ImportError as missing:
        fail("sample_with_vllm", "needs vllm", str(missing), "Install it: pip install vllm, or use sample.")
    return vllm
