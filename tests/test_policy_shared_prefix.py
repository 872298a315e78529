"""Packed groups against one row per rollout: numbers, gradients, and when they are not used."""

from typing import Any

import numpy as np
import pytest
import torch

from scoregram.policy.log_probs import (
    group_log_probs,
    is_contiguous,
    pack_groups,
    packed_log_probs,
    packing_saves_work,
    prefix_tree,
    supports_packing,
    token_log_probs,
)
from tests.cases import KeepDouble, build


def batch(
    prompts: list[int], size: int, *, seed: int = 0, alphabet: int = 58
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Groups of `size` rollouts behind prompts of the given lengths: ids, attention mask, completion mask."""
    draw = torch.Generator().manual_seed(seed)
    rows = []
    for length in prompts:
        prompt = torch.randint(2, 60, (length,), generator=draw).tolist()
        for _ in range(size):
            count = int(torch.randint(1, 7, (), generator=draw))
            rows.append((prompt, torch.randint(2, 2 + alphabet, (count,), generator=draw).tolist()))
    width = max(len(prompt) + len(rest) for prompt, rest in rows) + 1
    ids = torch.tensor([[*prompt, *rest, *[0] * (width - len(prompt) - len(rest))] for prompt, rest in rows])
    ends = torch.tensor([[len(prompt), len(prompt) + len(rest)] for prompt, rest in rows])
    place = torch.arange(width)
    return ids, place < ends[:, 1:], (place >= ends[:, :1]) & (place < ends[:, 1:])


@pytest.mark.parametrize("alphabet", [2, 58])
@pytest.mark.parametrize("name", ["Llama", "Qwen3", "GPT2", "GPTNeoX", "Phi"])
def test_numbers_and_gradients_are_those_of_single_rows(name, alphabet):
    model: Any = build(name, model="GPT2LMHeadModel" if name == "GPT2" else "")
    ids, attention, completion = batch([5, 3, 9], 4, alphabet=alphabet)
    together = pack_groups(ids, completion)
    assert together is not None and together.ids.shape[0] == 3
    weights = torch.randn(ids.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    with KeepDouble():
        expected = token_log_probs(model, ids, attention, completion, temperature=0.8)
        plain = torch.autograd.grad((expected * weights).sum(), list(model.parameters()), allow_unused=True)
        found = packed_log_probs(model, together, ids, 0.8)
        shared = torch.autograd.grad((found * weights).sum(), list(model.parameters()), allow_unused=True)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    for one, other in zip(plain, shared, strict=True):
        if one is not None:
            torch.testing.assert_close(other, one, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("alphabet", [2, 60])
def test_every_completion_token_is_predicted_by_its_own_text(alphabet):
    """What a predicting token sees, in order of positions, is the text before the token that it predicts."""
    ids, attention, completion = batch([4, 2, 4], 6, alphabet=alphabet)
    together = pack_groups(ids, completion)
    assert together is not None
    width, visible = together.ids.shape[1], together.visible[:, 0]
    for chosen, place in zip(together.chosen.tolist(), together.places.tolist(), strict=True):
        row, at = divmod(int(together.predictors[chosen]), width)
        seen = visible[row, at].nonzero().squeeze(1)
        rollout, token = divmod(place, ids.shape[1])
        assert together.ids[row, seen].tolist() == ids[rollout, :token].tolist()
        assert together.positions[row, seen].tolist() == list(range(token))
    assert sorted(together.places.tolist()) == completion.flatten().nonzero().squeeze(1).tolist()
    # every beginning of a text is there once, but for whole texts, which predict nothing
    read = {(row // 6, *ids[row, :end].tolist()) for row in range(18) for end in range(1, int(attention[row].sum()))}
    real = (together.positions > 0) | (torch.arange(width) == 0)
    there = [(row, *together.ids[row, visible[row, at]].tolist()) for row, at in real.nonzero().tolist()]
    assert sorted(there) == sorted(read)


def test_padding_sees_itself_alone_and_nobody_sees_it():
    ids, _, completion = batch([4, 2], 3)
    together = pack_groups(ids, completion)
    assert together is not None
    visible, width = together.visible[:, 0], together.ids.shape[1]
    last = torch.arange(width) == width - 1
    padded = [row for row in range(2) if torch.equal(visible[row, -1], last)]
    assert len(padded) == 1  # the two groups differ in length
    assert torch.equal(visible[padded[0], :, -1], last)


def test_rollouts_that_begin_alike_are_read_once():
    prompt, texts = [5, 6, 7], [[9, 9, 8, 2], [9, 9, 3], [9, 9, 8, 2], [4], [9, 9, 8, 4, 4], []]
    tree = prefix_tree(np.array(prompt), [np.array(text, dtype=np.int64) for text in texts])
    assert tree.tokens.tolist() == [5, 6, 7, 9, 9, 8, 4]
    assert [tree.tokens[path].tolist() for path in tree.paths] == [
        [7, 9, 9, 8],
        [7, 9, 9],
        [7, 9, 9, 8],
        [7],
        [7, 9, 9, 8, 4],
        [],
    ]
    assert tree.ends.tolist() == [7] * 7 and tree.positions.tolist() == list(range(7))
    forked = prefix_tree(np.array([7]), [np.array(text) for text in ([1, 2, 9], [1, 3, 9], [1, 2, 8])])
    assert (forked.tokens.tolist(), forked.ends.tolist()) == ([7, 1, 2, 3], [4, 4, 3, 4])


def test_what_cannot_be_packed_goes_row_by_row():
    ids, attention, completion = batch([4, 4, 3], 1)
    assert pack_groups(ids, completion) is None  # no two rollouts share a prompt
    model: Any = build("Llama")
    expected = token_log_probs(model, ids, attention, completion)
    assert torch.equal(group_log_probs(model, ids, attention, completion), expected)
    ids, attention, completion = batch([4], 3)
    left = attention.flip(1)
    assert is_contiguous(attention, completion) and not is_contiguous(left, completion.flip(1))
    assert not is_contiguous(attention, ~completion & attention)  # tokens behind the completion


def test_models_that_would_mix_rollouts_are_found_out():
    assert supports_packing(build("Llama")) and supports_packing(build("Qwen3"))
    mixing: Any = build("Mamba")
    assert not supports_packing(mixing)


def test_long_prompts_are_read_once():
    model: Any = build("Llama")
    ids, attention, completion = batch([20], 4)
    assert supports_packing(model)
    seen = []
    handle = model.get_input_embeddings().register_forward_pre_hook(lambda _, given: seen.append(len(given[0])))
    found = group_log_probs(model, ids, attention, completion)
    handle.remove()
    assert seen == [1]
    torch.testing.assert_close(found, token_log_probs(model, ids, attention, completion), rtol=1e-5, atol=1e-6)


def test_long_completions_behind_a_short_prompt_stay_apart():
    ids = torch.randint(2, 60, (8, 301), generator=torch.Generator().manual_seed(0))
    ids[:, 0], ids[:, 1] = 5, torch.arange(2, 10)  # no two go on alike
    together = pack_groups(ids, torch.arange(301).expand(8, -1) > 0)
    assert together is not None and together.ids.shape == (1, 1 + 8 * 299)  # the last token of each predicts nothing
    assert not packing_saves_work(build("Llama"), ids, together)
