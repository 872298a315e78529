"""The decoder chosen for a model: by comparing logits, with what rounding explains allowed for."""

import math
from contextlib import nullcontext
from itertools import pairwise

import pytest
import torch

from scoregram.policy import models
from scoregram.policy.decoders import ModelCacheDecoder, SharedCacheDecoder
from scoregram.policy.fused_decoders import FusedDecoder
from scoregram.policy.models import PolicyWarning
from scoregram.policy.sampler import fastest_decoder
from tests.cases import ARCHITECTURES, build


@pytest.mark.parametrize("fault", ["none", "raises", "differs"])
def test_a_decoder_that_fails_its_trial_is_not_used(fault, monkeypatch):
    model, right = build("Llama"), FusedDecoder.logits
    if fault == "raises":
        monkeypatch.setattr(FusedDecoder, "logits", lambda *_: (_ for _ in ()).throw(RuntimeError("no")))
    if fault == "differs":
        monkeypatch.setattr(FusedDecoder, "logits", lambda self, *given: right(self, *given) * 1.01)
    said = {
        "raises": "the model's own is used, which is slower .no finite logits",
        "differs": "off by [0-9,.]+ times what rounding",
    }
    with torch.no_grad(), pytest.warns(PolicyWarning, match=said[fault]) if fault in said else nullcontext():
        assert fastest_decoder(model, 20) is (FusedDecoder if fault == "none" else SharedCacheDecoder)


@pytest.mark.parametrize("is_cast", [False, True])
def test_a_model_that_rounds_badly_gets_no_slower_decoder(is_cast):
    """What another batch changes in a plain forward pass is not held against a decoder."""
    model = build("Llama").float()
    model.lm_head.register_forward_hook(lambda _, given, out: out * (1 + 0.1 * math.sin(len(given[0]))))
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16, enabled=is_cast):
        assert fastest_decoder(model, 20) is SharedCacheDecoder  # not fused, because of the hook


def test_a_fault_that_autocast_would_hide_is_seen_without_it(monkeypatch):
    model, right = build("Llama").float(), FusedDecoder.logits
    monkeypatch.setattr(FusedDecoder, "logits", lambda self, *given: right(self, *given) * 1.001)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16), pytest.warns(PolicyWarning, match="off by"):
        assert fastest_decoder(model, 20) is SharedCacheDecoder


def test_prompts_that_cannot_share_a_batch_give_a_warning(monkeypatch):
    model = ARCHITECTURES["gpt2"]()
    right = SharedCacheDecoder.logits
    monkeypatch.setattr(SharedCacheDecoder, "logits", lambda self, *given: right(self, *given) * 1.01)
    with torch.no_grad(), pytest.warns(PolicyWarning, match="of each length are sampled in a batch of their own"):
        assert fastest_decoder(model, 20) is ModelCacheDecoder


@pytest.mark.parametrize("vocabulary", [16, 61, 99, 5000, 49152, 151936, 262144])
def test_probes_come_from_all_over_a_vocabulary(vocabulary):
    numbers = sorted({number for probe in (*models.PROBE_PROMPTS, models.PROBE_COMPLETION) for number in probe})
    ids = models.probe_tokens(numbers, vocabulary)
    assert len(set(ids)) == len(numbers)
    assert all(0 <= token < vocabulary for token in ids)
    gaps = [b - a for a, b in pairwise([0, *sorted(ids), vocabulary])]
    assert max(gaps) <= 0.2 * vocabulary + 1


def test_a_head_of_zeros_gets_the_fused_decoder():
    model = build("Llama", tie_word_embeddings=False)
    with torch.no_grad():
        model.lm_head.weight.zero_()
        assert fastest_decoder(model, 20) is FusedDecoder
