"""Which way of decoding a model goes: found by comparing logits, with what rounding explains allowed for."""

import math
from contextlib import nullcontext
from itertools import pairwise

import pytest
import torch

from scoregram.policy import choice as choice_of_way
from scoregram.policy.fused import Fused
from scoregram.policy.modes import PolicyWarning
from scoregram.policy.ways import Grown, Shared
from tests.cases import ARCHITECTURES, build


@pytest.mark.parametrize("fault", ["none", "raises", "differs"])
def test_a_trial_that_fails_sends_the_model_another_way(fault, monkeypatch):
    model, right = build("Llama"), Fused.logits
    if fault == "raises":
        monkeypatch.setattr(Fused, "logits", lambda *_: (_ for _ in ()).throw(RuntimeError("no")))
    if fault == "differs":
        monkeypatch.setattr(Fused, "logits", lambda self, *given: right(self, *given) * 1.01)
    said = {
        "raises": "its own is used, which is slower .no finite logits",
        "differs": "off by [0-9,.]+ times what rounding",
    }
    with torch.no_grad(), pytest.warns(PolicyWarning, match=said[fault]) if fault in said else nullcontext():
        assert choice_of_way.fastest_way(model, 20) is (Fused if fault == "none" else Shared)


@pytest.mark.parametrize("is_cast", [False, True])
def test_a_model_that_rounds_badly_goes_no_slower_way(is_cast):
    """What another batch changes in a plain forward pass is not held against a way."""
    model = build("Llama").float()
    model.lm_head.register_forward_hook(lambda _, given, out: out * (1 + 0.1 * math.sin(len(given[0]))))
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16, enabled=is_cast):
        assert choice_of_way.fastest_way(model, 20) is Shared  # not fused, because of the hook


def test_a_fault_that_autocast_would_hide_is_seen_without_it(monkeypatch):
    model, right = build("Llama").float(), Fused.logits
    monkeypatch.setattr(Fused, "logits", lambda self, *given: right(self, *given) * 1.001)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16), pytest.warns(PolicyWarning, match="off by"):
        assert choice_of_way.fastest_way(model, 20) is Shared


def test_prompts_that_cannot_share_a_batch_are_said(monkeypatch):
    model = ARCHITECTURES["gpt2"]()
    right = Shared.logits
    monkeypatch.setattr(Shared, "logits", lambda self, *given: right(self, *given) * 1.01)
    with torch.no_grad(), pytest.warns(PolicyWarning, match="each length is drawn on its own"):
        assert choice_of_way.fastest_way(model, 20) is Grown


@pytest.mark.parametrize("vocabulary", [16, 61, 99, 5000, 49152, 151936, 262144])
def test_probes_come_from_all_over_a_vocabulary(vocabulary):
    numbers = sorted({number for probe in (*choice_of_way.PROBES, choice_of_way.FORCED) for number in probe})
    ids = choice_of_way.spread(numbers, vocabulary)
    assert len(set(ids)) == len(numbers)
    assert all(0 <= token < vocabulary for token in ids)
    gaps = [b - a for a, b in pairwise([0, *sorted(ids), vocabulary])]
    assert max(gaps) <= 0.2 * vocabulary + 1


def test_a_head_of_zeros_goes_the_fast_way():
    model = build("Llama", tie_word_embeddings=False)
    with torch.no_grad():
        model.lm_head.weight.zero_()
        assert choice_of_way.fastest_way(model, 20) is Fused
