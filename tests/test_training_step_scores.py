"""Process rewards from a user's function: checks, places, the update by hand, and whole runs."""

import json
import math
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from scoregram.checks import ScoregramError
from scoregram.compare import CompareConfig, compare_methods
from scoregram.policy import Policy, PolicyConfig, load_policy
from scoregram.rollouts import Rollouts
from scoregram.runs import open_run
from scoregram.tasks import Problem, ScoredStep, Task, load_step_scores, load_task
from scoregram.training.config import TrainConfig
from scoregram.training.inputs import StepScores
from scoregram.training.loop import train
from scoregram.training.update import Updater
from tests.training_cases import JUDGE, config_for, save_policy, without_times

SPEC = "tests.test_training_step_scores:{}"
PROBLEMS = [Problem(f"say/{index}", f"{index}=", str(index)) for index in range(3)]


def by_halves(prompts: list[str], completions: list[str], answer: list[str], **_: Any) -> list[list[tuple[int, float]]]:
    """Two steps, or one for a single character: the share of even characters up to their end."""
    ends = [sorted({max(1, len(text) // 2), len(text)}) if text else [] for text in completions]
    return [
        [(end, sum(ord(character) % 2 == 0 for character in text[:end]) / end) for end in own]
        for text, own in zip(completions, ends, strict=True)
    ]


class ProcessModel:
    """A model that scores steps, as a callable object; its scores come as tensors."""

    def __call__(self, completions: list[str], **_: Any) -> list[list[tuple[Any, Any]]]:
        """Two steps of every completion."""
        return [[(np.int64(1), torch.tensor(0.25)), (len(text), np.float32(1.0))] for text in completions]


process_model = ProcessModel()


def returns(value: Any) -> Any:
    return lambda completions: value


nothing, a_number = returns(None), returns(0.5)
too_few, a_score = returns([[]]), returns([[], [0.5]])
no_list, three_parts = returns([[], None]), returns([[], [(0, 1, 0.5)]])
behind_the_end, at_zero = returns([[], [(5, 1.0)]]), returns([[], [(0, 1.0)]])
a_fraction, falling = returns([[], [(1.5, 1.0)]]), returns([[], [(2, 1.0), (1, 0.0)]])
not_a_number, a_word = returns([[], [(2, math.nan)]]), returns([[], [(2, "good")]])
true_end = returns([[], [(True, 1.0)]])


def needs_colour(completions: list[str], colour: list[str]) -> list[Any]:
    return []


def raises(completions: list[str]) -> list[Any]:
    raise KeyError("colour")


def scored(name: str) -> Any:
    return load_step_scores(SPEC.format(name))(prompts=["p", "p"], completions=["a", "abcd"])


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("nothing", "must return a list, got NoneType. Return one list of"),
        ("a_number", "must return a list, got float"),
        (
            "too_few",
            r"must return one list per completion, got 1 for 2 completions. Return \[\] for one without a step",
        ),
        ("no_list", r"must return a list of \(end, score\) for every completion, got None"),
        ("a_score", r"a step of .*a_score must be a pair \(end, score\), got 0.5"),
        ("three_parts", r"must be a pair \(end, score\), got \(0, 1, 0.5\)"),
        ("behind_the_end", "whole number from 1 to the length of the completion, got 5 for 4 characters. Count char"),
        ("at_zero", "whole number from 1 to the length of the completion, got 0 for 4 characters"),
        ("a_fraction", "whole number from 1 to the length of the completion, got 1.5 for 4 characters"),
        ("true_end", "whole number from 1 to the length of the completion, got True for 4 characters"),
        ("falling", r"must rise from step to step, got \[2, 1\]. Sort the steps"),
        ("not_a_number", "the scores of .*not_a_number must be finite numbers, got nan. Leave this step out"),
        ("a_word", "must be finite numbers, got 'good'"),
        ("needs_colour", "step scores: the arguments of .*needs_colour must be among completions, prompts, got colour"),
        ("missing", "step scores: .* must have missing"),
    ],
)
def test_a_function_that_breaks_the_interface_is_refused(name, says):
    with pytest.raises(ScoregramError, match=says):
        scored(name)


def test_an_exception_of_the_function_keeps_its_type_and_gets_its_name():
    with pytest.raises(KeyError) as caught:
        scored("raises")
    assert caught.value.__notes__ == [f"raised by the step scores {SPEC.format('raises')}"]


def test_a_callable_object_and_scalars_of_tensors_and_arrays_are_taken():
    found = load_step_scores(SPEC.format("process_model"))(prompts=["p"], completions=["abc"])
    assert found == [[(1, 0.25), (3, 1.0)]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return save_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module")
def policy(folder) -> Policy:
    return load_policy(PolicyConfig(model=str(folder), device="cpu", prompt="plain", dtype="float64"))


def task_with(function: Any) -> Task:
    reward: Any = lambda prompts, completions, **_: [0.0 for _ in completions]  # noqa: E731
    return Task("say", PROBLEMS, PROBLEMS, reward, 8, step_scores=function)


def rollouts_of(policy: Policy, texts: list[str]) -> Rollouts:
    """Completions of one problem, each with a stop token."""
    prompt = policy.encode_prompt(PROBLEMS[0].prompt)
    own = [[*policy.tokenizer(text, add_special_tokens=False)["input_ids"], policy.stop_ids[0]] for text in texts]
    width = len(prompt) + max(map(len, own))
    ids = torch.tensor([[*prompt, *row, *[policy.pad_id] * (width - len(prompt) - len(row))] for row in own])
    lengths = torch.tensor([len(row) for row in own])[:, None]
    place = torch.arange(width)
    return Rollouts(
        input_ids=ids,
        attention_mask=place < len(prompt) + lengths,
        completion_mask=(place >= len(prompt)) & (place < len(prompt) + lengths),
        prompt_lengths=torch.full((len(texts),), len(prompt)),
        group_ids=torch.zeros(len(texts), dtype=torch.int64),
        prompt_names=["say/0"],
        completions=texts,
        rewards=torch.zeros(len(texts), dtype=torch.float64),
    )


def test_the_update_is_that_of_two_steps_by_hand(policy):
    """Two completions of two steps: `−½ Σ_i 1/|o_i| Σ_t A_it ∇log π_it` with `A` from four scores, token by token."""
    scores = [[(2, 0.25), (5, 1.0)], [(3, 0.5), (4, -0.25)]]
    seen: dict[str, Any] = {}

    def function(**columns: Any) -> Any:
        seen.update(columns)
        return scores

    rollouts = rollouts_of(policy, ["12,13", "7+1."])
    inputs = StepScores(policy, task_with(function)).inputs(1, rollouts, PROBLEMS[:1])
    assert seen["answer"] == ["0", "0"] and seen["completion_ids"] == rollouts.completion_ids()

    every = [0.25, 1.0, 0.5, -0.25]
    mean, spread = statistics.fmean(every), statistics.stdev(every)
    a, b, c, d = ((score - mean) / spread for score in every)
    # the characters of step one get both scores, those of step two the second, the stop token none
    by_hand = [[a + b, a + b, b, b, b, 0.0], [c + d, c + d, c + d, d, 0.0]]
    prompt, model = int(rollouts.prompt_lengths[0]), policy.model
    loss = torch.zeros((), dtype=torch.float64)
    for row, advantages in enumerate(by_hand):
        ids = rollouts.input_ids[row, : prompt + len(advantages)]
        log_probs = model(input_ids=ids[None]).logits[0].log_softmax(1)
        for place, advantage in enumerate(advantages, start=prompt):
            loss = loss - advantage * log_probs[place - 1, ids[place]] / len(advantages) / 2
    parameters = list(model.parameters())
    expected = torch.cat([part.flatten() for part in torch.autograd.grad(loss, parameters)])

    method = TrainConfig(method="grpo-process").chosen_method
    updater = Updater(
        model=model,
        method=method,
        temperature=1.0,
        length=8,
        rollouts_per_pass=0,
        computing=policy.computing,
        beta=0.0,
        kl="k3",
    )
    model.zero_grad(set_to_none=True)
    updater.first(1, rollouts, measure=True, inputs=inputs)
    taken = torch.cat([parameter.grad.flatten() for parameter in parameters])
    model.zero_grad(set_to_none=True)
    torch.testing.assert_close(taken, expected, rtol=1e-9, atol=1e-12)
    assert float(expected.norm()) > 0.1


def test_a_completion_without_a_step_has_one_with_score_0(policy):
    rollouts = rollouts_of(policy, ["12", "7"])
    inputs = StepScores(policy, task_with(lambda **_: [[], [(1, 0.75)]])).inputs(1, rollouts, PROBLEMS[:1])
    start = int(rollouts.prompt_lengths[0])
    assert inputs["step_ends"].nonzero().tolist() == [[0, start + 2], [1, start]]
    assert inputs["token_rewards"][inputs["step_ends"]].tolist() == [0.0, 0.75]


def test_without_a_function_the_verified_steps_of_the_task_are_right_or_wrong():
    task = load_task("arithmetic:3")
    problem = Problem("one", "11+1+1=", "13", {"terms": (11, 1, 1)})
    assert task.scored_steps([problem] * 2, ["12,14.", ""]) == [[ScoredStep(3, 1.0), ScoredStep(6, 0.0)], []]


# Whole runs


def problems_file(folder: Path) -> str:
    lines = [json.dumps({"prompt": f"{index}=", "answer": str(index)}) for index in range(12)]
    (folder / "problems.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return f"jsonl:{folder / 'problems.jsonl'}"


def test_any_task_of_one_turn_trains_on_step_scores_and_a_resumed_run_goes_on(folder, tmp_path):
    settings: dict[str, Any] = {"task": problems_file(tmp_path), "method": "grpo-process", "eval_every": 0}
    settings["step_scores"] = SPEC.format("by_halves")
    train(config_for(folder, tmp_path / "whole", steps=4, **settings))
    train(config_for(folder, tmp_path / "parts", steps=2, **settings))
    train(replace(TrainConfig.of_run(tmp_path / "parts"), steps=4))
    whole, parts = (without_times(open_run(tmp_path / name).metrics()) for name in ("whole", "parts"))
    assert whole == parts and any(line["grad_norm"] > 0 for line in whole)
    assert open_run(tmp_path / "parts").config["step_scores"] == SPEC.format("by_halves")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"task": "calculator", "reward": None, "step_scores": SPEC.format("by_halves")},
            "--step-scores: needs a task of",
        ),
        (
            {"task": "forecast", "reward": None},
            "--method: grpo-process needs a task that verifies steps, .*Give --step-s",
        ),
        ({"task": "forecast", "method": "grpo", "estimator": "grpo-process"}, "--estimator: grpo-process needs a task"),
        ({"step_scores": "nowhere:scores"}, "step scores: the module of nowhere:scores must be importable"),
    ],
)
def test_what_cannot_give_step_scores_is_refused_at_once(changes, says, folder, tmp_path):
    with pytest.raises(ScoregramError, match=says):
        train(config_for(folder, tmp_path / "run", **{"method": "grpo-process", **changes}))
    assert not (tmp_path / "run").exists()


def test_a_comparison_gives_step_scores_to_one_method(folder, tmp_path):
    settings: dict[str, Any] = {"model": str(folder), "reward": JUDGE, "prompt": "plain", "device": "cpu", "jobs": 1}
    settings |= {"seeds": 1, "rollouts": 24, "batch_size": 12, "group_size": 4, "max_new_tokens": 6, "eval_problems": 1}
    methods = f"grpo,grpo-process:step_scores={SPEC.format('by_halves')}"
    config = CompareConfig(out=tmp_path / "made", task=problems_file(tmp_path), methods=methods, **settings)
    assert compare_methods(config, console=Console(quiet=True)) == 0
    stored = [open_run(path.parent).config for path in sorted((tmp_path / "made").rglob("config.yaml"))]
    assert [one.get("step_scores") for one in stored] == [None, SPEC.format("by_halves")]
