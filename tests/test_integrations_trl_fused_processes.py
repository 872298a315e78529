"""Fused steps in two processes: the training of TRL alone, Grams by definition, and no process waits for another."""

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("trl")
pytest.importorskip("peft")

from tests.distributed_cases import in_processes
from tests.test_integrations_trl_processes import (
    TEMPERATURE,
    close,
    model_with,
    rows_one_by_one,
    save_policies,
    tokens_of,
)
from tests.trl_cases import run_in
from tests.trl_fused_processes import FAULTS, FUSED, LOSSES, SCORES, everything

pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("ignore")]

SEPARATE = "; steps are measured in a separate pass"
BROKEN = "every process must finish its part, got RuntimeError: no such kernel in process 1."


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return save_policies(tmp_path_factory.mktemp("trl"))


@pytest.fixture(scope="module")
def found(folder) -> list[dict[str, Any]]:
    return in_processes(everything, folder)


def assert_same_weights(measured: dict[str, Any], plain: dict[str, Any]) -> None:
    """The same up to 1e-6 of all weights, after a training that changed them."""
    ours, theirs = (torch.cat([value.flatten() for value in one["weights"].values()]) for one in (measured, plain))
    first = torch.cat([value.flatten() for value in plain["generations"][0]["weights"].values()])
    assert float((theirs - first).norm()) > 0
    assert float((ours - theirs).norm() / theirs.norm()) <= 1e-6


@pytest.mark.parametrize("name", FUSED)
def test_the_training_is_the_same_in_all_processes(name, found):
    for one in found:
        assert one[name]["kind"] == "DistributedDataParallel"
        assert_same_weights(one[name], one["plain"][name])
        for ours, theirs in zip(one[name]["logged"], one["plain"][name]["logged"], strict=True):
            for key in {"loss", "grad_norm", "entropy", "reward"} & theirs.keys():  # inner steps log no reward
                assert ours[key] == pytest.approx(theirs[key], rel=1e-4, abs=1e-6)
    first, second = (one[name]["weights"] for one in found)
    assert all(torch.equal(first[key], second[key]) for key in first), "processes must not drift apart"


@pytest.mark.parametrize("name", FUSED)
def test_steps_are_fused_and_all_processes_say_the_same(name, found):
    first, second = (one[name] for one in found)
    assert first["failures"] == second["failures"] == []
    assert first["not fused"] is second["not fused"] is None
    assert first["steps"] == ([1, 2, 4] if name == "every second step" else [1, 2, 3])
    # the first step in a separate pass, the others fused, with one rollout of each process compared
    assert [scalars["check/rollouts"] for scalars in first["scalars"]] == [16, 2, 2]
    assert 0 < max(scalars["check/relative_error"] for scalars in first["scalars"]) <= 1e-5
    assert [one[name]["passes"] for one in found] == [2, 2], "a step that is not measured costs no pass"
    for a, b in zip(first["scalars"], second["scalars"], strict=True):
        assert a == pytest.approx(b, rel=0, abs=0, nan_ok=True)
    for a, b in zip(first["logged"], second["logged"], strict=True):
        ours = {key for key in a if key.startswith("scoregram/")}
        assert {key: a[key] for key in ours} == {key: b[key] for key in ours}


@pytest.mark.parametrize("name", SCORES)
def test_gram_of_every_group_is_that_of_single_backward_passes(name, found, folder):
    run = run_in(folder / "runs" / name)
    for step in range(3):
        rows = []
        for one in found:
            batch = one[name]["generations"][step]
            model = model_with(batch["weights"], folder / SCORES[name].policy)
            rows += rows_one_by_one(model, batch, batch["completion_mask"].float())
        records = list(run.groups({step + 1}))
        assert len(records) == 4 and not list(run.batches({step + 1}))
        for place, record in enumerate(records):
            own = torch.stack(rows[4 * place : 4 * place + 4])
            close(record.gram, own @ own.T)
            close(torch.stack([*record.by_layer.values()]).sum(0), own @ own.T)


@pytest.mark.parametrize("name", LOSSES)
def test_gram_of_a_loss_is_that_of_single_backward_passes(name, found, folder):
    """Rows belong to the mean of the processes' losses."""
    run = run_in(folder / "runs" / name)
    for step in range(3):
        known: dict[tuple[int, ...], torch.Tensor] = {}
        for one in found:
            batch = one[name]["losses"][step]
            model = model_with(batch["weights"], folder / LOSSES[name].policy)
            known |= dict(zip(tokens_of(batch), rows_one_by_one(model, batch, batch["derivative"]), strict=True))
        rollouts = list(run.rollouts({step + 1}))
        assert len(rollouts) == 16
        for place, record in enumerate(run.groups({step + 1})):
            tokens = [rollout.token_ids.tolist() for rollout in rollouts if rollout.group == place]
            own = torch.stack([known[tuple(one)] for one in tokens])
            close(record.gram, own @ own.T)


@pytest.mark.parametrize("name", SCORES)
def test_stored_log_probabilities_are_those_of_single_forward_passes(name, found, folder):
    """Rollouts of both processes in one file, each beside its own log-probabilities, whatever its padding was."""
    run, widths, lengths = run_in(folder / "runs" / name), set(), set()
    for step in range(3):
        known: dict[tuple[int, ...], torch.Tensor] = {}
        for one in found:
            batch = one[name]["generations"][step]
            model = model_with(batch["weights"], folder / SCORES[name].policy)
            for i, tokens in enumerate(tokens_of(batch)):
                known[tokens] = log_probs_alone(model, batch, i)
            widths.add((step, batch["prompt_ids"].shape[1] + batch["completion_ids"].shape[1]))
            lengths |= set(batch["completion_mask"].sum(1).tolist())
        for rollout in run.rollouts({step + 1}):
            expected = known[tuple(rollout.token_ids.tolist())]
            torch.testing.assert_close(rollout.log_probs[-len(expected) :], expected, rtol=1e-4, atol=1e-4)
            assert not rollout.log_probs[: -len(expected)].any()
    assert len(lengths) > 1 or name == "untied"
    assert len(widths) > 3 or name != "scores", "processes must differ in padding for this test to say something"


def log_probs_alone(model: Any, batch: dict[str, torch.Tensor], index: int) -> torch.Tensor:
    """Log-probabilities of the completion of one rollout, in the padding of its process."""
    ids, mask = (
        torch.cat([batch[f"prompt_{of}"], batch[f"completion_{of}"]], 1)[index : index + 1] for of in ("ids", "mask")
    )
    completion = batch["completion_ids"][index]
    with torch.no_grad():
        logits = model(input_ids=ids, attention_mask=mask).logits[0, -len(completion) - 1 : -1]
    found = torch.log_softmax(logits / TEMPERATURE, -1).gather(1, completion[:, None]).squeeze(1)
    return found[batch["completion_mask"][index].bool()]


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_in_one_process_leaves_the_step_to_the_trainer_in_all(name, found):
    case = next(key for key, value in SCORES.items() if value is FAULTS[name][0])
    for one in found:
        assert_same_weights(one["faults"][name], one["plain"][case])
    first, second = (one["faults"][name]["weights"] for one in found)
    assert all(torch.equal(first[key], second[key]) for key in first)


@pytest.mark.parametrize("name", ["forward pass", "backward pass", "backward pass, accumulated", "check"])
def test_an_error_in_one_process_ends_fused_steps_in_all(name, found):
    first, second = (one["faults"][name] for one in found)
    for one in (first, second):
        assert [scalars["check/rollouts"] for scalars in one["scalars"]] == [16, 16, 16]
        assert len(one["failures"]) == 1 and one["not fused"] == one["failures"][0] + SEPARATE
    if name == "check":
        assert "must agree with the trainer's own pass to 1e-05, got a relative error of 1" in first["not fused"]
        assert first["not fused"] == second["not fused"]
    else:
        assert BROKEN in first["not fused"] and second["failures"] == ["RuntimeError: no such kernel"]


@pytest.mark.parametrize("name", ["memory", "second part", "uneven"])
def test_an_obstacle_in_one_process_is_one_for_all(name, found):
    reasons = {
        "memory": "memory is short: all rollouts of the step together take 1e+09 GB",
        "second part": "it is the second part",
        "uneven": None,
    }
    for one in found:
        told = one["faults"][name]
        assert told["failures"] == [] and told["steps"] == [1, 2, 3]
        assert [scalars["check/rollouts"] for scalars in told["scalars"]] == [16, 16, 16]
        assert reasons[name] in told["not fused"] if reasons[name] else told["not fused"] is None


def test_rollouts_that_one_process_does_not_know_postpone_the_step(found):
    for rank, one in enumerate(found):
        told = one["faults"]["rollouts"]
        assert told["steps"] == [1, 3]
        assert [scalars["check/rollouts"] for scalars in told["scalars"]] == [16, 2]
        assert told["failures"] == ["RuntimeError: no such kernel"][:rank]


def test_what_is_never_fused_says_why(found):
    for one in found:
        cut = "a group is cut between processes, because each has 6 rollouts of a generation. "
        remedy = "Set per_device_train_batch_size to a multiple of num_generations=4"
        assert one["not fused"]["cut"] == cut + remedy + SEPARATE
        first = "with between_prompts=True the first process measures the rollouts of all processes"
        assert one["not fused"]["between prompts"] == first + SEPARATE
        assert one["not fused"]["sharded"] == "the model is sharded over several processes (FSDP)" + SEPARATE


def test_wrappers_that_do_more_than_average_are_named(found):
    name = "DistributedDataParallel"
    assert (
        found[0]["wrappers"]
        == found[1]["wrappers"]
        == {
            "plain": None,
            "communication": f"a communication hook is registered on {name}",
            "forward hook": f"a hook is registered on {name}",
            "ignored": f"{name} ignores a trainable parameter",
            "part of the processes": f"{name} averages over a part of the processes",
            "wrapped": f"the model is wrapped in {name}",
        }
    )


def test_parameters_that_one_process_did_not_use_get_the_mean(found):
    for one in found:
        assert one["partly used"] == [True, [1.5, 3.0], [0.5, 0.5], None, False, True]
