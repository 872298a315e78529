"""The sampler against a plain loop: no cache, one row at a time, a whole forward pass for every token."""

import math
from collections import Counter
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

from scoregram.checks import ScoregramError
from scoregram.policy import SamplingConfig, generation, sample, sampler, token_log_probs
from scoregram.policy.decoders import ModelCacheDecoder, SharedCacheDecoder, UncachedDecoder
from scoregram.policy.draw import draw_tokens, uniform_numbers
from scoregram.policy.fused_decoders import FusedDecoder
from scoregram.policy.generation import CompletionRecord, assemble_rollouts, replay_steps
from scoregram.policy.models import PolicyWarning
from scoregram.rollouts import Rollouts
from tests.cases import ARCHITECTURES, VOCABULARY, build

PROMPTS = [[5, 9, 11], [7], [3, 4, 5, 6, 7, 8, 9], [12, 13, 14]]
STOP = 17


def greedy_loop(model, prompt: list[int], most: int, stop_ids: list[int]) -> list[int]:
    """The most probable token, again and again."""
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(most):
            ids.append(int(model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
            if ids[-1] in stop_ids:
                break
    return ids[len(prompt) :]


def greedy(model, prompts=PROMPTS, *, most: int = 12, stop_ids=(STOP,), repeats: int = 2) -> Rollouts:
    settings = SamplingConfig(most, temperature=0.0)
    return sample(model, prompts, rollouts_per_prompt=repeats, sampling=settings, stop_ids=stop_ids, pad_id=0)


def drawn(model, prompts=PROMPTS, *, most=8, stop_ids=(STOP,), repeats=2, seed=0, **settings) -> Rollouts:
    return sample(
        model,
        prompts,
        rollouts_per_prompt=repeats,
        sampling=SamplingConfig(most, **settings),
        stop_ids=stop_ids,
        pad_id=0,
        generator=torch.Generator().manual_seed(seed),
    )


def adapted():
    import peft

    torch.manual_seed(3)
    config = peft.LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)
    return peft.get_peft_model(build("Llama"), config)


DECODERS = {
    "llama": (lambda: build("Llama"), FusedDecoder),
    "llama-single": (lambda: build("Llama").float(), FusedDecoder),
    "llama-bias-tied": (
        lambda: build("Llama", attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
        FusedDecoder,
    ),
    "qwen2": (lambda: build("Qwen2"), FusedDecoder),
    "qwen3": (ARCHITECTURES["qwen3"], FusedDecoder),
    "mistral-window": (lambda: build("Mistral", sliding_window=16, head_dim=8), ModelCacheDecoder),
    "gpt2": (ARCHITECTURES["gpt2"], SharedCacheDecoder),
    "gpt-neox": (ARCHITECTURES["gpt-neox"], SharedCacheDecoder),
    "gemma3-wide": (ARCHITECTURES["gemma3"], SharedCacheDecoder),
    "gemma3-window": (
        lambda: build("Gemma3", config="Gemma3TextConfig", head_dim=8, sliding_window=5, sliding_window_pattern=2),
        ModelCacheDecoder,
    ),
    "gemma2": (lambda: ARCHITECTURES["gemma2"]().float(), SharedCacheDecoder),
    "gemma2-double": (
        ARCHITECTURES["gemma2"],
        ModelCacheDecoder,
    ),  # its padded rows are nan in float64, which the trial notices
    "gpt-oss": (ARCHITECTURES["gpt-oss"], SharedCacheDecoder),
    "opt": (ARCHITECTURES["opt"], SharedCacheDecoder),
    "bloom": (ARCHITECTURES["bloom"], ModelCacheDecoder),
    "qwen3-moe": (ARCHITECTURES["qwen3-moe"], SharedCacheDecoder),
    "mamba": (ARCHITECTURES["mamba"], ModelCacheDecoder),
    "nemotron-h": (ARCHITECTURES["nemotron-h"], ModelCacheDecoder),
    "lora": (adapted, SharedCacheDecoder),
}


@pytest.mark.parametrize("name", DECODERS)
def test_greedy_is_the_plain_loop_token_for_token(name):
    make, decoder = DECODERS[name]
    model = make()
    with pytest.warns(PolicyWarning) if name == "gemma2-double" else nullcontext():
        found = greedy(model)
    for row, ids in enumerate(found.completion_ids()):
        assert ids == greedy_loop(model, PROMPTS[row // 2], 12, [STOP])
    with torch.no_grad():
        capacity = max(map(len, PROMPTS)) + 12
        assert sampler.fastest_decoder(model, capacity) is decoder


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3-window", "mamba", "lora"])
def test_log_probs_are_those_of_one_forward_pass(name):
    model = DECODERS[name][0]()
    found = drawn(model, seed=1)
    again = token_log_probs(model, found.input_ids, found.attention_mask, found.completion_mask)
    torch.testing.assert_close(found.log_probs, again.detach().float(), atol=1e-5, rtol=0)
    assert found.behaviour_log_probs is found.log_probs


@pytest.mark.parametrize("decoder", [SharedCacheDecoder, ModelCacheDecoder, UncachedDecoder])
def test_every_decoder_draws_the_same(decoder, monkeypatch):
    model = build("Llama")
    expected = drawn(model, most=12)
    monkeypatch.setattr(sampler, "fastest_decoder", lambda *_: decoder)
    found = drawn(model, most=12)
    assert found.completion_ids() == expected.completion_ids()
    torch.testing.assert_close(found.log_probs, expected.log_probs)


@pytest.mark.parametrize("family", ["Llama", "Qwen3"])
def test_a_captured_step_is_the_step(family, monkeypatch):
    """The path of a GPU, with every replay computed: columns by tensor, masks of growing width."""
    model, count, most = build(family, head_dim=8), 8, 20
    settings = SamplingConfig(most)
    stops = torch.tensor([STOP])
    uniforms = uniform_numbers(most, count, generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr(torch, "empty", torch.zeros)  # as on a GPU, where columns are read before they are written
    for decoder in (SharedCacheDecoder, FusedDecoder):
        record = CompletionRecord(count, most, stops, has_behaviour=False)
        run = decoder(model, max(map(len, PROMPTS)) + most)
        with torch.no_grad():
            first = draw_tokens(run.start(PROMPTS, 2), uniforms[0], settings)
            record.write(first)
            with run.decoding():
                replay_steps(
                    run, first.token, record, uniforms, settings, capture=lambda step: [step(), step][1], columns=5
                )
        found = assemble_rollouts(PROMPTS, record.finish(), stops, 0)
        expected = drawn(model, most=most)
        assert run.cache.visible == 30 > run.use_column_tensor()  # 27 columns, in steps of five
        assert found.completion_ids() == expected.completion_ids()
        torch.testing.assert_close(found.log_probs, expected.log_probs)


def test_rows_are_prompt_completion_padding():
    found = drawn(build("Llama"), most=6)
    assert found.input_ids.shape == found.attention_mask.shape == found.completion_mask.shape
    assert found.input_ids.shape[1] == int((found.prompt_lengths + found.lengths).max())
    for row, ids in enumerate(found.input_ids.tolist()):
        prompt, length = PROMPTS[row // 2], int(found.lengths[row])
        end = len(prompt) + length
        assert ids[: len(prompt)] == prompt and found.prompt_lengths[row] == len(prompt)
        assert found.attention_mask[row].tolist() == [column < end for column in range(len(ids))]
        assert found.completion_mask[row].tolist() == [len(prompt) <= column < end for column in range(len(ids))]
        assert ids[end:] == [0] * (len(ids) - end)
        assert found.log_probs is not None
        assert (found.log_probs[row] == 0).tolist() == (~found.completion_mask[row]).tolist()


def test_a_rollout_ends_with_its_first_stop_token():
    """Every token stops half of the time: many rows leave the batch, at many lengths."""
    stop_ids = list(range(0, VOCABULARY, 6))
    found = drawn(build("Llama"), most=24, stop_ids=stop_ids, repeats=16)
    assert len({int(length) for length in found.lengths}) > 5
    assert found.finished is not None
    for ids, finished in zip(found.completion_ids(), found.finished.tolist(), strict=True):
        assert not set(ids[:-1]) & set(stop_ids)
        assert finished == (ids[-1] in stop_ids)
        assert finished or len(ids) == 24


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3-window", "mamba"])
def test_dropping_rows_changes_nothing(name, monkeypatch):
    model, stop_ids = DECODERS[name][0](), list(range(0, VOCABULARY, 5))
    dropped = []
    keep = CompletionRecord.keep
    monkeypatch.setattr(
        CompletionRecord, "keep", lambda self, places: (dropped.append(len(places)), keep(self, places))
    )
    found = drawn(model, most=20, stop_ids=stop_ids, repeats=6)
    assert dropped
    monkeypatch.setattr(generation, "DROP_SHARE", 2.0)
    whole = drawn(model, most=20, stop_ids=stop_ids, repeats=6)
    assert found.completion_ids() == whole.completion_ids()
    torch.testing.assert_close(found.log_probs, whole.log_probs)
    alone = [drawn_alone(model, row, most=20, stop_ids=stop_ids, repeats=6) for row in range(len(PROMPTS))]
    assert [ids for part in alone for ids in part] == found.completion_ids()


def drawn_alone(model, index: int, *, most: int, stop_ids: list[int], repeats: int) -> list[list[int]]:
    """The rollouts of one prompt by a plain loop that reads the same uniform numbers."""
    generator = torch.Generator().manual_seed(0)
    uniforms = torch.rand(most, repeats * len(PROMPTS), dtype=torch.float64, generator=generator)
    out = []
    for row in range(repeats):
        ids = list(PROMPTS[index])
        for step in range(most):
            with torch.no_grad():
                chances = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].double().softmax(0)
            ids.append(int((chances.cumsum(0) <= uniforms[step, index * repeats + row]).sum()))
            if ids[-1] in stop_ids:
                break
        out.append(ids[len(PROMPTS[index]) :])
    return out


def test_a_completion_goes_on_from_its_own_prefix():
    """Greedy from the middle of a greedy completion gives the rest of it."""
    model = build("Llama")
    whole = greedy(model, [PROMPTS[2]], repeats=1).completion_ids()[0]
    for cut in (1, 4, 9):
        rest = greedy(model, [PROMPTS[2] + whole[:cut]], repeats=1, most=12 - cut).completion_ids()[0]
        assert rest == whole[cut:]


SETTINGS = [
    {},
    {"temperature": 0.5},
    {"temperature": 2.0, "top_k": 3},
    {"top_p": 0.7},
]


@pytest.mark.filterwarnings("ignore::scoregram.policy.BiasedSamplingWarning")
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_completions_come_as_often_as_they_are_probable(name, settings):
    """All completions of up to three tokens of a six-token vocabulary, listed with their exact probabilities."""
    torch.manual_seed(0)
    sizes = {"n_embd": 32, "n_layer": 1, "n_head": 4, "n_positions": 64}
    model = {
        "llama": lambda: build("Llama", vocab_size=6, num_hidden_layers=1),
        "gpt2": lambda: build("GPT2", model="GPT2LMHeadModel", config="", vocab_size=6, **sizes),
    }[name]()
    prompts, count = [[1, 3], [4, 2, 5, 1]], 1500
    found = drawn(model, prompts, most=3, stop_ids=[0, 2], repeats=count, **settings)
    exact = [completion_chances(model, prompt, most=3, stop_ids={0, 2}, **settings) for prompt in prompts]
    ids = found.completion_ids()
    assert found.behaviour_log_probs is not None
    behaviour = found.behaviour_log_probs.double().sum(1).exp().tolist()
    for index, chances in enumerate(exact):
        assert math.isclose(sum(chances.values()), 1, rel_tol=1e-9)
        rows = range(index * count, (index + 1) * count)
        counts = Counter(tuple(ids[row]) for row in rows)
        assert set(counts) <= set(chances)
        assert all(math.isclose(behaviour[row], chances[tuple(ids[row])], rel_tol=1e-4) for row in rows)
        likely = {text: chance for text, chance in chances.items() if chance * count >= 5}
        rare = 1 - sum(likely.values())
        statistic = sum((counts[text] - count * chance) ** 2 / (count * chance) for text, chance in likely.items())
        if rare * count >= 5:
            others = count - sum(counts[text] for text in likely)
            statistic += (others - count * rare) ** 2 / (count * rare)
        freedom = len(likely) - (rare * count < 5)
        assert statistic < freedom + 4 * math.sqrt(2 * freedom)  # mean and deviation of a chi-square


def completion_chances(
    model, prompt: list[int], *, most: int, stop_ids: set[int], temperature=1.0, top_k=0, top_p=1.0
) -> dict[tuple[int, ...], float]:
    """Every completion with its probability, by the chain rule over plain forward passes."""
    chances: dict[tuple[int, ...], float] = {}
    open_texts: dict[tuple[int, ...], float] = {(): 1.0}
    for step in range(most):
        grown: dict[tuple[int, ...], float] = {}
        for text, chance in open_texts.items():
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([prompt + list(text)]), use_cache=False).logits[0, -1]
            for token, share in enumerate(naive_distribution(logits.double() / temperature, top_k, top_p)):
                ended = token in stop_ids or step == most - 1
                if share > 0:
                    (chances if ended else grown)[(*text, token)] = chance * share
        open_texts = grown
    return chances


def naive_distribution(scores: Tensor, top_k: int, top_p: float) -> list[float]:
    """Top-k, then top-p, by sorting a list."""
    weights = dict(enumerate(scores.softmax(0).tolist()))
    ranked = sorted(weights, key=lambda token: (-weights[token], token))
    if top_k:
        least = weights[ranked[min(top_k, len(ranked)) - 1]]
        ranked = [token for token in ranked if weights[token] >= least]
    mass = sum(weights[token] for token in ranked)
    kept, so_far = [], 0.0
    for token in ranked:
        if so_far < top_p * mass:
            kept.append(token)
        so_far += weights[token]
    total = sum(weights[token] for token in kept)
    return [weights[token] / total if token in kept else 0.0 for token in weights]


def test_the_same_seed_draws_the_same_and_another_does_not():
    model = build("Llama")
    first, again, other = drawn(model, seed=4), drawn(model, seed=4), drawn(model, seed=5)
    assert first.completion_ids() == again.completion_ids() != other.completion_ids()
    assert first.log_probs is not None and again.log_probs is not None
    assert torch.equal(first.log_probs, again.log_probs)
    state = torch.random.get_rng_state()
    drawn(model, seed=4)
    assert torch.equal(state, torch.random.get_rng_state())


def test_rollouts_of_one_prompt_differ():
    ids = drawn(build("Llama"), [[5, 6]], repeats=8).completion_ids()
    assert len(set(map(tuple, ids))) == 8


@pytest.mark.parametrize("name", ["llama", "gpt2", "mamba", "lora"])
@pytest.mark.parametrize("fails", [False, True])
def test_the_model_is_left_as_it_was(name, fails, monkeypatch):
    model = DECODERS[name][0]()
    model.train()
    frozen = next(module for module in model.modules() if not list(module.children()))
    frozen.eval()  # a mixed state must come back as it was
    modes = [module.training for module in model.modules()]
    wants = [parameter.requires_grad for parameter in model.parameters()]
    weights = [parameter.detach().clone() for parameter in model.parameters()]
    config = model.config.to_dict()
    attention = model.config._attn_implementation
    if fails:
        monkeypatch.setattr(generation, "draw_tokens", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            drawn(model)
    else:
        found = drawn(model)
        tensors = [value for value in vars(found).values() if isinstance(value, Tensor)]
        assert not any(value.requires_grad or value.is_inference() for value in tensors)
    assert [module.training for module in model.modules()] == modes
    assert [parameter.requires_grad for parameter in model.parameters()] == wants
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(a, b) for a, b in zip(weights, model.parameters(), strict=True))
    assert model.config.to_dict() == config and model.config._attn_implementation == attention
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert torch.is_grad_enabled()


def test_a_model_in_training_mode_draws_as_in_evaluation():
    model = build("Llama", attention_dropout=0.5)
    expected = greedy(model).completion_ids()
    model.train()
    assert greedy(model).completion_ids() == expected


def test_weights_of_this_moment_are_used():
    model = build("Llama")
    before = drawn(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    after = drawn(model)
    again = token_log_probs(model, after.input_ids, after.attention_mask, after.completion_mask)
    torch.testing.assert_close(after.log_probs, again.detach().float(), atol=1e-5, rtol=0)
    assert before.log_probs is not None and after.log_probs is not None
    assert before.log_probs[0, 3] != after.log_probs[0, 3]


def test_a_hook_on_the_model_is_not_bypassed():
    model = build("Llama")
    greedy(model)  # the decoder is chosen
    handle = model.model.layers[0].mlp.register_forward_hook(lambda *given: given[2] * 0)
    try:
        assert greedy(model).completion_ids() == [
            greedy_loop(model, prompt, 12, [STOP]) for prompt in PROMPTS for _ in range(2)
        ]
    finally:
        handle.remove()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_and_half_precision(dtype):
    model = build("Llama").float()
    with torch.autocast("cpu", dtype):
        found = drawn(model, seed=2)
        again = token_log_probs(model, found.input_ids, found.attention_mask, found.completion_mask)
    torch.testing.assert_close(found.log_probs, again.detach(), atol=0.05, rtol=0)
    found = drawn(model.to(dtype), seed=2)
    again = token_log_probs(model, found.input_ids, found.attention_mask, found.completion_mask)
    assert found.log_probs is not None
    assert found.log_probs.dtype == torch.float32
    torch.testing.assert_close(found.log_probs, again.detach(), atol=0.05, rtol=0)


def refused(match: str, **changes) -> None:
    request = {"prompts": PROMPTS, "most": 4, "repeats": 1} | changes
    model = build("Llama")
    model.forward = lambda *_, **__: pytest.fail("work was done before the request was looked at")
    with pytest.raises(ScoregramError, match=match):
        drawn(model, request.pop("prompts"), **request)


def test_requests_that_cannot_be_served():
    refused("a prompt must not be empty, got no token in prompt 1", prompts=[[1], []])
    refused("at least one prompt", prompts=[])
    refused("rollouts_per_prompt must be at least 1, got 0", repeats=0)
    refused(r"must fit into the model's 64 positions, got 7 \+ 60 tokens at prompt 2", most=60)
    refused(r"must fit into the model's 64 positions, got 65 \+ 4", prompts=[[1] * 65])
    refused(rf"must lie in \[0, {VOCABULARY - 1}\], got {VOCABULARY} in prompt 0", prompts=[[VOCABULARY]])
    refused(r"got -1 in prompt 0", prompts=[[-1, 3]])


def test_the_context_may_be_used_up():
    assert greedy(build("Llama"), [[1] * 60], most=4, stop_ids=(), repeats=1).input_ids.shape == (1, 64)


def test_logits_that_are_not_numbers_are_named():
    model = build("Llama")
    model.lm_head.weight.data[3] = torch.nan
    with pytest.raises(ScoregramError, match="must be finite, got nan at rollout 0, token 0"):
        drawn(model)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1, got 0"),
        ({"temperature": -1.0}, "temperature must be 0 or more"),
        ({"temperature": math.nan}, "temperature must be 0 or more"),
        ({"top_k": -1}, "top_k"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
    ],
)
def test_settings_without_meaning(settings, match):
    with pytest.raises(ScoregramError, match=match):
        SamplingConfig(**({"max_new_tokens": 4} | settings))
