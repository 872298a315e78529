"""Real short runs: every method, the same numbers for the same seed, stops, failures and resumption."""

import io
import math
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from itertools import pairwise
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from rich.console import Console
from safetensors.torch import load_file
from scipy.stats import binomtest

from scoregram import cli
from scoregram.checks import NotFiniteError, ScoregramError
from scoregram.gram import gradient_sketch
from scoregram.runs import open_run
from scoregram.tasks import load_task
from scoregram.training import loop
from scoregram.training.checkpoint import save_checkpoint
from scoregram.training.collect import drawn_problems, seeded_generator
from scoregram.training.config import TrainConfig
from scoregram.training.evaluate import Evaluation
from scoregram.training.loop import train
from scoregram.training.methods import METHODS
from scoregram.training.update import learning_rate
from tests.forked import started
from tests.training_cases import JUDGE, config_for, save_policy, without_times


@pytest.fixture(scope="module")
def policy(tmp_path_factory) -> Path:
    return save_policy(tmp_path_factory.mktemp("policy"))


def weights_of(run: Path) -> dict[str, torch.Tensor]:
    latest = open_run(run).latest_checkpoint
    assert latest is not None
    return load_file(latest[1] / "model" / "model.safetensors")


def same_weights(one: Path, other: Path) -> bool:
    first, second = weights_of(one), weights_of(other)
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("method", sorted(METHODS))
def test_every_method_trains_and_writes_a_valid_run(method, policy, tmp_path):
    config = config_for(policy, tmp_path / "run", method=method, inner_updates=2)
    trained = train(config)
    assert trained.step == 3 and not trained.interrupted
    run = open_run(tmp_path / "run")
    assert not run.notes
    metrics = list(run.metrics())
    assert [line["step"] for line in metrics] == [0, 1, 2, 3]
    assert {line["step"] for line in metrics if "eval/accuracy" in line} == {0, 2, 3}
    groups = list(run.groups())
    assert {group.step for group in groups} == {1, 2, 3}
    for group in groups:
        assert group.gram is not None and group.by_layer
        torch.testing.assert_close(sum(group.by_layer.values()).double(), group.gram, rtol=1e-5, atol=1e-5)  # pyright: ignore[reportAttributeAccessIssue]
    assert {rollout.step for rollout in run.rollouts()} == {2}
    problems = {problem.id: problem.answer for problem in load_task("arithmetic:3", seed=0).train}
    assert all(rollout.answer == problems[rollout.prompt_id] for rollout in run.rollouts())
    assert set(run.checkpoints) == {2, 3}
    assert run.config["method"] == method


@pytest.mark.parametrize("size", [1, 2, 3])
def test_small_groups_are_measured_too(size, policy, tmp_path):
    train(config_for(policy, tmp_path / "run", method="reinforce", group_size=size, batch_size=6, steps=1))
    assert "gram/update_norm" in list(open_run(tmp_path / "run").metrics())[1]


def test_without_blocks_between_prompts_the_groups_are_the_same(policy, tmp_path):
    for name, between in (("whole", True), ("groups", False)):
        train(config_for(policy, tmp_path / name, steps=1, between_prompts=between))
    whole, groups = open_run(tmp_path / "whole"), open_run(tmp_path / "groups")
    for one, other in zip(whole.groups(), groups.groups(), strict=True):
        torch.testing.assert_close(one.gram, other.gram, rtol=1e-4, atol=1e-4)
    line = list(groups.metrics())[1]
    assert math.isnan(line["gram/snr"]) and not math.isnan(line["group/effective_rank"])


def test_the_first_update_has_the_norm_that_the_gram_predicts(policy, tmp_path):
    train(config_for(policy, tmp_path / "run", method="rloo"))
    for line in list(open_run(tmp_path / "run").metrics())[1:]:
        assert line["gram/update_norm"] == pytest.approx(line["grad_norm"], rel=1e-4)
        assert line["sampler_gap"] < 1e-4


@pytest.mark.parametrize("changes", [{}, {"inner_updates": 2, "beta": 0.1}, {"lora_rank": 2}, {"method": "optimal"}])
def test_measured_steps_keep_the_sketch_of_their_first_gradient_before_clipping(changes, policy, tmp_path, monkeypatch):
    seen, apply = [], loop.apply_gradient

    def watched(optimizer: Any, model: Any, rate: float, max_norm: float) -> float:
        seen.append(gradient_sketch({name: one.grad for name, one in model.named_parameters() if one.requires_grad}))
        return apply(optimizer, model, rate, max_norm)

    monkeypatch.setattr(loop, "apply_gradient", watched)
    train(config_for(policy, tmp_path / "run", steps=4, measure_every=2, max_grad_norm=1e-3, **changes))
    steps, sketches = open_run(tmp_path / "run").update_sketches()
    assert steps.tolist() == [2, 4] and all(one.any() for one in sketches)
    first = seen[:: changes.get("inner_updates", 1)]
    assert sketches.tolist() == [first[step - 1].float().tolist() for step in steps]


def test_the_same_seed_gives_the_same_bits_and_another_one_does_not(policy, tmp_path):
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        train(config_for(policy, tmp_path / name, seed=seed, inner_updates=2, beta=0.1))
    a, b, c = (without_times(list(open_run(tmp_path / name).metrics())) for name in "abc")
    assert a == b and a != c
    assert same_weights(tmp_path / "a", tmp_path / "b") and not same_weights(tmp_path / "a", tmp_path / "c")


@pytest.mark.parametrize("changes", [{}, {"optimizer": "sgd", "momentum": 0.9}, {"lora_rank": 2}])
def test_a_resumed_run_is_as_if_never_interrupted(changes, policy, tmp_path):
    settings = {"steps": 4, "method": "dapo"} | changes
    train(config_for(policy, tmp_path / "whole", **settings))
    train(config_for(policy, tmp_path / "halves", **(settings | {"steps": 2})))
    train(config_for(policy, tmp_path / "halves", **settings, resume=True))
    whole, halves = open_run(tmp_path / "whole"), open_run(tmp_path / "halves")
    assert (
        without_times(list(whole.metrics()))
        == without_times(list(halves.metrics()))[:3] + without_times(list(halves.metrics()))[3:]
    )
    assert set(whole.checkpoints) == set(halves.checkpoints)
    if not changes.get("lora_rank"):
        assert same_weights(tmp_path / "whole", tmp_path / "halves")


def start(policy: Path, out: Path, *, resume: bool) -> ForkServerProcess:
    config = config_for(policy, out, steps=6, resume=resume)
    return started(train, config, log=out.with_suffix(".log"))


def wait_for_step(process: ForkServerProcess, out: Path, step: int, patience: float = 120.0) -> None:
    metrics, end = out / "metrics.jsonl", time.monotonic() + patience
    while process.is_alive() and time.monotonic() < end:
        if metrics.exists() and metrics.read_text().count("\n") > step:
            return
        time.sleep(0.005)


def test_a_run_killed_at_any_moment_goes_on_to_the_same_numbers(policy, tmp_path):
    train(config_for(policy, tmp_path / "whole", steps=6))
    out, resume = tmp_path / "killed", False
    for step, delay in ((0, 0.0), (3, 0.03)):
        process = start(policy, out, resume=resume)
        wait_for_step(process, out, step)
        time.sleep(delay)
        process.kill()
        process.join()
        assert process.exitcode in {-signal.SIGKILL, 0}  # 0: the run ended before the kill
        resume = (out / "config.yaml").exists()
        if resume:
            open_run(out)
    process = start(policy, out, resume=resume)
    process.join(timeout=300)
    assert process.exitcode == 0, out.with_suffix(".log").read_text()
    whole, killed = open_run(tmp_path / "whole"), open_run(out)
    assert without_times(list(whole.metrics())) == without_times(list(killed.metrics()))
    assert same_weights(tmp_path / "whole", out)
    for one, other in zip(whole.groups(), killed.groups(), strict=True):
        assert one.gram is not None and other.gram is not None and torch.equal(one.gram, other.gram)
    for one, other in zip(whole.update_sketches(), killed.update_sketches(), strict=True):
        assert len(one) == 6 and one.tolist() == other.tolist()


def test_ctrl_c_ends_after_the_step_with_a_checkpoint(policy, tmp_path):
    process = start(policy, tmp_path / "run", resume=False)
    wait_for_step(process, tmp_path / "run", 1)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGINT)
    process.join(timeout=300)
    said = (tmp_path / "run.log").read_text()
    assert process.exitcode == 0, said
    run = open_run(tmp_path / "run")
    last = list(run.metrics())[-1]["step"]
    latest = run.latest_checkpoint
    assert latest is not None and latest[0] == last
    assert last == 6 or "continue with --resume" in said


def test_a_step_that_is_not_finite_stops_and_is_kept(policy, tmp_path):
    broken = save_policy(tmp_path / "broken", fill={"model.layers.1.mlp.up_proj.weight": float("nan")})
    with pytest.raises(ScoregramError, match="finite"):
        train(config_for(broken, tmp_path / "run", eval_every=0))


def test_an_infinite_reward_is_refused_and_a_broken_gradient_can_be_passed_over(policy, tmp_path, monkeypatch):
    real = loop.apply_gradient
    seen = []

    def once_broken(optimizer, model, rate, max_norm):
        seen.append(rate)
        if len(seen) == 2:
            next(p for p in model.parameters() if p.grad is not None).grad.fill_(float("nan"))
        return real(optimizer, model, rate, max_norm)

    monkeypatch.setattr(loop, "apply_gradient", once_broken)
    with pytest.raises(NotFiniteError, match=r"step 2: .*embed_tokens.*failures"):
        train(config_for(policy, tmp_path / "stop"))
    kept = torch.load(tmp_path / "stop" / "failures" / "step-2" / "step.pt", weights_only=True)
    assert "must be finite" in kept["message"] and kept["input_ids"].shape[0] == 12
    seen.clear()
    trained = train(config_for(policy, tmp_path / "skip", on_not_finite="skip"))
    assert trained.step == 3
    assert [line.get("skipped") for line in open_run(tmp_path / "skip").metrics()] == [None, None, 1, None]


def breaking_update(monkeypatch, broken):
    """From now on the gradient of the updates with these numbers, counted from 1, is not finite."""
    real, seen = loop.apply_gradient, []

    def sometimes_broken(optimizer, model, rate, max_norm):
        seen.append(rate)
        if len(seen) in broken:
            next(p for p in model.parameters() if p.grad is not None).grad.fill_(float("nan"))
        return real(optimizer, model, rate, max_norm)

    monkeypatch.setattr(loop, "apply_gradient", sometimes_broken)


def test_a_run_whose_last_step_is_skipped_is_evaluated_and_saved(policy, tmp_path, monkeypatch):
    breaking_update(monkeypatch, {3})
    train(config_for(policy, tmp_path / "run", on_not_finite="skip", eval_every=100))
    run = open_run(tmp_path / "run")
    assert [line["step"] for line in run.metrics() if "eval/accuracy" in line] == [0, 3]
    assert run.latest_checkpoint is not None and run.latest_checkpoint[0] == 3


def test_an_inner_update_that_is_not_finite_ends_its_step_and_keeps_the_earlier_ones(policy, tmp_path, monkeypatch):
    breaking_update(monkeypatch, {2})
    said = Console(file=io.StringIO(), width=300)
    changes = {"steps": 1, "inner_updates": 3, "eval_every": 0, "rollouts_every": 0}
    train(config_for(policy, tmp_path / "cut", on_not_finite="skip", **changes), console=said)
    assert isinstance(said.file, io.StringIO) and "step 1 ended after 1 of 3 updates" in said.file.getvalue()
    (line,) = open_run(tmp_path / "cut").metrics()
    assert "skipped" not in line and line["grad_norm"] > 0
    monkeypatch.undo()
    train(config_for(policy, tmp_path / "one", **changes | {"inner_updates": 1}))
    cut, one = (
        load_file(tmp_path / name / "checkpoints" / "step-1" / "model" / "model.safetensors") for name in ("cut", "one")
    )
    assert cut.keys() == one.keys() and all(torch.equal(cut[name], one[name]) for name in cut)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"group_size": 24}, "whole groups"),
        ({"group_size": 5}, "whole groups"),
        ({"micro_batch_size": 6}, "whole groups"),
        ({"method": "no-such-method"}, "must be one of"),
        ({"temperature": 0.0}, "positive"),
        ({"steps": 0}, "at least 1"),
        ({"learning_rate": float("nan")}, "finite"),
        ({"resume": True, "overwrite": True}, "must not be given together"),
        ({"sampler": "vllm", "lora_rank": 2}, "without adapters"),
    ],
)
def test_settings_that_cannot_work_are_refused_at_once(changes, says, policy, tmp_path):
    with pytest.raises(ScoregramError, match=says):
        config_for(policy, tmp_path / "run", **changes)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"estimator": "no-such-estimator"}, "must be one of"),
        ({"objective": "no-such-loss"}, "train --objective"),
        ({"objective": "dpo", "estimator": "gae"}, "credit for tokens needs one of"),
        ({"group_size": 1, "method": "rloo"}, "at least 2 rollouts"),
        ({"max_new_tokens": 600}, "context"),
        ({"kl": "k9"}, "k1"),
        ({"optimizer": "adamw", "adam_betas": (2.0, 0.9)}, "accept its settings"),
        ({"report_to": ("paper",)}, "tensorboard"),
        ({"attention": "no_such_attention"}, "attention must be an implementation"),
        ({"resume": True}, "run"),
    ],
)
def test_what_cannot_work_is_said_before_work_is_lost(changes, says, policy, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ScoregramError, match=says):
        train(config_for(policy, tmp_path / "run", **changes))
    assert not (tmp_path / "run" / "config.yaml").exists(), "no run is begun that cannot go on"


def test_a_missing_sampler_is_said_before_the_policy_is_loaded(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(ScoregramError, match=r"needs vllm, got .* pip install vllm"):
        train(config_for(tmp_path / "no policy", tmp_path / "run", sampler="vllm"))


def test_a_run_is_not_written_over_unasked(policy, tmp_path):
    config = config_for(policy, tmp_path / "run", steps=1, eval_every=0)
    train(config)
    with pytest.raises(ScoregramError, match="Resume it, overwrite it"):
        train(config)
    train(config_for(policy, tmp_path / "run", steps=1, eval_every=0, overwrite=True, seed=3))
    assert open_run(tmp_path / "run").config["seed"] == 3


def test_another_config_cannot_resume_a_run(policy, tmp_path):
    train(config_for(policy, tmp_path / "run", steps=1))
    with pytest.raises(ScoregramError, match="learning_rate"):
        train(config_for(policy, tmp_path / "run", steps=2, learning_rate=0.5, resume=True))


def test_a_run_is_resumed_from_the_command_line_by_its_folder_alone(policy, tmp_path, monkeypatch, capsys, request):
    """The documented commands: every other setting is the run's own, and one that differs is refused."""
    monkeypatch.chdir(tmp_path)
    train(config_for(policy, Path("runs/rloo"), method="rloo", steps=2, lora_targets=("q_proj",)))
    page = (Path(__file__).parent.parent / "docs" / "training.md").read_text()
    documented = [line.split("#")[0].split()[1:] for line in page.splitlines() if "train --resume" in line[:25]]
    assert len(documented) == 2
    for words, steps in zip(documented, (2, 400), strict=True):
        command = cli.parsed_command(words)
        expected = config_for(policy, Path("runs/rloo"), method="rloo", steps=steps, lora_targets=("q_proj",))
        assert isinstance(command, TrainConfig) and command.record() == {**expected.record(), "resume": True}
    assert cli.main([*documented[0], "--steps", "3"]) == 0
    assert capsys.readouterr().out.endswith("step 3 of 3\n")
    assert cli.main([*documented[0], "--steps", "3"]) == 0  # nothing is left to do
    for words, says in (
        ("--group-size 2", "group_size: 4 in the run, 2 requested. Leave these settings out"),
        ("--steps 1", "steps must be at least 3, which are done"),
        ("--out runs/none", "must be a run folder"),
    ):
        assert cli.main([*documented[0], *words.split()]) == 2
        assert says in capsys.readouterr().err
    request.getfixturevalue("unchecked_shapes")  # nothing but of_run checks a user's types
    other = yaml.safe_load(Path("runs/rloo/config.yaml").read_text())
    for changes, says in (
        ({"colour": "red"}, "got colour"),
        ({"trust_remote_code": True}, "got trust_remote_code"),  # a run from elsewhere must not grant it
        ({"steps": "many"}, "must have the right types"),
    ):
        Path("runs/rloo/config.yaml").write_text(yaml.dump(other | {"config": other["config"] | changes}))
        with pytest.raises(ScoregramError, match=says):
            TrainConfig.of_run("runs/rloo")


WEIGHTS = "model/model.safetensors"
DAMAGE = {
    "flipped bit in the weights": lambda at: (at / WEIGHTS).write_bytes(flipped((at / WEIGHTS).read_bytes(), -100)),
    "flipped bit in the optimiser": lambda at: (at / "state.pt").write_bytes(
        flipped((at / "state.pt").read_bytes(), 20000)
    ),
    "header": lambda at: (at / WEIGHTS).write_bytes(flipped((at / WEIGHTS).read_bytes(), 3)),
    "cut weights": lambda at: os.truncate(at / WEIGHTS, 1000),
    "cut optimiser": lambda at: os.truncate(at / "state.pt", 1000),
    "empty optimiser": lambda at: os.truncate(at / "state.pt", 0),
    "no optimiser": lambda at: (at / "state.pt").unlink(),
    "folder": lambda at: ((at / "state.pt").unlink(), (at / "state.pt").mkdir()),
    "no model": lambda at: shutil.rmtree(at / "model"),
    "no position": lambda at: torch.save({"step": 2}, at / "state.pt"),
    "listing": lambda at: (at / "SHA256SUMS").write_bytes(b"\xff\n"),
}
UNSEEN_WITHOUT_HASHES = {"flipped bit in the weights", "flipped bit in the optimiser", "listing"}


def flipped(content: bytes, at: int) -> bytes:
    changed = bytearray(content)
    changed[at] ^= 1
    return bytes(changed)


def test_a_damaged_checkpoint_is_refused_and_the_one_before_it_resumes(policy, tmp_path):
    """With hashes every damage is found; a checkpoint of an older version, without them, gives a sentence or opens."""
    train(config_for(policy, tmp_path / "whole", steps=3))
    train(config_for(policy, tmp_path / "run", steps=2))
    resumed = config_for(policy, tmp_path / "run", steps=3, resume=True)
    checkpoint = tmp_path / "run" / "checkpoints" / "step-2"
    assert subprocess.run(["sha256sum", "--check", "--quiet", "SHA256SUMS"], cwd=checkpoint).returncode == 0
    shutil.copytree(checkpoint, tmp_path / "kept")
    for name, damage in DAMAGE.items():
        for is_old in (False, True):
            shutil.rmtree(checkpoint)
            shutil.copytree(tmp_path / "kept", checkpoint)
            damage(checkpoint)
            if is_old:
                (checkpoint / "SHA256SUMS").unlink()
                if name in UNSEEN_WITHOUT_HASHES:
                    continue
            with pytest.raises(ScoregramError, match=r"step-2(/model)? must .*, got .*\. (Restore|Start)"):
                train(resumed)
    shutil.rmtree(checkpoint)
    assert train(resumed).step == 3  # from step 1
    assert same_weights(tmp_path / "whole", tmp_path / "run")


def test_a_checkpoint_without_hashes_still_resumes_with_a_remark(policy, tmp_path):
    train(config_for(policy, tmp_path / "run", steps=1))
    (tmp_path / "run" / "checkpoints" / "step-1" / "SHA256SUMS").unlink()
    told = Console(file=io.StringIO())
    assert train(config_for(policy, tmp_path / "run", steps=2, resume=True), console=told).step == 2
    assert isinstance(told.file, io.StringIO) and "step 1 has no SHA256SUMS" in told.file.getvalue()


def test_a_disk_that_fills_while_the_optimiser_is_written_is_a_sentence(policy, tmp_path):
    """A limit on the file size between the weights (26 kB) and the optimiser (62 kB) stands for the full disk."""
    train(config_for(policy, tmp_path / "run", steps=1))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, before[1]))
    try:
        with pytest.raises(ScoregramError, match="step-2 must be writable, got File too large"):
            train(config_for(policy, tmp_path / "run", steps=2, resume=True))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert set(open_run(tmp_path / "run").checkpoints) == {1}
    assert train(config_for(policy, tmp_path / "run", steps=2, resume=True)).step == 2


@pytest.mark.parametrize("changes", [{"keep_checkpoints": 1}, {"keep_checkpoints": 0}, {"checkpoint_every": 3}])
def test_the_space_asked_for_is_that_of_the_most_checkpoints_at_once(changes, policy, tmp_path, monkeypatch):
    counts = []

    def counting(folder: Path, *rest: Any) -> None:
        counts.append(len(list(folder.parent.iterdir())))
        save_checkpoint(folder, *rest)

    monkeypatch.setattr(loop, "save_checkpoint", counting)
    config = config_for(policy, tmp_path / "run", steps=4, eval_every=0, **changes)
    asked = loop.checkpoints_to_come(config)
    train(config)
    assert asked == max(counts)
    resumed = config_for(policy, tmp_path / "run", steps=8, eval_every=0, resume=True, **changes)
    asked, present = loop.checkpoints_to_come(resumed), len(open_run(tmp_path / "run").checkpoints)
    counts.clear()
    train(resumed)
    assert asked >= max(counts) - present


@pytest.mark.parametrize("name", ["a" * 300, "/".join(["b" * 200] * 25), "a\0b"])
def test_a_name_that_no_disk_takes_is_a_sentence(name, policy, tmp_path):
    for resume in (False, True):
        with pytest.raises(ScoregramError, match=r"a path must (not be too long|consist of)"):
            train(config_for(policy, tmp_path / name, resume=resume))


def test_problems_are_drawn_in_whole_epochs_whatever_the_split():
    problems = load_task("arithmetic:3", seed=0).train[:7]
    whole = drawn_problems(problems, 0, 21, seed=4)
    parts = [problem for start in (0, 5, 13) for problem in drawn_problems(problems, start, 8 if start else 5, seed=4)]
    assert whole == parts
    epochs = [{problem.id for problem in whole[start : start + 7]} for start in (0, 7, 14)]
    assert all(len(epoch) == 7 for epoch in epochs)
    assert whole[:7] != whole[7:14] and whole != drawn_problems(problems, 0, 21, seed=5)


def test_streams_of_random_numbers_differ_by_purpose_step_and_seed():
    streams = [seeded_generator(*key) for key in ((0, "a", 1), (0, "b", 1), (0, "a", 2), (1, "a", 1))]
    assert len({float(torch.rand(1, generator=stream)) for stream in streams}) == 4


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_the_learning_rate_rises_then_keeps_its_shape(schedule, tmp_path):
    config = TrainConfig(out=tmp_path, steps=10, warmup_steps=3, learning_rate=1.0, lr_schedule=schedule)
    rates = [learning_rate(step, config) for step in range(1, 11)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    falls = [late - early for early, late in pairwise(rates[3:])]
    assert all(fall == 0 for fall in falls) if schedule == "constant" else all(fall < 0 for fall in falls)
    assert rates[-1] > 0


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_the_warm_up_of_the_policy_begins_after_that_of_its_critic(schedule, tmp_path):
    settings = {"out": tmp_path, "warmup_steps": 3, "learning_rate": 1.0, "lr_schedule": schedule}
    alone, after = TrainConfig(steps=6, **settings), TrainConfig(steps=10, critic_warmup=4, **settings)
    expected = [0.0] * 4 + [learning_rate(step, alone) for step in range(1, 7)]
    assert [learning_rate(step, after) for step in range(1, 11)] == pytest.approx(expected)


@pytest.mark.parametrize(("right", "n"), [(0, 20), (7, 20), (20, 20), (130, 512)])
def test_the_interval_of_an_accuracy_is_wilsons(right, n):
    found = Evaluation(tuple([1.0] * right + [0.0] * (n - right)))
    expected = binomtest(right, n).proportion_ci(method="wilson")
    assert found.accuracy == right / n
    assert found.interval == pytest.approx((expected.low, expected.high), abs=1e-12)


def test_the_judge_is_found_by_name():
    assert load_task("arithmetic:3", reward=JUDGE).rewards(load_task("arithmetic:3").train[:1], ["a"]) == [1.0]


def test_probes_measure_the_same_problems_and_change_nothing(policy, tmp_path):
    train(config_for(policy, tmp_path / "plain", final_checkpoint=True))
    probing = {"probe_every": 2, "probe_problems": 3, "probe_temperatures": (1.0, 0.7), "batches_every": 2}
    train(config_for(policy, tmp_path / "probed", layer_detail="kinds", keep_prompts=False, **probing))
    plain, probed = open_run(tmp_path / "plain"), open_run(tmp_path / "probed")
    assert same_weights(tmp_path / "plain", tmp_path / "probed")
    groups = [group for group in probed.groups() if group.kind != "train"]
    kinds = ["fixed", "fixed, sampled at 0.7, scored at 0.7", "fixed, sampled at 0.7, scored at 1"]
    assert [(group.step, group.kind) for group in groups[::3]] == [(step, kind) for step in (0, 2) for kind in kinds]
    asked = [problem.id for problem in load_task("arithmetic:3", seed=0).test[-3:]]
    assert [group.prompt_id for group in groups] == asked * 6
    sharp, flat = groups[3:6], groups[6:9]
    assert all(torch.equal(one.rewards, other.rewards) for one, other in zip(sharp, flat, strict=True))
    for one, other in zip(sharp, flat, strict=True):
        assert one.gram is not None and other.gram is not None and not torch.allclose(one.gram, other.gram)
    for group in probed.groups():
        assert group.prompt is None and "model.layers.*.mlp.up_proj" in group.by_layer
        torch.testing.assert_close(sum(group.by_layer.values()).double(), group.gram, rtol=1e-5, atol=1e-5)  # pyright: ignore[reportAttributeAccessIssue]
    for one, other in zip(plain.groups(), (g for g in probed.groups() if g.kind == "train"), strict=True):
        assert one.gram is not None and other.gram is not None and torch.equal(one.gram, other.gram)
    assert "probe/effective_rank" in probed.metrics()[0]
    written = [(batch.step, batch.kind) for batch in probed.batches()]
    assert written == [(0, "fixed"), (2, "train"), (2, "fixed")]
    batch = next(batch for batch in probed.batches() if batch.kind == "train")
    blocks = [group.gram for group in probed.groups([2]) if group.kind == "train"]
    for place, block in enumerate(blocks):
        here = slice(4 * place, 4 * place + 4)
        torch.testing.assert_close(batch.gram[here, here], block, rtol=1e-6, atol=1e-6)


def test_layers_may_be_kept_for_probes_alone(policy, tmp_path):
    probing = {"probe_every": 1, "probe_temperatures": (1.0, 0.7), "layer_detail": "probes"}
    train(config_for(policy, tmp_path / "run", steps=1, **probing))
    assert {group.kind for group in open_run(tmp_path / "run").groups() if group.by_layer} == {"fixed"}


def test_a_run_may_end_without_a_checkpoint(policy, tmp_path):
    train(config_for(policy, tmp_path / "run", steps=1, checkpoint_every=0, final_checkpoint=False))
    assert not open_run(tmp_path / "run").checkpoints


def test_rollouts_are_drawn_in_the_precision_that_is_trained(policy, tmp_path):
    train(config_for(policy, tmp_path / "run", autocast=True, steps=1))
    assert list(open_run(tmp_path / "run").metrics())[1]["sampler_gap"] < 0.05


def test_test_problems_may_be_sampled_too(policy, tmp_path):
    train(config_for(policy, tmp_path / "run", steps=1, eval_every=1, eval_samples=3, learning_rate=0.0))
    run = open_run(tmp_path / "run")
    tests = [problem.id for problem in load_task("arithmetic:3", seed=0).test[:6]]
    for step, line in ((0, run.metrics()[0]), (1, run.metrics()[1])):
        greedy = [group for group in run.groups([step]) if group.kind == "test, greedy"]
        sampled = [group for group in run.groups([step]) if group.kind == "test"]
        assert [group.prompt_id for group in greedy] == [group.prompt_id for group in sampled] == tests
        assert line["eval/accuracy"] == pytest.approx(sum(float(group.rewards) for group in greedy) / 6)
        rewards = torch.stack([group.rewards for group in sampled])
        assert rewards.shape == (6, 3) and line["eval/sampled_accuracy"] == pytest.approx(float(rewards.mean()))


@pytest.mark.parametrize("changes", [{"micro_batch_size": 8, "batch_size": 16}, {"between_prompts": False}])
def test_batches_that_are_not_measured_in_one_pass_are_refused(changes, tmp_path):
    with pytest.raises(ScoregramError, match="a stored batch must be measured in one pass, across prompts"):
        TrainConfig(out=tmp_path / "run", batches_every=1, measure_every=1, **changes)


@pytest.mark.parametrize("measured", [0, 2])
def test_batches_of_steps_that_are_not_measured_are_refused(measured, tmp_path):
    with pytest.raises(ScoregramError, match=f"batches_every 3 and measure_every {measured}. Make it a multiple"):
        TrainConfig(out=tmp_path / "run", batches_every=3, measure_every=measured)


def test_greedy_rewards_are_kept_as_evidence(policy, tmp_path):
    train(config_for(policy, tmp_path / "run", steps=1, eval_every=1, keep_evidence=True))
    run = open_run(tmp_path / "run")
    for step in (0, 1):
        kept = [group for group in run.groups([step]) if group.kind == "test, greedy"]
        shares = [float(group.rewards >= 1) for group in kept]
        assert len(kept) == 6 and run.metrics()[step]["eval/accuracy"] == pytest.approx(sum(shares) / 6)


def test_a_resumed_run_keeps_the_hash_of_its_start(policy, tmp_path):
    settings = {"keep_evidence": True, "learning_rate": 0.1, "eval_every": 0}
    train(config_for(policy, tmp_path / "run", steps=1, **settings))
    kept = open_run(tmp_path / "run").environment["start_sha256"]
    train(config_for(policy, tmp_path / "run", steps=2, resume=True, **settings))
    run = open_run(tmp_path / "run")
    assert run.environment["start_sha256"] == kept and not run.resumed


def test_a_held_out_split_is_evaluated_on_its_own(policy, tmp_path):
    changes = {"task": "arithmetic-compositions:3", "keep_evidence": True, "eval_samples": 2}
    train(config_for(policy, tmp_path / "run", steps=1, **changes))
    run = open_run(tmp_path / "run")
    for line in run.metrics():
        assert line["eval/problems"] == line["eval/composition/problems"] == 6
    kinds = {group.kind for group in run.groups() if group.kind.startswith("test")}
    assert kinds == {"test", "test, greedy", "test composition", "test composition, greedy"}
    asked = {group.prompt_id.split("/")[1] for group in run.groups() if group.kind == "test composition, greedy"}
    assert asked == {"composition"}
    last = [g.rewards for g in run.groups() if g.kind == "test composition, greedy" and g.step == 1]
    assert run.metrics()[-1]["eval/composition/accuracy"] == float(torch.cat(last).mean())
