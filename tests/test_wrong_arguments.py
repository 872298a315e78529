"""Arguments of the wrong kind: one sentence, and nothing is changed; none is accepted in silence."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch

import scoregram
from scoregram import ScoregramError, Sketch, TrainConfig, backward_with_gram, cross_gram, measure_gram
from scoregram.integrations import MeasureConfig
from scoregram.machine import threads
from scoregram.policy import PolicyConfig, SamplingConfig
from scoregram.policy.tiny import untrained
from scoregram.policy.transcripts import checked_reply
from scoregram.tasks import Reply
from tests.training_cases import SMALL

pytestmark = pytest.mark.usefixtures("unchecked_shapes")

MODEL = untrained(SMALL, seed=0)
IDS = torch.arange(24).reshape(4, 6) % 7 + 1
MASK = (torch.arange(6) >= 3).expand(4, 6)
TWO = torch.ones(2, 4)
NONE = cast("Any", None)


def gram(**changes: Any) -> Any:
    return measure_gram(MODEL, IDS, MASK, **changes)


def combined(returned: Any) -> Any:
    return backward_with_gram(MODEL, IDS, MASK, weights=TWO, combine=lambda _: returned)


MISTAKES: dict[str, tuple[Callable[[], Any], str]] = {
    "no model": (lambda: measure_gram(NONE, IDS, MASK), "model must be a torch module, got NoneType. Load it"),
    "a name": (lambda: measure_gram(cast("Any", "gpt2"), IDS, MASK), "model must be a torch module, got str"),
    "temperature inf": (lambda: gram(temperature=float("inf")), "temperature must be a finite number, got inf"),
    "temperature text": (lambda: gram(temperature="1"), "temperature must be a finite number, got '1'"),
    "group size text": (lambda: gram(group_size="2"), "group_size must be a whole number or None, got '2'"),
    "rollout ids": (lambda: gram(rollout_ids=IDS.float()), "rollout_ids must be integers, got torch.float32"),
    "sketch": (lambda: gram(sketch=1024), r"sketch must be a Sketch or None, got 1024. Pass for example Sketch\("),
    "features": (lambda: Sketch(cast("Any", 2.5)), "features must be a whole number, got 2.5"),
    "seed": (lambda: Sketch(8, cast("Any", "a")), "seed must be a whole number, got 'a'"),
    "no weights": (lambda: backward_with_gram(MODEL, IDS, MASK, weights=NONE), "weights must be a tensor, got None"),
    "combine None": (lambda: combined(None), r"combine must return \(2,\) factors, got NoneType"),
    "combine three": (lambda: combined(torch.ones(3)), r"combine must return \(2,\) factors, got \(3,\)"),
    "combine nan": (lambda: combined(torch.tensor([1.0, torch.nan])), "factors of combine must be finite, got nan"),
    "cross mask": (lambda: cross_gram(MODEL, (IDS, MASK * 2), (IDS, MASK)), "completion_mask of train must contain"),
    "cross padding": (
        lambda: cross_gram(MODEL, (IDS, MASK), (IDS, MASK, MASK * 0.5)),
        "attention_mask of held_out must contain only 0 and 1, got 0.5",
    ),
    "cross list": (lambda: cross_gram(MODEL, (cast("Any", [[1]]), MASK), (IDS, MASK)), "must be a tensor, got list"),
    "run": (lambda: scoregram.open_run(NONE), "a path must be a text or a Path, got None"),
    "advise": (lambda: scoregram.advise(cast("Any", 3)), "a path must be a text or a Path, got 3"),
    "what if": (lambda: scoregram.what_if(cast("Any", "runs/x")), r"got str. Pass read_run\(folder\)"),
    "weights list": (
        lambda: scoregram.rollout_shares(torch.eye(4), cast("Any", [1.0])),
        "weights must be a tensor, got",
    ),
    "gram list": (
        lambda: scoregram.update_norm(cast("Any", [[1.0]]), torch.ones(1)),
        "a Gram must be a tensor, got list",
    ),
    "task": (lambda: scoregram.load_task(cast("Any", 3)), "task: must be named by a text, got 3"),
    "train": (lambda: scoregram.train(cast("Any", {"steps": 1})), "config must be a TrainConfig, got dict"),
    "threads": (lambda: threads(5000).__enter__(), "threads: must be at most 1024, got 5000"),
    "tokens": (
        lambda: SamplingConfig(max_new_tokens=cast("Any", "3")),
        "max_new_tokens must be a whole number, got '3'",
    ),
    "sampler": (lambda: SamplingConfig(3, sampler=cast("Any", "x")), "sampler must be one of auto, .*, got 'x'"),
    "prompt": (lambda: PolicyConfig(prompt=cast("Any", "x")), "prompt must be one of auto, plain, chat, got 'x'"),
    "reward": (
        lambda: checked_reply(Reply(reward=cast("Any", "a")), "E"),
        "must be finite, got reward 'a' and outcome",
    ),
    "observation": (lambda: checked_reply(Reply(cast("Any", 3)), "E"), "observation of E.step must be a text, got int"),
    "text prompts": (
        lambda: scoregram.sample(
            MODEL, cast("Any", ["1+2="]), rollouts_per_prompt=2, sampling=SamplingConfig(3), stop_ids=[1], pad_id=0
        ),
        "a prompt must be token ids, got text in prompt 0. Encode it",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_wrong_argument_is_refused_in_a_sentence(name):
    call, says = MISTAKES[name]
    with pytest.raises(ScoregramError, match=says):
        call()
    assert all(parameter.grad is None for parameter in MODEL.parameters())


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("steps", 2.5, "a whole number"),
        ("steps", "3", "a whole number"),
        ("steps", True, "a whole number"),
        ("learning_rate", "1e-4", "a number"),
        ("lr_schedule", "bogus", "one of constant, linear, cosine"),
        ("optimizer", "lion", "one of adamw, sgd"),
        ("allocate", "bogus", "one of uniform, success, measured"),
        ("group_size", "large", "a whole number or auto"),
        ("estimator", 3, "a text or None"),
        ("push", "yes", "True or False"),
        ("report_to", "tensorboard", "a tuple"),
    ],
)
def test_a_config_made_in_python_has_the_types_of_the_command_line(field, value, expected):
    with pytest.raises(ScoregramError, match=rf"^train: {field} must be {expected}, got {value!r}\. Check the value\."):
        TrainConfig(**{field: value})


def test_a_path_of_a_config_may_be_a_text():
    assert TrainConfig(out=cast("Any", "runs/a")).out == Path("runs/a")
    measured = MeasureConfig(model="tiny", rollouts=cast("Any", "a.jsonl"), out=cast("Any", "runs/b"))
    assert (measured.rollouts, measured.out) == (Path("a.jsonl"), Path("runs/b"))
    with pytest.raises(ScoregramError, match="measure: layers must be one of float64, float32, none, got 'x'"):
        MeasureConfig(model="tiny", rollouts=Path("a"), out=Path("b"), layers=cast("Any", "x"))
