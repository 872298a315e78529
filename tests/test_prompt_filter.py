"""`scoregram filter`: what it leaves out, by hand, and the commands of a card, typed one after the other."""

import json
import math
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from scoregram.advice import filter_prompts, show_filter
from scoregram.advice.prompt_filter import (
    SAMPLING_DEFAULTS,
    VISIT,
    counted_prompts,
    has_equal_rewards,
    stored_rewards,
    visit_command,
    visit_steps,
)
from scoregram.checks import ScoregramError
from scoregram.cli import main, parsed_command
from scoregram.reading import outcomes_of
from scoregram.runs import GroupRecord, RolloutRecord, RunWriter, open_run
from scoregram.tasks import load_task
from scoregram.training import TrainConfig

NAN = math.nan


def write_problems(folder: Path, count: int = 6, *, gsm8k: bool = False) -> Path:
    folder.mkdir()
    for split in ("train", "test"):
        rows = [
            {"question": f"{split} {i}", "answer": f"so #### {i}"}
            if gsm8k
            else {"prompt": f"{split} {i} ü", "answer": str(i), "level": i % 2}
            for i in range(1, count + 1)
        ]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def visited(folder: Path, config: dict[str, Any], groups: dict[str, list[float]], rollouts: Any = ()) -> Path:
    """A run that stored groups at step 1, and single rollouts `(step, prompt, reward)`."""
    zeros = torch.zeros(2, dtype=torch.float64)
    with RunWriter.create(folder, config, environment={}) as writer:
        records = [
            GroupRecord(
                step=1,
                prompt_id=name,
                rewards=torch.tensor(rewards, dtype=torch.float64),
                lengths=torch.ones(2).long(),
                advantages=zeros,
            )
            for name, rewards in groups.items()
        ]
        writer.write_groups(1, records)
        for step in {step for step, *_ in rollouts}:
            here = [(name, reward) for at, name, reward in rollouts if at == step]
            known = {"token_ids": torch.tensor([1, 2]), "prompt_length": 1, "log_probs": torch.zeros(2)}
            writer.write_rollouts(
                step,
                [
                    RolloutRecord(step=step, prompt_id=name, group=0, index=i, reward=reward, finished=True, **known)
                    for i, (name, reward) in enumerate(here)
                ],
            )
        writer.write_metrics(1, {"reward": 0.5})
    return folder


def test_prompts_with_equal_rewards_are_left_out_and_unseen_ones_kept(tmp_path):
    data = write_problems(tmp_path / "data")
    config = {"method": "grpo", "task": f"jsonl:{data}", "group_size": 2, "batch_size": 4}
    rewards = {"data/train/1": [0.0, 0.0], "data/train/2": [1.0, 1.0], "data/train/3": [0.0, 1.0]}
    # step 1 has groups, so that its rollouts are not counted again; prompt 4 is seen as rollouts only
    seen = [(1, "data/train/3", 0.0), (1, "data/train/3", 0.0), (2, "data/train/4", 0.5), (2, "data/train/4", 0.5)]
    run = visited(tmp_path / "run", config, rewards, seen)
    expected = {
        "equal": ["data/train/1", "data/train/2", "data/train/4"],
        "all-wrong": ["data/train/1"],
        "all-right": ["data/train/2"],
    }
    before = load_task(f"jsonl:{data}")
    for which, left_out in expected.items():
        made = filter_prompts(run, tmp_path / which, which=which)  # pyright: ignore[reportArgumentType]
        assert (list(made.left_out), made.visited, made.problems) == (left_out, 4, 6)
        after = load_task(f"jsonl:{tmp_path / which}")
        kept = [one for one in before.train if one.id not in left_out]
        assert [(one.prompt, one.answer, one.columns) for one in after.train] == [
            (one.prompt, one.answer, one.columns) for one in kept
        ]
        assert [(one.prompt, one.answer) for one in after.test] == [(one.prompt, one.answer) for one in before.test]
    named = filter_prompts(run, tmp_path / "named", names=["data/train/3"])
    assert named.left_out == ("data/train/3",) and len(load_task(f"jsonl:{tmp_path / 'named'}").train) == 5


def test_a_prompt_that_was_live_once_is_kept_and_missing_rewards_do_not_count(tmp_path):
    config = {"integration": {"name": "trl"}}
    groups = {"a": [0.0, NAN], "b": [NAN, NAN], "c": [0.0, 0.0]}
    run = visited(tmp_path / "run", config, groups, [(2, "c", 1.0), (2, "c", 0.0)])
    assert stored_rewards(open_run(run))["c"] == [[0.0, 0.0], [1.0, 0.0]]
    assert filter_prompts(run, tmp_path / "left_out.json").left_out == ("a",)


def test_rewards_are_equal_as_the_outcome_of_a_group_says():
    """Rewards that differ by more than rounding make a group live, however little that is."""
    near = [1.0, 1.0000005]
    assert outcomes_of(torch.tensor([near], dtype=torch.float64)) == ["live"] and not has_equal_rewards([near])
    rounding = [0.1 + 0.2, 0.3]
    assert has_equal_rewards([rounding, [0.3, NAN, 0.3]]) and not has_equal_rewards([rounding], "all-right")
    assert has_equal_rewards([[0.7 + 0.2 + 0.1, 1.0]], "all-right")
    assert not has_equal_rewards([[NAN, NAN], []]) and not has_equal_rewards([])


def test_the_remedy_for_missing_rewards_is_that_of_the_trainer(tmp_path):
    """No trainer has the option of another one."""
    remedies = {"own": "train with --rollouts-every 1", "trl": r"attach\(trainer, keep_rollouts=True\)"}
    for name, config in {"own": {"method": "grpo"}, "trl": {"integration": {"name": "trl"}}}.items():
        with pytest.raises(ScoregramError, match=rf"got none in .*\. To store rollouts: {remedies[name]}\."):
            filter_prompts(visited(tmp_path / name, config, {}), tmp_path / "x")


def test_problems_of_gsm8k_stay_problems_of_gsm8k(tmp_path, capsys):
    data = write_problems(tmp_path / "data", gsm8k=True)
    config = {"method": "grpo", "task": f"gsm8k:{data}", "group_size": 2, "batch_size": 4, "model": "tiny"}
    run = visited(tmp_path / "run", config, {"gsm8k/train/0": [0.0, 0.0], "gsm8k/train/5": [0.0, 1.0]})
    assert show_filter(run, tmp_path / "live", which="all-wrong") == 0
    kept = load_task(f"gsm8k:{tmp_path / 'live'}").train
    assert [(one.prompt, one.answer) for one in kept] == [(f"train {i}", str(i)) for i in range(2, 7)]
    told = capsys.readouterr().out.splitlines()
    assert told[0].endswith("left out 1 of 2 visited prompts, those whose rewards are all 0.")
    assert told[1].startswith(
        "Kept 5 of 6 training prompts, 4 of which the run did not store. To visit all: scoregram "
    )
    assert " --steps 3 --learning-rate 0 " in told[1]  # 6 problems, 2 prompts a step
    assert told[2] == f"Next: scoregram train --task gsm8k:{tmp_path / 'live'}"


def test_the_line_for_trl_filters_a_dataset(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    config = {"integration": {"name": "trl"}, "group_size": 2}
    *_, listed, line = visit_steps("all-wrong", config)
    assert f"`scoregram filter {VISIT} --which all-wrong --out left_out.json`" in listed
    visited(tmp_path / VISIT, config, {"0": [0.0, 0.0], "1": [1.0, 1.0], "2": [0.0, 1.0]})
    monkeypatch.chdir(tmp_path)
    filter_prompts(VISIT, "left_out.json", which="all-wrong")
    names: dict[str, Any] = {
        "json": json,
        "Path": Path,
        "train_dataset": datasets.Dataset.from_dict({"prompt": ["a", "b", "c"]}),
    }
    for step in (visit_steps("all-wrong", config)[0], line):
        exec(step.split("`")[1], names)  # the code of the card
    assert names["train_dataset"]["prompt"] == ["b", "c"]


def test_errors_say_what_to_do(tmp_path):
    drawn = visited(tmp_path / "drawn", {"method": "grpo", "task": "arithmetic"}, {"a": [0.0, 0.0]})
    with pytest.raises(ScoregramError, match="must read its problems from files, got arithmetic"):
        filter_prompts(drawn, tmp_path / "x")
    empty = visited(tmp_path / "empty", {"method": "grpo", "task": "arithmetic"}, {})
    with pytest.raises(ScoregramError, match="must store groups or rollouts"):
        filter_prompts(empty, tmp_path / "x")
    with pytest.raises(ScoregramError, match=r"must be prompts that the run stored, got 'zz'\. Names look like a"):
        filter_prompts(drawn, tmp_path / "x", names=["zz"])
    nameless = visited(tmp_path / "nameless", {"integration": {"name": "trl"}}, {"prompt/379d6f76868b": [0.0, 0.0]})
    with pytest.raises(ScoregramError, match=r"must have names in train_dataset, got prompt/379d.*\.add_column"):
        filter_prompts(nameless, tmp_path / "x")
    data = write_problems(tmp_path / "data", 1)
    config = {"method": "grpo", "task": f"jsonl:{data}"}
    with pytest.raises(ScoregramError, match="a prompt must be left"):
        filter_prompts(visited(tmp_path / "run", config, {"data/train/1": [0.0, 0.0]}), tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_no_file_of_the_user_is_replaced(tmp_path):
    """Least of all the prompts themselves, if the filter is told to write where they are."""
    data = write_problems(tmp_path / "data")
    run = visited(tmp_path / "run", {"method": "grpo", "task": f"jsonl:{data}"}, {"data/train/1": [0.0, 0.0]})
    other = visited(tmp_path / "trl", {"integration": {"name": "trl"}}, {"a": [0.0, 0.0]})
    before = {path: path.read_bytes() for path in data.iterdir()}
    for folder, out in ((run, data), (other, data / "train.jsonl")):
        with pytest.raises(ScoregramError, match=r"filter --out: .*train.jsonl must not exist yet, got a file"):
            filter_prompts(folder, out)
    assert {path: path.read_bytes() for path in data.iterdir()} == before


def test_options_that_are_not_typed_have_their_defaults():
    config = TrainConfig()
    assert dict(SAMPLING_DEFAULTS) == {name: getattr(config, name) for name in SAMPLING_DEFAULTS}


def test_the_shell_counts_the_prompts_of_a_file():
    config = {"method": "grpo", "batch_size": 128, "group_size": 8, "model": "m", "temperature": 0.7}
    assert " --steps $(( $(wc -l < d/train.jsonl) / 16 + 1 )) " in visit_command(config | {"task": "gsm8k:d"})
    assert " --steps $(( $(wc -l < d.jsonl) / 16 + 1 )) " in visit_command(config | {"task": "jsonl:d.jsonl"})
    assert " --steps 468 " in visit_command(config | {"task": "gsm8k"})  # 7,473 problems
    assert " --temperature 0.7 " in visit_command(config | {"task": "gsm8k"})


def test_the_commands_of_a_card_work_one_after_the_other(tmp_path, monkeypatch, capsys):
    """Typed into a shell: visit every prompt once, leave out those whose rewards are equal, train on the others."""
    problems = load_task("arithmetic:3", seed=0).train
    rows = [json.dumps({"prompt": problems[i].prompt, "answer": problems[i].answer}) for i in range(10)]
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.jsonl").write_text("\n".join(rows[:8]) + "\n")
    (tmp_path / "data" / "test.jsonl").write_text("\n".join(rows[8:]) + "\n")
    task = {"task": "jsonl:data", "reward": "mine:even", "max_new_tokens": 8}
    # a reward by problem: even ones never vary
    (tmp_path / "mine.py").write_text(
        "def even(completions, problem_id, **_):\n"
        "    return [float(i % 2 if int(p.rsplit('/')[-1]) % 2 else 0) for i, p in enumerate(problem_id)]\n"
    )
    config = {"method": "grpo", "model": "tiny", "group_size": 4, "batch_size": 8, **task}
    visit, leave_out, again = (step.split("`")[1] for step in visit_steps("equal", config))
    options = "--reward mine:even --max-new-tokens 8 --group-size 4 --batch-size 8 --steps 1 --measure-every 0"
    lines = [visit, leave_out, f"scoregram train {again} {options} --eval-every 0 --out runs/again"]
    monkeypatch.chdir(tmp_path)
    for line in lines:  # the shell expands what is typed
        words = subprocess.run(["bash", "-c", f"printf '%s\\n' {line}"], capture_output=True, text=True, check=True)
        assert main(words.stdout.splitlines()[1:]) == 0
    told = capsys.readouterr().out
    assert stored_rewards(open_run(tmp_path / VISIT)).keys() == {f"data/train/{i}" for i in range(1, 9)}
    assert "left out 4 of 8 visited prompts" in told and "Kept 4 of 8 training prompts." in told
    kept = [json.loads(row)["prompt"] for row in (tmp_path / "data/live/train.jsonl").read_text().splitlines()]
    assert kept == [problems[i].prompt for i in (0, 2, 4, 6)]  # lines 1, 3, 5 and 7


def test_the_command_for_a_recorded_run_samples_as_that_run_did():
    stored = open_run("results/smollm2-gsm8k/runs/R8-seed0").config
    visit = parsed_command(shlex.split(visit_command(stored, 7473))[1:])
    assert isinstance(visit, TrainConfig) and visit.learning_rate == 0 and visit.steps == 468  # 16 prompts a step
    names = ("model", "task", "batch_size", "group_size", "autocast", *SAMPLING_DEFAULTS)
    assert {name: getattr(visit, name) for name in names} == {name: stored[name] for name in names}


def test_the_price_of_a_visit_names_the_data_set_that_it_is_for(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    own = {"method": "grpo"}
    count, words = counted_prompts(own | {"task": "gsm8k:copy"})
    assert count == 7473 and words.startswith("the 7,473 training prompts of GSM8K, if copy holds all of them")
    (tmp_path / "copy").mkdir()
    (tmp_path / "copy" / "train.jsonl").write_text('{"question": "1"}\n{"question": "2"}\n\n')
    assert counted_prompts(own | {"task": "gsm8k:copy"}) == (2, "the 2 training prompts of copy/train.jsonl")
    assert counted_prompts(own | {"task": "jsonl:copy/train.jsonl"})[0] == 2
    assert counted_prompts({"integration": {"name": "trl"}})[1].startswith(
        "every 1,000 prompts (the run does not store"
    )
