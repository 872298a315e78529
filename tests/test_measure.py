"""A dump measured offline: the same K as the run that wrote it, whatever the format, the order or an interruption."""

import json
import math
import shutil
import warnings
from collections import Counter
from contextlib import nullcontext
from functools import cache
from io import StringIO
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from rich.console import Console

from scoregram import cli
from scoregram.advantages import leave_one_out, mean_centered
from scoregram.checks import ScoregramError
from scoregram.gram import Gram, in_passes, measure_gram
from scoregram.integrations.dumps import writing
from scoregram.integrations.dumps.config import MeasureConfig
from scoregram.integrations.dumps.formats import FORMATS
from scoregram.integrations.dumps.measure import MeasuredDump, measure
from scoregram.policy import BiasedSamplingWarning, PolicyConfig, load_policy, token_log_probs
from scoregram.policy.tiny import CONTEXT
from scoregram.reading import Step, StepTally, mean_over_groups, read_step, reward_scalars, whole_gram_scalars
from scoregram.rollouts import Rollouts
from scoregram.runs import Run, open_run
from scoregram.terminal import StopRequest
from scoregram.training.loop import train
from tests.dump_cases import ROLLOUTS, WRITERS, lines, plain_record
from tests.run_cases import tree
from tests.training_cases import config_for, save_policy

LOADED = cache(load_policy)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return save_policy(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def trained(model, tmp_path_factory) -> Run:
    """Two steps of a policy that does not move."""
    out = tmp_path_factory.mktemp("runs") / "train"
    settings = {"learning_rate": 0.0, "rollouts_every": 1, "steps": 2, "eval_every": 0, "temperature": 0.8}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BiasedSamplingWarning)
        train(config_for(model, out, **settings), console=Console(file=StringIO()))
    return open_run(out)


@pytest.fixture(autouse=True)
def loaded_once(monkeypatch):
    """Loading is not what these tests are about, and measuring leaves a policy as it was."""
    monkeypatch.setattr("scoregram.integrations.dumps.measure.load_policy", LOADED)


def measured(model: Path, dump: Path, out: Path, **changes: Any) -> tuple[Run, MeasuredDump, str]:
    said = StringIO()
    config = MeasureConfig(**({"model": str(model), "rollouts": dump, "out": out, "device": "cpu"} | changes))
    done = measure(config, console=Console(file=said, width=500))
    return open_run(out), done, said.getvalue()


def test_a_run_measured_again_has_the_same_gram_and_readings(model, trained, tmp_path):
    run, done, said = measured(model, trained.folder, tmp_path / "out")
    before, after = list(trained.groups()), list(run.groups())
    assert done.groups == len(before) == len(after) == 6 and done.rollouts == 24
    for one, other in zip(before, after, strict=True):
        assert (one.step, one.prompt_id) == (other.step, other.prompt_id)
        torch.testing.assert_close(other.gram, one.gram, rtol=1e-5, atol=1e-5 * float(one.gram.abs().max()))
        assert other.by_layer.keys() == one.by_layer.keys()
        assert torch.equal(one.rewards, other.rewards) and torch.equal(one.lengths, other.lengths)
        torch.testing.assert_close(one.advantages, other.advantages)
        assert "update_share" not in other.statistics  # measured group by group: without the Gram between prompts
        for name, value in one.statistics.items():
            if name != "update_share":
                assert other.statistics[name] == pytest.approx(value, rel=1e-3, nan_ok=True), name
        assert other.statistics["exact"] == 1 and other.statistics["log_prob_gap"] < 1e-4
    kept = {"reward", "reward_std", "live_groups", "groups", "length", "finished", "gram/score_norm"}
    kept |= {name for name in trained.metrics()[0] if name.startswith("group/")} | {"gram/baseline_saving"}
    for one, other in zip(trained.metrics(), run.metrics(), strict=True):
        assert {name: other[name] for name in kept} == pytest.approx(
            {name: one[name] for name in kept}, nan_ok=True, rel=1e-3
        )
    assert "approximate" not in said and run.config["temperature"] == 0.8


def test_rollouts_come_through_unchanged(model, trained, tmp_path):
    run, _, _ = measured(model, trained.folder, tmp_path / "out")
    for one, other in zip(trained.rollouts(), run.rollouts(), strict=True):
        for name in (
            "step",
            "prompt_id",
            "group",
            "index",
            "prompt",
            "completion",
            "prompt_length",
            "reward",
            "finished",
        ):
            assert getattr(one, name) == getattr(other, name), name
        assert torch.equal(one.token_ids, other.token_ids) and one.advantage == pytest.approx(other.advantage)
        torch.testing.assert_close(one.log_probs, other.log_probs, atol=1e-4, rtol=0)
        torch.testing.assert_close(one.behaviour_log_probs, other.behaviour_log_probs, atol=1e-6, rtol=0)


def test_with_whole_steps_the_readings_between_prompts_are_those_of_the_trainer(model, trained, tmp_path):
    run, _, _ = measured(model, trained.folder, tmp_path / "out", between_prompts=True)
    for one, other, batch in zip(trained.metrics(), run.metrics(), run.batches(), strict=True):
        for name in ("snr", "noise_scale", "gradient_squared", "within_prompt", "conflicting_prompts"):
            assert other[f"gram/{name}"] == pytest.approx(one[f"gram/{name}"], rel=1e-3, nan_ok=True), name
        assert batch.gram.shape == (12, 12) and batch.sizes.tolist() == [4, 4, 4]


def test_a_step_that_does_not_fit_into_memory_takes_several_passes(model, trained, tmp_path, monkeypatch):
    once, _, _ = measured(model, trained.folder, tmp_path / "once", between_prompts=True)
    plans = []
    plan_passes = in_passes.plan_passes
    monkeypatch.setattr(in_passes, "free_bytes", lambda _: 5e6)
    monkeypatch.setattr(in_passes, "plan_passes", lambda *given, **_: plans.append(plan_passes(*given)) or plans[-1])
    several, _, _ = measured(model, trained.folder, tmp_path / "several", between_prompts=True)
    assert plans and all(plan.passes > 1 for plan in plans)
    for one, other in zip(once.batches(), several.batches(), strict=True):
        torch.testing.assert_close(torch.as_tensor(other.gram), torch.as_tensor(one.gram), rtol=1e-4, atol=1e-4)


def scores_of(model: Path, prompts: list[str], completions: list[str]) -> torch.Tensor:
    """Scores `(N, D)` by one plain backward pass each."""
    policy = load_policy(MeasureConfig(model=str(model), rollouts=Path(), out=Path(), device="cpu").policy)
    rows = []
    for prompt, completion in zip(prompts, completions, strict=True):
        start, ids = len(prompt), torch.tensor([policy.tokenizer(prompt + completion)["input_ids"]])
        logits = policy.model(ids).logits[0, :-1].double().log_softmax(-1)
        total = logits[torch.arange(len(ids[0]) - 1), ids[0, 1:]][start - 1 :].sum()
        grads = torch.autograd.grad(total, list(policy.model.parameters()))
        rows.append(torch.cat([grad.flatten() for grad in grads]).double())
    return torch.stack(rows)


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_every_format_gives_the_gram_of_the_scores(name, model, tmp_path):
    run, done, said = measured(model, WRITERS[name](tmp_path / "dump"), tmp_path / "out")
    assert done.format == name and (done.groups, done.rollouts, done.broken) == (2, 4, 0)
    scores = scores_of(model, [one["prompt"] for one in ROLLOUTS], [one["completion"] for one in ROLLOUTS])
    expected = {one["prompt"]: scores[i : i + 2] @ scores[i : i + 2].mT for i, one in enumerate(ROLLOUTS) if i % 2 == 0}
    for group in run.groups():
        truth = expected[group.prompt]
        torch.testing.assert_close(group.gram, truth, rtol=1e-4, atol=1e-4 * float(truth.max()))
        told = [one["advantage"] for one in ROLLOUTS if one["prompt"] == group.prompt]
        assert group.advantages.tolist() == told  # of the dump; where it has none, of the paper, which are the same
    assert ("approximate: 100.0% of the rollouts are text that was tokenised again; 100.0%" in said) != FORMATS[
        name
    ].token_ids
    (line,) = run.metrics()
    assert line["step"] == 7 and line["reward"] == 0.625 and line["groups"] == line["live_groups"] == 2
    assert line["dump/exact"] == float(FORMATS[name].token_ids)
    assert ("dump/log_prob_gap" in line) == FORMATS[name].token_ids
    # the log-probabilities of the examples are invented
    assert ("--model may not be the policy that sampled these rollouts" in said) == FORMATS[name].token_ids


@pytest.mark.parametrize(("estimator", "fn"), [("mean", mean_centered), ("rloo", leave_one_out)])
def test_another_estimator_takes_the_place_of_the_dumps_advantages(estimator, fn, model, tmp_path):
    run, _, _ = measured(model, WRITERS["open-instruct"](tmp_path / "dump"), tmp_path / "out", estimator=estimator)
    for group in run.groups():
        torch.testing.assert_close(group.advantages, fn(group.rewards[None])[0])


def text_lines(*rows: tuple[str, str, float | None], **more: Any) -> list[dict[str, Any]]:
    return [{"prompt": p, "completion": c, "reward": r, **more} for p, c, r in rows]


def test_groups_of_any_size_missing_rewards_and_empty_completions(model, tmp_path):
    rows = text_lines(("a", "1", 1.0), ("b", "1", 1.0), ("a", "", None), ("a", "23", 0.0), ("c", "1", math.inf))
    run, done, said = measured(model, lines(tmp_path / "x.jsonl", rows), tmp_path / "out")
    groups: list[Any] = list(run.groups())
    a, b, c = groups
    assert a.rewards.tolist()[::2] == [1.0, 0.0] and math.isnan(a.rewards[1])
    assert a.advantages.tolist() == [0.5, 0.0, -0.5] and a.lengths.tolist() == [1, 0, 2]
    assert bool((a.gram[1] == 0).all()) and a.statistics["reward_mean"] == 0.5
    assert b.advantages.tolist() == c.advantages.tolist() == [0.0] and float(b.gram) > 0
    assert math.isnan(c.rewards[0]) and math.isnan(c.statistics["reward_mean"])
    assert math.isnan(b.statistics["effective_rank"])
    (line,) = run.metrics()
    assert line["dump/without_reward"] == 2 and line["dump/groups_of_one"] == 2 and line["groups"] == 3
    assert line["reward"] == pytest.approx(2 / 3) and line["live_groups"] == 1
    assert "rollouts without a reward: 2" in said and "groups of one rollout: 2" in said
    assert done.left_out == 0


def test_what_does_not_fit_is_left_out_and_said(model, tmp_path):
    rows = text_lines(("a", "1", 1.0), ("a", "2" * CONTEXT, 0.0), ("a", "3", 0.0), ("", "x", 0.0))
    path = lines(tmp_path / "x.jsonl", rows)
    run, done, said = measured(model, path, tmp_path / "out")
    (group,) = run.groups()
    assert group.lengths.tolist() == [1, 1] and group.statistics["rollouts_left_out"] == 1
    assert done.left_out == 2
    assert f"left out: {path} line 2 has {CONTEXT + 1} tokens, more than the context of {CONTEXT}." in said
    assert f"left out: {path} line 4 has no prompt token before its completion." in said


def test_text_that_does_not_come_back_counts_against_the_round_trip(model, tmp_path):
    rows = text_lines(("a", "é", 1.0), ("a", "1", 0.0), tokens=1)
    run, _, said = measured(model, lines(tmp_path / "x.jsonl", [*rows, rows[1] | {"tokens": 3}]), tmp_path / "out")
    (line,) = run.metrics()
    assert line["dump/round_trip"] == pytest.approx(2 / 3) and line["dump/count_agreement"] == pytest.approx(2 / 3)
    assert "66.7% of these decode to the same text" in said and "match the tokenizer: 66.7%" in said


def test_the_end_token_is_added_only_when_asked_for(model, tmp_path):
    path = lines(tmp_path / "x.jsonl", text_lines(("a", "1", 1.0)) + text_lines(("a", "2", 0.0), finished=False))
    run, _, _ = measured(model, path, tmp_path / "with", append_end=True)
    assert next(run.groups()).lengths.tolist() == [2, 1]
    assert [rollout.token_ids[-1].item() == 1 for rollout in run.rollouts()] == [True, False]
    run, _, _ = measured(model, path, tmp_path / "without")
    assert next(run.groups()).lengths.tolist() == [1, 1]


def test_advantages_of_single_tokens_are_kept(model, tmp_path):
    tokens = {"prompt_ids": [5, 6], "token_ids": [5, 6, 7, 8], "loss_mask": [0, 0, 1, 1]}
    record = tokens | {"inference_logprobs": [0.0] * 4, "advantages": [0.0, 0.0, 1.0, 3.0], "step": 1}
    run, _, _ = measured(model, lines(tmp_path / "rank_0.jsonl", [record] * 2), tmp_path / "out")
    assert next(run.groups()).advantages.tolist() == [2.0, 2.0]
    assert next(run.rollouts()).advantage is None
    kept: list[Any] = list(run.rollouts())
    assert kept[0].advantages.tolist() == [0.0, 0.0, 1.0, 3.0]


def test_what_one_rollout_of_a_group_lacks_others_keep(model, tmp_path):
    tokens = {"token_ids": [5, 6, 7, 8], "loss_mask": [0, 0, 1, 1], "step": 1}
    full = tokens | {"inference_logprobs": [0.0, 0.0, -1.0, -2.0], "advantages": [0.0, 0.0, 1.0, 3.0]}
    bare = tokens | {"inference_logprobs": None, "advantages": [0.0, 0.0, 0.5, 0.5]}
    run, _, _ = measured(model, lines(tmp_path / "rank_0.jsonl", [full, bare]), tmp_path / "out")
    one, other = run.rollouts()
    assert one.behaviour_log_probs is not None and one.behaviour_log_probs.tolist() == [0.0, 0.0, -1.0, -2.0]
    assert one.advantages is not None and one.advantages.tolist() == [0.0, 0.0, 1.0, 3.0] and one.advantage is None
    assert other.behaviour_log_probs is None and other.advantages is None and other.advantage == 0.5


def test_the_number_of_threads_is_restored(model, tmp_path):
    path = lines(tmp_path / "x.jsonl", text_lines(("a", "1", 1.0), ("a", "2", 0.0)))
    before = torch.get_num_threads()
    measured(model, path, tmp_path / "out", threads=before + 1)
    assert torch.get_num_threads() == before


def test_log_probabilities_are_compared_where_the_policy_chose(model, tmp_path):
    record = {"prompt_ids": [5, 6], "completion_ids": [7, 8, 9], "completion_mask": [1, 0, 1], "log_probs": [0.0] * 3}
    run, _, _ = measured(model, lines(tmp_path / "a.jsonl", [record] * 2), tmp_path / "a")
    found = next(run.rollouts()).log_probs[2:].tolist()
    assert found[1] == 0 and next(run.groups()).lengths.tolist() == [2, 2]
    for name, told, gap in (("b", [found[0], -50.0, found[2]], 0.0), ("c", [found[0] - 1, None, found[2] + 0.5], 0.75)):
        run, _, _ = measured(model, lines(tmp_path / f"{name}.jsonl", [record | {"log_probs": told}]), tmp_path / name)
        (line,) = run.metrics()
        assert line["dump/log_prob_gap"] == pytest.approx(gap, abs=1e-5)
        assert line["dump/log_prob_gap_max"] == pytest.approx(2 * gap / 1.5, abs=1e-5)


@pytest.mark.parametrize("name", ["trl", "plain"])
def test_a_batch_that_is_written_again_under_the_next_step(name, model, tmp_path):
    WRITERS[name](tmp_path / "dump")
    (path,) = [file for file in (tmp_path / "dump").rglob("*.*") if file.is_file()]
    if name == "trl":
        table = pq.read_table(path)
        again = table.set_column(0, "step", pa.array([8] * len(table)))
        pq.write_table(again, path.with_name("completions_00008.parquet"))
    else:
        path.write_text(path.read_text() + path.read_text().replace('"step": 7', '"step": 8'))
    _, done, _ = measured(model, tmp_path / "dump", tmp_path / "out")
    assert done.groups == (2 if FORMATS[name].repeats else 4)


def test_a_request_to_stop_ends_after_a_group_and_can_be_resumed(model, trained, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(
            "scoregram.integrations.dumps.measure.stop_requests", lambda: nullcontext(StopRequest(asked=True))
        )
        run, done, said = measured(model, trained.folder, tmp_path / "out")
    assert done.interrupted and done.groups == 1 and "continue with --resume" in said
    assert len(list(run.groups())) == 1 and run.metrics() == []
    run, done, _ = measured(model, trained.folder, tmp_path / "out", resume=True)
    assert (done.groups, done.held) == (5, 1) and [line["groups"] for line in run.metrics()] == [3, 3]


def test_some_reward_functions_alone(model, tmp_path):
    dump = WRITERS["trl"](tmp_path / "dump")
    run, _, _ = measured(model, dump, tmp_path / "out", reward_columns=("format_reward",), estimator="mean")
    assert [group.rewards.tolist() for group in run.groups()] == [[0.0, 0.0], [0.0, 0.0]]
    run, _, _ = measured(model, dump, tmp_path / "auto", reward_columns=("format_reward",))
    # not the dump's advantages, which are those of its own total: equal rewards have none
    assert [group.advantages.tolist() for group in run.groups()] == [[0.0, 0.0], [0.0, 0.0]]
    with pytest.raises(ScoregramError, match="--reward-columns and --estimator dump exclude each other, got both"):
        measured(model, dump, tmp_path / "again", reward_columns=("accuracy_reward",), estimator="dump")
    with pytest.raises(ScoregramError, match="a reward called 'style', got accuracy_reward, format_reward"):
        measured(model, dump, tmp_path / "again", reward_columns=("style",))


def test_a_run_that_was_cut_short_goes_on_to_the_same_run(model, trained, tmp_path, monkeypatch):
    monkeypatch.setattr(writing, "PAGE_GROUPS", 1)
    whole, _, _ = measured(model, trained.folder, tmp_path / "whole")
    rows = [group.gram for group in whole.groups()]
    for lost in ("group", "line"):
        out = tmp_path / lost
        shutil.copytree(tmp_path / "whole", out)
        kept = (out / "metrics.jsonl").read_text().splitlines(keepends=True)
        (out / "metrics.jsonl").write_text(kept[0])
        if lost == "group":  # killed after its rollouts were written
            max((out / "groups").iterdir()).unlink()
            (out / "groups" / ".partial-x").touch()
        run, done, said = measured(model, trained.folder, out, resume=True)
        assert (done.groups, done.held) == ((1, 5) if lost == "group" else (0, 6))
        for gram, group in zip(rows, run.groups(), strict=True):
            torch.testing.assert_close(group.gram, gram)
        assert len(list(run.rollouts())) == 24
        assert [set(line) for line in run.metrics()] == [set(line) for line in whole.metrics()]
        assert run.metrics()[1] == pytest.approx(whole.metrics()[1], nan_ok=True)
    assert "groups already in the run:" in said


def test_an_error_in_the_middle_keeps_what_was_measured(model, tmp_path):
    good = [plain_record(i, one) for i, one in enumerate(ROLLOUTS)]
    far = [record | {"step": 8, "group": record["group"] + 5} for record in good]
    path = lines(tmp_path / "x.jsonl", [*good, *far])
    path.write_text(path.read_text() + "{broken\n")
    with pytest.raises(ScoregramError, match=r"x\.jsonl line 9: must be readable"):
        measured(model, path, tmp_path / "out", strict=True)
    assert len(list(open_run(tmp_path / "out").groups())) == 2  # those of step 7; step 8 was still open
    run, done, _ = measured(model, path, tmp_path / "out", resume=True)
    assert (done.groups, done.held, done.broken) == (2, 2, 1)
    assert [line["step"] for line in run.metrics()] == [7, 8]


def test_resuming_twice_changes_nothing(model, trained, tmp_path):
    measured(model, trained.folder, tmp_path / "out")
    before = tree(tmp_path / "out")
    _, done, _ = measured(model, trained.folder, tmp_path / "out", resume=True)
    assert done.groups == 0 and done.held == 6
    assert tree(tmp_path / "out") == before


def test_only_so_many_groups_and_rollouts(model, trained, tmp_path):
    run, done, _ = measured(model, trained.folder, tmp_path / "out", max_groups=2, group_size_limit=3)
    assert done.groups == 2 and [len(group.rewards) for group in run.groups()] == [3, 3]
    run, done, said = measured(model, trained.folder, tmp_path / "out", group_size_limit=3, resume=True)
    assert (done.groups, done.held) == (4, 2) and len(list(run.groups())) == 6
    assert "steps whose line in metrics.jsonl lacks groups: 1" in said


def test_with_whole_steps_no_more_groups_than_asked_for_are_measured(model, trained, tmp_path):
    steps = Counter(group.step for group in open_run(trained.folder).groups())
    assert steps == {1: 3, 2: 3}
    for asked in (3, 5):
        run, done, _ = measured(model, trained.folder, tmp_path / str(asked), max_groups=asked, between_prompts=True)
        assert done.groups == 3 == len(list(run.groups()))
    with pytest.raises(ScoregramError, match="measure --max-groups: must be at least 3, the groups of the first step"):
        measured(model, trained.folder, tmp_path / "out", max_groups=2, between_prompts=True)
    assert not (tmp_path / "out").exists()


def test_another_setting_is_not_a_resumption(model, trained, tmp_path):
    measured(model, trained.folder, tmp_path / "out", max_groups=1)
    with pytest.raises(ScoregramError, match=r"must have the same config, got .*estimator"):
        measured(model, trained.folder, tmp_path / "out", resume=True, estimator="rloo")
    with pytest.raises(ScoregramError, match="must be empty, got a run"):
        measured(model, trained.folder, tmp_path / "out")


def test_steps_out_of_order_are_measured_and_said(model, tmp_path):
    rows = [row for step in (3, 5, 3) for row in text_lines(("a", "1", 1.0), ("a", "2", 0.0), step=step)]
    run, done, said = measured(model, lines(tmp_path / "x.jsonl", rows), tmp_path / "out")
    assert done.groups == 3 and [line["step"] for line in run.metrics()] == [3, 5]
    assert "groups that arrived late: 1" in said and "steps whose line in metrics.jsonl lacks groups: 1" in said


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"estimator": "gae"}, "measure --estimator: must be auto, dump or one of .*grpo.*, got 'gae'"),
        ({"format": "tinker"}, "measure --format: the name must be one of"),
        ({"rollouts": Path("nowhere")}, "measure --rollouts: the path must exist"),
        ({"max_groups": -1}, "measure --max-groups: must be at least 0"),
        ({"temperature": 0.0}, "measure --temperature: must be positive and finite"),
        ({"resume": True, "overwrite": True}, "--resume and --overwrite exclude each other"),
        ({"resume": True}, "must be a run folder"),
    ],
)
def test_what_cannot_work_is_one_sentence_before_a_run_is_begun(changes, says, model, tmp_path):
    path = lines(tmp_path / "x.jsonl", text_lines(("a", "1", 1.0)))
    with pytest.raises(ScoregramError, match=says):
        measured(model, path, tmp_path / "out", **changes)
    assert not (tmp_path / "out").exists()


def test_a_model_that_does_not_know_the_tokens_is_refused(model, tmp_path):
    path = lines(tmp_path / "x.jsonl", [{"prompt_ids": [5], "completion_ids": [50_000], "reward": 1.0}])
    with pytest.raises(
        ScoregramError, match=r"x\.jsonl line 1: token ids must be below \d+.*, got 50000\. Pass the model"
    ):
        measured(model, path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_conversation_needs_a_template(model, tmp_path):
    rows = [{"prompt": [{"role": "user", "content": "a"}], "completion": "1", "reward": 1.0}]
    with pytest.raises(ScoregramError, match="a prompt of messages needs a chat template"):
        measured(model, lines(tmp_path / "x.jsonl", rows), tmp_path / "out")


def test_a_dump_in_which_nothing_can_be_read(model, tmp_path):
    path = lines(tmp_path / "x.jsonl", [{"prompt": "a", "completion": "b", "reward": "x"}])
    with pytest.raises(ScoregramError, match="at least one rollout, got 1 records that cannot be read"):
        measured(model, path, tmp_path / "out")


def test_the_tally_of_a_step_is_what_the_trainer_would_log(trained):
    groups = list(trained.groups([1]))
    tally = StepTally()
    for group in groups:
        tally.add(group)
    found = tally.scalars()
    step = step_of(groups)
    assert step.gram is not None
    whole = mean_over_groups([group.statistics for group in groups])
    expected = {name: value for name, value in whole.items() if name != "group/update_share"} | reward_scalars(step)
    read = read_step(step).scalars
    expected |= {name: read[name] for name in ("gram/score_norm", "gram/baseline_saving")}
    assert {name: found[name] for name in expected} == pytest.approx(expected, nan_ok=True)
    assert not whole_gram_scalars(step.gram.matrix, step.weights, step.rollouts).keys() & found.keys()


def step_of(groups: list[Any]) -> Step:
    """Recorded groups as a step with zeros between prompts."""
    rewards, advantages = (torch.cat([getattr(g, name) for g in groups]) for name in ("rewards", "advantages"))
    ids = torch.zeros(len(rewards), 2, dtype=torch.int64)
    rollouts = Rollouts(
        input_ids=ids,
        attention_mask=torch.ones_like(ids, dtype=torch.bool),
        completion_mask=torch.tensor([False, True]).expand_as(ids),
        prompt_lengths=torch.ones(len(rewards), dtype=torch.int64),
        group_ids=torch.arange(len(groups)).repeat_interleave(len(groups[0].rewards)),
        rewards=rewards,
    )
    matrix = torch.block_diag(*[group.gram for group in groups])
    gram = Gram(matrix=matrix, by_layer={}, log_probs=torch.zeros(ids.shape), replayed=())
    return Step(number=1, rollouts=rollouts, advantages=advantages, weights=advantages / len(rewards), gram=gram)


def test_the_command_measures_and_says_where(model, tmp_path, capsys):
    path = lines(tmp_path / "mine.jsonl", text_lines(("a", "1", 1.0), ("a", "2", 0.0)))
    asked = ["measure", "--model", str(model), "--rollouts", str(path), "--out", str(tmp_path / "out")]
    assert cli.main([*asked, "--device", "cpu"]) == 0
    assert "groups measured: 1, rollouts: 2" in capsys.readouterr().out.replace("\n", " ")
    assert cli.main(asked) == 2
    assert "must be empty, got a run" in capsys.readouterr().err
    stored = (tmp_path / "out" / "metrics.jsonl").read_text()
    assert json.loads(stored)["dump/exact"] == 0.0


def test_a_terminal_sees_a_bar_with_the_time_that_is_left(model, tmp_path):
    said = StringIO()
    path = lines(tmp_path / "x.jsonl", text_lines(("a", "1", 1.0), ("b", "2", 0.0)))
    config = MeasureConfig(model=str(model), rollouts=path, out=tmp_path / "out", device="cpu")
    measure(config, console=Console(file=said, force_terminal=True, width=100))
    assert "2 groups" in said.getvalue() and "100 %" in said.getvalue() and "ETA" in said.getvalue()


def test_an_adapter_checkpoint_measures_what_was_trained_and_says_so(model, tmp_path, monkeypatch):
    policy = load_policy(PolicyConfig(str(model), lora_rank=2, device="cpu"))
    with torch.no_grad():
        for name, parameter in policy.model.named_parameters():
            if "lora_B" in name:
                parameter.fill_(0.1)
    policy.model.save_pretrained(tmp_path / "adapter")
    run, _, said = measured(tmp_path / "adapter", WRITERS["open-instruct"](tmp_path / "dump"), tmp_path / "out")
    counts = [parameter.numel() for parameter in policy.model.parameters() if parameter.requires_grad]
    every = sum(parameter.numel() for parameter in policy.model.parameters())
    sentence = f"the adapters, {sum(counts):,} of {every:,} parameters; their base is frozen"
    assert f"measured: {sentence}" in said and run.config["measured"] == sentence
    first: Any = next(run.groups())
    assert first.by_layer and all(".lora_" in name for name in first.by_layer)
    rollout = next(run.rollouts())
    mask = torch.arange(len(rollout.token_ids)) >= rollout.prompt_length
    row = rollout.token_ids[None]
    total = token_log_probs(policy.model, row, torch.ones_like(row, dtype=torch.bool), mask[None]).sum()
    scores = torch.autograd.grad(total, [p for p in policy.model.parameters() if p.requires_grad])
    assert float(first.gram[0, 0]) == pytest.approx(sum(float(s.double().square().sum()) for s in scores), rel=1e-4)


def test_a_model_that_did_not_sample_the_rollouts_is_named_in_terminal_and_run(model, trained, tmp_path):
    run, _, said = measured(model, trained.folder, tmp_path / "right")
    assert run.remarks == {} and "warning" not in said
    other = save_policy(tmp_path / "other", seed=1)
    run, _, said = measured(other, trained.folder, tmp_path / "wrong")
    assert "--model may not be the policy that sampled these rollouts" in run.remarks["model"]
    assert f"warning: {run.remarks['model']}" in said
    rows = [{"prompt_ids": [5, 6], "completion_ids": torch.randint(3, 99, (20,)).tolist()} for _ in range(16)]
    bare = lines(tmp_path / "x.jsonl", rows)  # nothing recorded
    run, _, said = measured(model, bare, tmp_path / "guess")
    assert "a uniform guess gives -4.60" in run.remarks["model"] and f"warning: {run.remarks['model']}" in said


def test_remarks_of_a_resumed_measurement_are_those_of_the_whole(model, tmp_path):
    rows = text_lines(("a", "1", 1.0), ("a", "2" * CONTEXT, 0.0), ("b", "3", 0.0), ("", "x", 0.0))
    path = lines(tmp_path / "x.jsonl", rows)
    path.write_text(path.read_text() + "{broken\n")
    whole, _, _ = measured(model, path, tmp_path / "whole")
    measured(model, path, tmp_path / "parts", max_groups=1)
    parts, _, _ = measured(model, path, tmp_path / "parts", resume=True)
    assert parts.remarks == whole.remarks
    assert whole.remarks["skipped"] == "missing from all numbers: 1 broken records, 2 rollouts left out"
    assert whole.remarks["approximate"].startswith("approximate: 100.0% of the rollouts are text")


def test_the_order_of_rollouts_does_not_change_a_group(model, tmp_path):
    rows = text_lines(("a", "1", 1.0), ("b", "23", 0.0), ("a", "4", 0.0), ("b", "5", 1.0))
    found: list[dict[str, Any]] = []
    for name, order in (("one", rows), ("two", rows[::-1])):
        run, _, _ = measured(model, lines(tmp_path / f"{name}.jsonl", order), tmp_path / name)
        found.append({group.prompt_id: group for group in run.groups()})
    assert found[0].keys() == found[1].keys()
    for prompt, group in found[0].items():
        torch.testing.assert_close(found[1][prompt].gram.flip(0, 1), group.gram, rtol=1e-5, atol=1e-4)
        assert found[1][prompt].rewards.tolist() == group.rewards.tolist()[::-1]


def test_a_group_alone_is_measured_as_in_a_batch(model, trained):
    """The reference that the others rest on: padding and company change nothing."""
    policy = load_policy(MeasureConfig(model=str(model), rollouts=Path(), out=Path(), device="cpu").policy)
    rollout = next(trained.rollouts())
    ids = rollout.token_ids[None]
    mask = torch.arange(ids.shape[1])[None] >= rollout.prompt_length
    alone = measure_gram(policy.model, ids, mask, temperature=0.8).matrix
    torch.testing.assert_close(alone[0, 0], next(trained.groups()).gram[0, 0], rtol=1e-5, atol=0)
