"""Mistakes on the command line: status 2 and one sentence, which says what was received and what to do."""

import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from scoregram import cli
from tests.training_cases import save_policy

pytestmark = pytest.mark.usefixtures("unchecked_shapes")

DUMP = '{"prompt": "1+2=", "completion": "3", "reward": 1.0}\n{"prompt": "1+2=", "completion": "4", "reward": 0.0}\n'
TASKS = """
from scoregram.tasks import Problem, Reply, Task, rewarded_by_environment


class Environment:
    def reset(self, problem, seed):
        return None

    def step(self, text):
        return Reply(done=True)


class Stepless:
    def reset(self, problem, seed):
        return problem.prompt


def without_seed(): ...
def of_nothing(seed): ...
def changed(seed, **changes):
    problems = [Problem(str(number), "1+2=", "3") for number in range(4)]
    settings = {"name": "own", "train": problems[:3], "test": problems[3:], "reward": rewarded_by_environment}
    settings |= {"max_new_tokens": 3, "max_turns": 2, "environment": Environment}
    return Task(**settings | changes)


def no_text(seed): return changed(seed)
def no_problem(seed): return changed(seed, train=[])
def no_test(seed): return changed(seed, test=[])
def no_turn(seed): return changed(seed, max_turns=0)
def no_token(seed): return changed(seed, max_new_tokens=0)
def no_reward(seed): return changed(seed, reward=None)
def no_environment(seed): return changed(seed, environment=3)
def no_step(seed): return changed(seed, environment=Stepless)
def one_id(seed): return changed(seed, train=[Problem("same", "1+2=", "3"), Problem("same", "1+3=", "4")])
"""
TRAIN = "train --out run --device cpu --model policy --task arithmetic:3 --prompt plain --steps 2"
MEASURE = "measure --model policy --rollouts dump.jsonl --out measured"
COMPARE = "compare --out compared --model policy --device cpu --jobs 1"
BENCH = "bench gram --shape llama-tiny --rollouts 2 --tokens 4 --repeats 1 --ways gram"

MISTAKES = {
    f"{TRAIN} --group-size x": "train --group-size: must be a whole number or auto, got 'x'. Check the value.",
    f"{TRAIN} --group-size=8.0": "train --group-size: must be a whole number or auto, got '8.0'.",
    f"{TRAIN} --batch_size many": "train --batch_size: must be a whole number, got 'many'.",
    f"{TRAIN} --learning-rate 1e-4x": "train --learning-rate: must be a number, got '1e-4x'.",
    f"{COMPARE} --target high": "compare --target: must be a number or None, got 'high'.",
    f"{TRAIN} --method gropo": "train --method: the name must be one of .*, got 'gropo'. Did you mean 'grpo'?",
    f"{TRAIN} --method GRPO_verl": "got 'GRPO_verl'. Did you mean 'grpo-verl'?",
    f"{TRAIN} --estimator rlo": "train --estimator: the name must be one of .*, got 'rlo'. Did you mean 'rloo'?",
    f"{TRAIN} --objective GSPO": "train --objective: the name must be one of .*, got 'GSPO'. Did you mean 'gspo'?",
    f"{COMPARE} --methods grpo,rlooo": "compare --methods: the name must be one of .*, got 'rlooo'. Did you mean 'r",
    f"{COMPARE} --methods grpo:learningrate=1": "got 'learningrate=1'. Did you mean 'learning_rate'?",
    f"{COMPARE} --methods grpo:optimizer=adam": "must be one of adamw, sgd, got 'adam'. Did you mean 'adamw'?",
    f"{TRAIN} --lora-rank 2 --lora-alpha 0": "lora_alpha must be positive and finite, got 0.0",
    f"{TRAIN} --lora-rank 2 --lora-alpha nan": "lora_alpha must be positive and finite, got nan",
    f"{TRAIN} --autocast --dtype float16": "does not mix with float16, got float16. Choose dtype float32 or bfloat16",
    f"{TRAIN} --optimizer sgd --momentum nan": "train --momentum: must be finite and at least 0, got nan",
    f"{TRAIN} --optimizer sgd --momentum 1": "train --momentum: must be below 1, got 1.0",
    f"{TRAIN} --threads 100000": "threads: must be at most 1024, got 100000",
    f"{TRAIN} --estimator ''": "train --estimator: the name must be one of .*, got ''",
    f"{TRAIN} --objective ''": "train --objective: the name must be one of .*, got ''",
    f"{TRAIN} --device meta": "device must be auto, cpu, cuda or cuda:N, got 'meta'",
    f"{TRAIN} --attention nope": "attention must be an implementation .*, got 'nope' .* Choose sdpa or eager.",
    f"{TRAIN} --model ''": "load_policy: a model must be named, got ''. Pass a hub id",
    f"{TRAIN} --model .": "the folder . must hold config.json, or adapter_config.json, got neither. Pass a hub id",
    f"{TRAIN} --task python:own_tasks:without_seed": "must take one argument, the seed, got too many positional",
    f"{TRAIN} --task python:own_tasks:of_nothing": "own_tasks:of_nothing must return a Task, got NoneType",
    f"{TRAIN} --task python:own_tasks:no_problem": "train of the task must hold problems, got none",
    f"{TRAIN} --task python:own_tasks:no_test": "train --eval-every: own must have test problems, got none",
    f"{TRAIN} --task python:own_tasks:no_test --every-rollouts 9": "must have test problems, got none. Add some.",
    f"{TRAIN} --task python:own_tasks:no_turn": "max_turns of the task must be at least 1, got 0",
    f"{TRAIN} --task python:own_tasks:no_token": "max_new_tokens of the task must be at least 1, got 0",
    f"{TRAIN} --task python:own_tasks:no_reward": "reward of the task must be a function, got None",
    f"{TRAIN} --task python:own_tasks:no_environment": "environment of the task must be callable, got 3",
    f"{TRAIN} --task python:own_tasks:one_id": "the ids in train of the task must differ, got 'same' more than once",
    f"{TRAIN} --measure-every 5": "train --measure-every: acts only with at least that many steps, .* steps 2",
    f"{TRAIN} --method ppo --critic-warmup 2": "a method with a critic, .* and more steps than --critic-warmup",
    f"{TRAIN} --warmup-steps 9 --lr-schedule linear": "acts only with a warm-up that ends before the last step",
    f"{TRAIN} --layers none --layer-detail kinds": "train --layer-detail: acts only with per-layer Grams",
    f"{TRAIN} --probe-every 1 --probe-temperatures 1 1.0": "must name each value once, got 1.0, 1.0",
    f"{TRAIN} --report-to tensorboard tensorboard": "--report-to: must name each value once, got tensorboard, tensor",
    f"{MEASURE} --estimator dump": "dump needs advantages in the dump, got none at .*dump.jsonl line 1. Leave it out",
    f"{MEASURE} --reward-columns ''": "there must be a reward called '', got no reward functions",
    f"{MEASURE} --prompt chat": "needs a tokenizer with a chat template, got none. Choose --prompt plain.",
    f"{MEASURE} --dtype float16 --autocast": "does not mix with float16",
    f"{COMPARE} --steps 5": "compare: has no option --steps, got --steps. Give --rollouts, the budget of",
    f"{COMPARE} --steps=5": "compare: has no option --steps, got --steps=5. Give --rollouts",
    f"{COMPARE} --method grpo": "compare: has no option --method, got --method. Give --methods",
    f"{COMPARE} --measure_every 2": "compare: has no option --measure-every, got --measure_every. Give --every-r",
    f"{COMPARE} --methods grpo,,rloo": "must name a method between commas, got 'grpo,,rloo'. Leave out one comma",
    f"{COMPARE} --methods grpo,": "must name a method between commas, got 'grpo,'",
    f"{COMPARE} --methods grpo,pass-at-k:best_of=9": "pass-at-k:best_of=9: train --best-of: must be at most",
    f"{COMPARE} --methods grpo,vineppo --task calculator": "vineppo: train --method: vineppo needs a task of",
    f"{COMPARE} --target 80": "must be an accuracy .* as the rewards of arithmetic:4 are 0 or 1, got 80",
    f"{COMPARE} --target 0 --task gsm8k:words": "--target: must be an accuracy above 0 .*, got 0. Write 0.8",
    f"{COMPARE} --methods grpo:": "a colon must be followed by OPTION=VALUE, got 'grpo:'. Write grpo.",
    f"{COMPARE} --methods grpo:beta=0.1,grpo:beta=0.10": "must name each method once, got grpo:beta=0.1 and grpo:beta",
    f"{COMPARE} --methods grpo:beta=0.1:beta=0.2": "an option of grpo must be given once, got beta twice",
    f"{COMPARE} --methods grpo:beta=x": "grpo:beta must be a number, got 'x'",
    f"{COMPARE} --methods grpo:push=yes": "grpo:push must be true or false, got 'yes'",
    f"{COMPARE} --methods grpo,rloo --best-of 3": "--best-of: acts only with the method pass-at-k, got method grpo",
    f"{COMPARE} --methods rloo,grpo:critic_updates=3": "grpo:critic_updates=3: --critic-updates: acts only with",
    "compare --out policy": "compare --out: policy must be empty, got config.json, .* Choose a new or an empty folder.",
    "replicate --out policy": "replicate --out: policy must be empty, got config.json, .* Choose a new",
    "replicate --out dump.jsonl": "replicate --out: dump.jsonl must be writable, got Not a directory",
    "verify . --remeasure -1": "verify --remeasure: must be at least 0, got -1",
    "verify . --start policy": "verify --start: acts only with --remeasure, got remeasure 0. Leave it out.",
    "verify . --device cuda": "verify --device: acts only with --remeasure, got remeasure 0. Leave it out.",
    "demo ''": "demo: must be one of .*, got ''",
    "advise LICENSE": "LICENSE must be a log .*, got a name without an ending. Convert it.",
    f"{BENCH} --out .": "bench --out: must be a file to write, got the folder",
    f"{BENCH} --plot .": "bench --plot: must be a file to write, got the folder",
    f"{BENCH} --plot ratios": "bench gram --plot: must end in .svg, .png, .pdf, got ratios",
    f"{BENCH} --out dump.jsonl/bench.json": "bench --out: dump.jsonl/bench.json must be writable, got File exists",
    f"{BENCH} --threads 100000": "threads: must be at most 1024, got 100000",
    "bench train --learning-rate nan": "bench train --learning-rate: must be finite and at least 0, got nan",
    "bench train --max-new-tokens -1": "bench train --max-new-tokens: must be at least 0, got -1",
    "bench preset --micro-batch-sizes -1": "bench preset --micro-batch-sizes: must be at least 0, got -1",
    "bench trl --checkpointing": "bench trl --checkpointing: must be False, True or both, got nothing",
}
"""Command line → what it says."""


@pytest.fixture(scope="module")
def here(tmp_path_factory) -> Path:
    """A folder with a policy, a dump without advantages, a file without an ending and functions that are no tasks."""
    folder = tmp_path_factory.mktemp("here")
    save_policy(folder / "policy")
    (folder / "dump.jsonl").write_text(DUMP, encoding="utf-8")
    (folder / "own_tasks.py").write_text(TASKS, encoding="utf-8")
    (folder / "words").mkdir()
    for split in ("train", "test"):
        (folder / "words" / f"{split}.jsonl").write_text(
            '{"question": "1+1?", "answer": "so #### 2"}\n', encoding="utf-8"
        )
    (folder / "LICENSE").write_text("none", encoding="utf-8")
    return folder


def told(arguments: Sequence[str], capsys: pytest.CaptureFixture[str]) -> str:
    """What a refused command prints to stderr, without the frame that tyro draws."""
    try:
        status = cli.main(list(arguments))
    except SystemExit as left:
        status = left.code
    assert status == 2
    return " ".join(re.sub(r"[^\w\s!-~…]", " ", capsys.readouterr().err).split())


def contents(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if "__pycache__" not in path.parts}


@pytest.mark.parametrize("line", MISTAKES, ids=str)
def test_a_mistake_is_one_sentence_and_leaves_nothing_behind(line, here, monkeypatch, capsys):
    monkeypatch.chdir(here)
    monkeypatch.setenv("COLUMNS", "1000")
    before = contents(here)
    assert re.search(MISTAKES[line], told([word.strip("'") for word in line.split()], capsys))
    assert contents(here) == before


def test_an_environment_that_starts_without_a_text_is_named(here, monkeypatch, capsys):
    monkeypatch.chdir(here)
    line = f"{TRAIN} --task python:own_tasks:no_text".replace("--out run", "--out started")
    assert "environment: Environment.reset must return a text, got NoneType" in told(line.split(), capsys)


def test_an_environment_without_step_is_named(here, monkeypatch, capsys):
    monkeypatch.chdir(here)
    line = f"{TRAIN} --task python:own_tasks:no_step".replace("--out run", "--out begun")
    says = "environment: Stepless must have the methods reset and step, got no step. Define reset(self, problem, seed)"
    assert says in told(line.split(), capsys)


@pytest.mark.parametrize("command", ["compare", "replicate"])
def test_a_command_that_failed_before_its_first_run_does_not_bind_the_folder(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for wrong in (["--task", "arithmatic"], ["--task", "arithmetic:99"]):
        said = told([command, "--out", "made", *wrong], capsys)
        assert "must be one of" in said or "from 2 to 16" in said  # not that the folder has other settings
