"""`results/parameters`: the files are intact and hold no text, every number of the page follows from them."""

import importlib.util
from functools import cache
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from scoregram.gram import Sketch, measure_gram
from scoregram.policy import Policy, PolicyConfig, SamplingConfig, load_policy
from scoregram.rollouts import Rollouts
from scoregram.spectra import orthogonal_null, spectrum_summary
from scoregram.tasks import load_task
from scoregram.training.collect import collect

pytestmark = pytest.mark.slow  # runs in `make test-results`

FOLDER = Path(__file__).parent.parent / "results" / "parameters"


def module(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"parameters_{name}", FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


@cache
def summarise() -> ModuleType:
    return module("summarise")


@cache
def tiny_group() -> tuple[ModuleType, Policy, Rollouts]:
    task = load_task("arithmetic")
    policy = load_policy(PolicyConfig(model="tiny", device="cpu", dtype="float64"), task)
    generator = torch.Generator().manual_seed(0)
    group = collect(policy, task, task.train[:1], group_size=4, sampling=SamplingConfig(12), generator=generator)
    return module("collect"), policy, group


def test_the_only_words_are_names_of_problems():
    words = [array for array in summarise().stored().values() if array.dtype.kind not in "fi"]
    assert len(words) == 1
    assert all(name.startswith("gsm8k/train/") and name.split("/")[2].isdigit() for name in words[0])


def test_parts_add_up_to_all_parameters():
    stored, tolerance = summarise().stored(), {"rtol": 1e-5, "atol": 1e-5 * summarise().stored()["full"].max()}
    kinds = sum(stored[name] for name in ("attention", "mlp", "norms", "embedding"))
    np.testing.assert_allclose(kinds, stored["full"], **tolerance)
    last_norm = stored["full"] - stored["embedding"] - sum(stored[f"block{index:02d}"] for index in range(30))
    assert (np.diagonal(last_norm, axis1=1, axis2=2) > 0).all()


@pytest.mark.parametrize("kind", summarise().ROWS)
def test_grams_are_symmetric_and_positive(kind):
    grams = summarise().grams(kind)
    np.testing.assert_allclose(grams, grams.transpose(0, 2, 1), atol=1e-6 * np.abs(grams).max())
    lowest, trace = np.linalg.eigvalsh(grams)[:, 0], np.trace(grams, axis1=1, axis2=2)
    assert (lowest > -1e-5 * trace).all()


@pytest.mark.parametrize("kind", ["full", "head", "sketch0064"])
def test_rank_and_null_are_those_of_the_library(kind):
    rewards, grams = summarise().stored()["rewards"], summarise().grams(kind)
    for place in np.flatnonzero(summarise().is_live(rewards)):
        given = torch.tensor(grams[place]), torch.tensor(rewards[place] - rewards[place].mean())
        rank, null = summarise().rank_and_null(grams[place], rewards[place])
        assert rank == pytest.approx(spectrum_summary(*given).effective_rank, rel=1e-3)
        assert null == pytest.approx(orthogonal_null(*given).effective_rank, rel=1e-9)


def test_noise_is_the_squared_standard_error_of_the_leave_one_out_terms():
    draw = np.random.default_rng(0)
    scores, rewards = draw.normal(size=(3, 6, 20)), draw.integers(2, size=(3, 6)).astype(float)
    expected = []
    for rows, reward in zip(scores, rewards, strict=True):
        terms = np.array([(reward[i] - np.delete(reward, i).mean()) * rows[i] for i in range(6)])
        expected.append(terms.var(axis=0, ddof=1).sum() / 6)
    grams = scores @ scores.transpose(0, 2, 1)
    np.testing.assert_allclose(summarise().noise(grams, rewards), expected, rtol=1e-12)


def test_tied_ranks_are_shared():
    np.testing.assert_array_equal(summarise().ranks_of(np.array([3.0, 1.0, 3.0, 2.0])), [2.5, 0.0, 2.5, 1.0])


def test_halves_are_the_blocks_on_the_diagonal():
    grams = np.arange(2 * 256).reshape(2, 16, 16)
    np.testing.assert_array_equal(summarise().halves(grams)[3], grams[1, 8:, 8:])
    np.testing.assert_array_equal(summarise().halves(grams[0])[3], grams[0, 1, 8:])


def test_the_grams_of_the_head_are_those_of_its_own_gradient():
    collecting, policy, group = tiny_group()
    weight = policy.model.get_output_embeddings().weight.detach()
    scores = {"head": [], "logits": []}
    for ids, completion, attention in zip(group.input_ids, group.completion_mask, group.attention_mask, strict=True):
        length = int(attention.sum())
        hidden = policy.model.get_decoder()(input_ids=ids[None, :length]).last_hidden_state[0].detach()
        head, bias = weight.clone().requires_grad_(), torch.zeros(len(weight), dtype=hidden.dtype, requires_grad=True)
        log_probs = (hidden @ head.T + bias).log_softmax(-1)
        total = torch.stack([log_probs[t - 1, ids[t]] for t in range(1, length) if completion[t]]).sum()
        for name, gradient in zip(scores, torch.autograd.grad(total, (head, bias)), strict=True):
            scores[name].append(gradient.flatten())
    found = collecting.head_grams(policy.model, group)
    for name, rows in scores.items():
        expected = torch.stack(rows) @ torch.stack(rows).T
        np.testing.assert_allclose(found[name], expected.numpy(), rtol=1e-10, atol=1e-10)


def test_a_folded_sketch_is_the_sketch_of_that_length():
    collecting, policy, group = tiny_group()
    long = measure_gram(policy.model, group, sketch=Sketch(features=1024)).sketch
    short = measure_gram(policy.model, group, sketch=Sketch(features=64)).sketch
    assert long is not None and short is not None
    expected = short.double() @ short.double().T
    np.testing.assert_allclose(collecting.folded_grams(long)["sketch0064"], expected.numpy(), rtol=1e-4, atol=1e-4)


def test_every_table_of_the_page_follows_from_the_files():
    text = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert summarise().filled(text) == text, "run python results/parameters/summarise.py --write"
