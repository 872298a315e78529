"""Every change that a rule asks for can be typed, or is a list of steps, and says what to expect from it."""

import ast
import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import scoregram.advice
from scoregram.advice import RunFinding, advise, advise_run
from scoregram.advice.completion_rules import WHAT_ELSE, _no_reward_at_the_limit, _repair_effect, paying_for_answers
from scoregram.advice.diagnose import DEMOS
from scoregram.advice.findings import Change
from scoregram.advice.logs import run_log
from scoregram.advice.settings import (
    DYNAMIC_SAMPLING,
    PROMPTS,
    SETTINGS,
    draws_problems,
    reward_steps,
    typed_setting,
)
from scoregram.reading import read_run
from scoregram.runs import RolloutRecord, RunWriter, open_run
from scoregram.tasks import TASKS, load_task
from scoregram.training.methods import METHODS

ROOT = Path(__file__).parent.parent
FAULTS = sorted(path.parent for root in (DEMOS, ROOT / "tests" / "planted") for path in root.rglob("config.yaml"))
RECORDED = [*FAULTS, ROOT / "results" / "smollm2-gsm8k" / "runs" / "R8-seed0"]
TRL: dict[str, Any] = {
    "integration": {"name": "trl", "trainer": "GRPOTrainer"},
    "group_size": 4,
    "reward_functions": ["share_of_digits"],
    "arguments": {
        "num_generations": 4,
        "learning_rate": 1e-5,
        "max_completion_length": 32,
        "num_iterations": 2,
        "per_device_train_batch_size": 32,
        "max_grad_norm": 1.0,
        "temperature": 1.0,
        "max_steps": 36,
    },
}
VALUE = re.compile(r"^(--[a-z-]+ [\w.:/-]+|[a-z_]+=[\w.-]+|attach\(trainer, \w+=\"[\w-]+\"\))( \(now [^)]+\))?$")
"""What can be typed: an option or an argument, with a value."""


def says_what_to_do(change: Change) -> bool:
    is_typed = VALUE.match(change.setting) and not re.search(r"\b[A-Z]{4,}\b", change.setting)
    return bool(change.steps) != bool(change.setting) and (bool(change.steps) or bool(is_typed))


def says_what_to_expect(change: Change) -> bool:
    return bool(re.search(r"\d", change.effect)) or "unknown" in change.effect


@pytest.mark.parametrize("folder", RECORDED, ids=lambda folder: f"{folder.parent.name}-{folder.name}")
@pytest.mark.parametrize("config", [None, TRL], ids=["scoregram", "trl"])
def test_every_card_of_a_recorded_fault_can_be_typed_and_says_what_to_expect(folder, config):
    run = read_run(open_run(folder))
    run = run if config is None else dataclasses.replace(run, config=config)
    for one in advise_run(run).findings:
        if one.change is not None:
            assert says_what_to_do(one.change), (one.name, one.change.setting, one.change.steps)
            assert says_what_to_expect(one.change), (one.name, one.change.effect)


def changes_in_source() -> list[tuple[str, dict[str, ast.expr]]]:
    made = []
    for path in sorted(Path(scoregram.advice.__file__).parent.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Change":
                made.append((f"{path.name}:{node.lineno}", {one.arg: one.value for one in node.keywords if one.arg}))
    return made


@pytest.mark.parametrize(("where", "given"), changes_in_source())
def test_every_change_of_a_rule_is_a_known_setting_or_has_steps(where, given):
    knob = given["knob"].value if isinstance(given["knob"], ast.Constant) else PROMPTS
    assert knob in SETTINGS or knob == PROMPTS or "steps" in given, where
    effect = given["effect"]
    is_computed = not isinstance(effect, ast.Constant)  # its numbers are those of the run
    assert is_computed or "unknown" in str(effect.value), where


def typed(knob: str, direction: str, value: str | int | None = None, **config: Any) -> str:
    return typed_setting(Change(knob=knob, direction=direction, sentence="", effect="", value=value), config)


def test_cards_name_the_setting_of_the_trainer():
    trl: dict[str, Any] = {"integration": {"name": "trl"}}
    own: dict[str, Any] = {"method": "grpo"}
    assert typed("group size", "down", 4, **own, group_size=8) == "--group-size 4 (now 8)"
    assert typed("group size", "down", 4, **trl, arguments={"num_generations": 8}) == "num_generations=4 (now 8)"
    assert typed("estimator", "rloo", "rloo", **trl) == 'attach(trainer, estimator="rloo")'
    assert typed("seed", "repair", integration={"name": "x"}) == "" == typed("group size", "down", 4)  # a plain log
    assert typed("completion length", "up", **own, max_new_tokens=200) == "--max-new-tokens 400 (now 200)"
    assert typed("completion length", "down", **own, max_new_tokens=200) == "--max-new-tokens 100 (now 200)"
    limit = {"max_completion_length": 8}
    assert typed("completion length", "up", **trl, arguments=limit) == "max_completion_length=16 (now 8)"
    assert typed("learning rate", "down", **own, learning_rate=1e-5) == "--learning-rate 5e-06 (now 1e-05)"
    assert typed("updates per batch", "down", **own, inner_updates=4) == "--inner-updates 1 (now 4)"
    assert typed("exploration", "up", **own, temperature=1.0) == "--temperature 1.2 (now 1.0)"
    assert typed("no such setting", "up", **own) == ""


def test_a_name_without_a_value_is_not_something_to_type():
    own: dict[str, Any] = {"method": "grpo"}
    assert typed("gradient clipping", "down", **own, max_grad_norm=1.0) == ""
    assert typed("gradient clipping", "down", "0.3", **own, max_grad_norm=1.0) == "--max-grad-norm 0.3 (now 1.0)"
    assert typed("completion length", "up", **own, max_new_tokens=0) == ""  # 0: up to the task
    assert typed("completion length", "up", 64, **own, max_new_tokens=0) == "--max-new-tokens 64"
    assert typed("reward function", "repair", **TRL) == ""


def test_a_batch_of_trl_is_told_per_device_in_whole_groups():
    arguments = TRL["arguments"] | {"gradient_accumulation_steps": 2}
    config = TRL | {"arguments": arguments, "processes": 2}
    # 4 times 128 rollouts a step, over 2 processes and 2 passes
    assert typed("batch size", "up", 512, **config) == "per_device_train_batch_size=128 (now 32)"
    assert typed("batch size", "down", 20, **config) == "per_device_train_batch_size=4 (now 32)"


def test_a_reward_function_is_code_and_its_repair_a_list_of_steps():
    first, *_, last = reward_steps(TRL, "Repair it.")
    assert first.startswith("Edit the code of `share_of_digits`") and "`reward_funcs`" in first and "again" in last
    assert "--reward my_rewards:reward" in reward_steps({"method": "grpo"})[-1]
    assert "--reward mine:right" in reward_steps({"method": "grpo", "reward": "mine:right"})[-1]
    assert not any("--" in step for step in reward_steps({}))
    assert reward_steps(TRL, also="`x=2` (now 1)")[-1].endswith("with `x=2` (now 1), and no other change.")


def test_the_line_against_paid_truncation_is_python():
    log = run_log("x", [{"step": 1}], TRL)
    code = _no_reward_at_the_limit(log).split("`")[5].removeprefix("return ")
    given = {"completion_ids": [[5] * 64, [5] * 63, [5] * 65], "rewards": [1.0, 0.5, 0.25]}
    assert eval(code, given) == [0.0, 0.5, 0.0]  # the limit of the run is 32 tokens, that of the next one 64


def test_the_reward_that_is_left_where_no_longer_limit_can_be_typed():
    lines = [{"step": step, "reward": 3.0, "completions/clipped_ratio": 0.9} for step in range(1, 10)]
    told, check = _repair_effect(run_log("x", lines, {}))
    assert check == "" and told.startswith(
        "the mean reward first falls from 3.00, that of the last third, since 90% of the completions"
    )


def test_the_truncated_share_at_a_longer_limit_follows_from_the_first_steps():
    """At twice the limit, with as many ends per token, the share that does not end is squared."""
    lines = [
        {"step": 10 * step, "reward": 0.9, "completions/clipped_ratio": 0.8 if step == 1 else 0.98}
        for step in range(1, 7)
    ]
    told, check = _repair_effect(run_log("x", lines, TRL))
    assert told.startswith("about 64% truncated at first") and "80% were at step 10, at 32 tokens" in told
    assert "starts below 0.36, the finished share;" in told
    halved, _ = _repair_effect(run_log("x", lines, TRL), half=True)
    assert "starts below 0.18, half of the finished share as long as no answer is right. Without a right" in halved
    assert check.startswith("The truncated share should be below 64% after 20 steps")
    graded, _ = _repair_effect(run_log("x", [line | {"reward": 4.0} for line in lines], TRL))
    assert "starts below" not in graded and "How far it rises is unknown" in graded


def test_the_check_of_a_repaired_reward_can_be_met():
    late = [{"step": step, "reward": 0.9, "completions/clipped_ratio": float(step > 3)} for step in range(1, 20)]
    _, check = _repair_effect(run_log("x", late, TRL))
    assert check.startswith("The truncated share should stay at 10% or less for 20 steps.")
    whole = [
        {"step": step, "reward": 0.9, "completions/clipped_ratio": 1.0 - 0.01 * (step > 9)} for step in range(1, 20)
    ]
    told, check = _repair_effect(run_log("x", whole, TRL))  # 1 to any power is 1: nothing can be forecast
    assert check == "" and "100% truncated at first" not in told


def test_a_setting_that_is_not_set_has_no_present_value():
    change = Change(knob="training steps", direction="up", sentence="", effect="", value=400)
    assert typed_setting(change, TRL | {"max_steps": 200}) == "max_steps=400 (now 200)"
    assert typed_setting(change, TRL | {"max_steps": -1}) == "max_steps=400"


def truncated_run(folder: Path, completion: str, answer: str | None, reward: float = 0.9) -> RunFinding:
    """The finding of a run whose rollouts are nearly all truncated."""
    with RunWriter.create(folder, TRL, environment={}) as writer:
        for step in range(1, 31):
            known = {
                "token_ids": torch.tensor([1, 2]),
                "prompt_length": 1,
                "log_probs": torch.zeros(2),
                "reward": reward,
            }
            texts = {"prompt": "5+7=", "completion": completion, "answer": answer, "finished": False}
            group = [RolloutRecord(step=step, prompt_id="p", group=0, index=i, **known, **texts) for i in range(4)]
            writer.write_rollouts(step, group)
            writer.write_metrics(step, {"reward": reward, "completions/clipped_ratio": 0.98})
    return next(one for one in advise(folder).findings if one.name == "truncation")


def steps_of(finding: RunFinding) -> tuple[str, ...]:
    assert finding.change is not None
    return finding.change.steps


def test_stored_answers_say_what_a_reward_for_truncated_texts_pays_for(tmp_path):
    wrong = truncated_run(tmp_path / "wrong", "3127 31", "12")
    # the last ten of thirty steps are the last third; four of the twelve steps that are read are among them
    assert wrong.sentence.endswith(", and 0 of the 16 stored ones hold the expected answer.")
    assert wrong.change is not None and "the answer as well" in wrong.change.sentence
    assert WHAT_ELSE not in steps_of(wrong) and not any("completions a reward of 0" in step for step in steps_of(wrong))
    right = " ".join(steps_of(truncated_run(tmp_path / "right", "12, and 12 again", "12")))
    assert "16 of the 16" in right and "needs no other change" in right
    assert WHAT_ELSE in steps_of(truncated_run(tmp_path / "unknown", "3127 31", None))
    large = truncated_run(tmp_path / "large", "12, and 12 again", "12", reward=5.0)
    assert "hold the expected answer" not in " ".join(large.lines())  # a share says nothing of a reward of 5


def test_the_line_that_pays_for_answers_is_python():
    change = Change(knob="reward function", direction="repair", sentence="", effect="")
    told = paying_for_answers(change, run_log("x", [{"step": 1}], TRL | {"answer_column": "target"})).steps[1]
    code = next(part for part in told.split("`") if part.startswith("return")).removeprefix("return ")
    given = {"completion_ids": [[5] * 64, [5] * 63, [5] * 9], "rewards": [1.0, 0.5, 0.25], "target": [12, "12", "7"]}
    # the limit of the next run is 64 tokens: the first was cut off, the second holds the answer, the third does not
    assert "import `re`" in told
    given |= {"re": re, "completions": ["12", "so it is 12.", "17"]}
    assert eval(code, given) == [0.0, 0.75, 0.125]


def test_harder_and_easier_problems_are_a_number_where_the_task_has_one():
    change = Change(knob=PROMPTS, direction="easier", sentence="", effect="")
    assert METHODS[DYNAMIC_SAMPLING].dynamic_sampling
    for task, terms in (("arithmetic", 4), ("calculator:3", 3), ("stopping", 4)):
        name, config = task.partition(":")[0], {"task": task, "method": "grpo"}
        assert typed_setting(change, config) == f"--task {name}:{terms - 1} (now {name}:{terms})"
        harder = dataclasses.replace(change, direction="harder")
        assert typed_setting(harder, config) == f"--task {name}:{terms + 1} (now {name}:{terms})"
    for task, row in TASKS.items():
        assert row.parts is None or load_task(task, seed=0).name == f"{task}:{row.parts.usual}"
    for task in ("gsm8k", "jsonl:a.jsonl", "reasoning-gym:chain_sum", "forecast", "python:my_tasks:guess"):
        assert typed_setting(change, {"task": task, "method": "grpo"}) == ""  # no placeholder: the change has steps
    for task in ("gsm8k", "jsonl:a.jsonl", "python:my_tasks:guess", "arithmetic:3", "reasoning-gym:chain_sum"):
        is_generated = task.startswith(("arithmetic", "reasoning-gym"))
        assert draws_problems({"task": task, "method": "grpo"}) == is_generated
        assert TASKS[task.split(":")[0]].is_generated == is_generated
    assert typed_setting(change, {"method": "dapo"}) == "" == typed_setting(change, TRL)


def test_steps_are_in_the_text_and_in_the_json_of_a_finding():
    change = Change(knob="x", direction="up", sentence="Do it.", effect="1 more.", steps=("First `a`.", "Then `b`."))
    one = RunFinding(name="n", severity="note", sentence="", evidence="", change=change)
    assert one.lines()[3:] == ["Step 1: First `a`.", "Step 2: Then `b`."]
    assert one.plain()["change"]["steps"] == ["First `a`.", "Then `b`."]
