"""What a pass holds, and for how long: a result can be exact and still take the memory of every layer at once."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from scoregram.gram import leaves, measure_gram
from scoregram.gram.collect import Collector
from scoregram.gram.passes import Pass
from tests.cases import ARCHITECTURES, rollouts

pytestmark = pytest.mark.filterwarnings("default")


@pytest.fixture(autouse=True)
def streamed(monkeypatch):
    """Every weight streamed, however small."""
    monkeypatch.setattr(leaves, "KEPT_ELEMENTS", 0)


class Scaled(nn.Module):
    """A model that changes its logits after the head: its first forward pass, for the head alone, is discarded."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.layer, self.head = nn.Embedding(61, 8), nn.Linear(8, 8), nn.Linear(8, 61, bias=False)

    def get_output_embeddings(self) -> nn.Module:
        """The head, as Hugging Face models tell it."""
        return self.head

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:  # noqa: D102
        return 2 * self.head(self.layer(self.embedding(input_ids).cumsum(1)))


MODELS = {"scaled": lambda: Scaled().double()} | {name: ARCHITECTURES[name] for name in ("llama", "llama-tied", "gpt2")}


@pytest.mark.parametrize("name", MODELS)
def test_factors_are_dropped_when_the_last_use_of_a_weight_has_arrived(name, monkeypatch):
    pending: list[Any] = []
    finish = Collector.finish

    def noted_finish(collector: Collector) -> None:
        pending.extend(r for state in collector.states.values() for r in state.regions.values() if r.pending)
        finish(collector)

    monkeypatch.setattr(Collector, "finish", noted_finish)
    measure_gram(MODELS[name](), *rollouts().arguments, verify=True)
    assert not pending


def test_inputs_inside_a_checkpointed_layer_are_gone_before_the_backward_pass(monkeypatch):
    model: Any = ARCHITECTURES["llama"]().train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    inputs: list[StorageWeakRef] = []
    for layer in model.model.layers:
        layer.mlp.down_proj.register_forward_pre_hook(
            lambda module, args: inputs.append(StorageWeakRef(args[0].untyped_storage()))
        )
    held: list[int] = []
    backward = Pass.backward_through_head

    def noted_backward(running: Pass, captured: Any) -> torch.Tensor:
        held.append(sum(not storage.expired() for storage in inputs))
        return backward(running, captured)

    monkeypatch.setattr(Pass, "backward_through_head", noted_backward)
    measure_gram(model, *rollouts().arguments)
    assert inputs and held == [0]


def test_the_logits_of_a_frozen_head_are_not_kept(monkeypatch):
    model: Any = ARCHITECTURES["llama"]()
    model.lm_head.requires_grad_(False)
    fused: list[int] = []
    backward = Pass.backward_through_head
    monkeypatch.setattr(Pass, "backward_through_head", lambda running, head: fused.append(1) or backward(running, head))
    measure_gram(model, *rollouts().arguments)
    assert fused == [1]
