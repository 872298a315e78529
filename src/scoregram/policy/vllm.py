"""Sampling backend `vllm`: vLLM draws the tokens, the policy itself gives their log-probabilities.

An inference engine has its own kernels, so its probabilities differ from the policy's by rounding. Scores are those
of the policy: `log_probs` come from one of its forward passes and `behaviour_log_probs` from the engine. An importance
correction needs exactly these two.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from tempfile import TemporaryDirectory
from typing import Any

import torch

from scoregram.checks import fail
from scoregram.policy.config import SamplingConfig
from scoregram.policy.generation import Completions, assemble_rollouts
from scoregram.policy.log_probs import token_log_probs
from scoregram.policy.models import compute_dtype, evaluating, policy_facts
from scoregram.rollouts import Rollouts


def vllm_engine(
    folder: str, *, dtype: str = "bfloat16", memory: float = 0.3, context: int | None = None, **settings: Any
) -> Any:
    """A vLLM engine in the training process, on the same GPU.

    Args:
        folder: Hub id or folder of the model; `sample_with_vllm` replaces its weights at every call.
        dtype: Dtype in which the engine computes.
        memory: Share of the GPU's memory that the engine may take.
        context: Longest text in tokens; the model's own limit by default.
        settings: Further arguments of `vllm.LLM`.
    """
    vllm = installed_vllm()
    # log-probabilities of the sampling distribution, after temperature, top-k and top-p
    settings = {"logprobs_mode": "processed_logprobs", **settings}
    return vllm.LLM(folder, dtype=dtype, gpu_memory_utilization=memory, max_model_len=context, **settings)


def engine_of(model: Any) -> Any:
    """The engine of a model: built from its config on first use, and kept as long as the model."""
    facts = policy_facts(model)
    if facts.vllm_engine is None:
        _require_plain_weights(model)
        config = deepcopy(model.config)
        config.architectures = [type(model).__name__]
        dtype = str(compute_dtype(next(model.parameters()))).removeprefix("torch.")
        with TemporaryDirectory() as folder, _engine_in_this_process():
            config.save_pretrained(folder)
            # Random weights suffice: every call of `sample_with_vllm` loads the policy's.
            facts.vllm_engine = vllm_engine(folder, dtype=dtype, load_format="dummy", skip_tokenizer_init=True)
    return facts.vllm_engine


@contextmanager
def _engine_in_this_process() -> Iterator[None]:
    """Inside, vLLM starts no process for a new engine: weights are then passed to it by reference."""
    name = "VLLM_ENABLE_V1_MULTIPROCESSING"
    before = os.environ.get(name)
    os.environ[name] = "0"
    try:
        yield
    finally:
        os.environ.pop(name)
        os.environ.update({} if before is None else {name: before})


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
        ScoregramError: If vLLM is missing, or for a model with adapters, whose weights the engine cannot load.
    """
    vllm = installed_vllm()
    _require_plain_weights(model)
    weights = [(name, weight.detach()) for name, weight in model.state_dict().items()]
    engine.apply_model(lambda inner: inner.load_weights(weights))
    engine.reset_prefix_cache()  # its keys and values were computed with the previous weights
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
        seed=None if greedy else int(torch.randint(2**31, (), generator=generator)),
    )
    answers = engine.generate([{"prompt_token_ids": list(ids)} for ids in prompts], settings, use_tqdm=False)
    outputs = [out for answer in answers for out in answer.outputs for _ in range(rollouts_per_prompt if greedy else 1)]
    return _scored_rollouts(model, prompts, outputs, sampling, stop_ids, pad_id)


def _scored_rollouts(
    model: Any,
    prompts: Sequence[Sequence[int]],
    outputs: Sequence[Any],
    sampling: SamplingConfig,
    stop_ids: Sequence[int],
    pad_id: int,
) -> Rollouts:
    """The engine's completions as rollouts, with log-probabilities of the policy and of the engine."""
    device = next(model.parameters()).device
    tokens = torch.zeros(len(outputs), sampling.max_new_tokens, dtype=torch.int64, device=device)
    engine = torch.zeros(tokens.shape, device=device)
    for row, output in enumerate(outputs):
        ids = list(output.token_ids)
        log_probs = [place[token].logprob for place, token in zip(output.logprobs, ids, strict=True)]
        tokens[row, : len(ids)] = torch.tensor(ids, device=device)
        engine[row, : len(ids)] = torch.tensor(log_probs, device=device)
    stops = torch.tensor(sorted(set(stop_ids)), dtype=torch.int64, device=device)
    rollouts = assemble_rollouts(prompts, Completions(tokens, engine, engine), stops, pad_id)
    with evaluating(model):
        masks = rollouts.attention_mask, rollouts.completion_mask
        own = token_log_probs(model, rollouts.input_ids, *masks, temperature=sampling.temperature or 1.0).float()
    behaviour = torch.zeros_like(own) if sampling.temperature == 0 else rollouts.log_probs
    return replace(rollouts, log_probs=own, behaviour_log_probs=behaviour)


def _require_plain_weights(model: Any) -> None:
    if hasattr(model, "get_base_model"):
        remedy = "Merge them, or choose another sampler."
        fail("sample", "sampler vllm needs a model without adapters", type(model).__name__, remedy)


def installed_vllm() -> Any:
    """The package, or an error with the command that installs it."""
    try:
        import vllm  # pyright: ignore[reportMissingImports]
    except ImportError as missing:
        remedy = "Install it: pip install vllm, or choose another sampler."
        fail("sample", "sampler vllm needs vllm", str(missing), remedy)
    return vllm
