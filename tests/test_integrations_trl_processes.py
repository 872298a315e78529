"""A TRL trainer in two processes: the Gram of every group by single backward passes, one run folder, one self-check."""

import math
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("trl")
pytest.importorskip("peft")

from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from scoregram.advantages import ESTIMATORS as TABLE
from scoregram.gram.sketch import Sketch
from scoregram.reading import recorded_recommendations
from tests.distributed_cases import in_processes
from tests.trl_cases import run_in, trainer_for
from tests.trl_processes import CASES, ESTIMATORS, LOSSES, SCORES, everything

pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("ignore")]

TEMPERATURE = 0.9


def save_policies(made: Path) -> Path:
    """Policies with tied and untied embeddings, and one that counts positions."""
    trainer_for("GRPO", made / "tied")
    untied: Any = AutoModelForCausalLM.from_pretrained(made / "tied" / "policy", tie_word_embeddings=False)
    torch.manual_seed(1)
    with torch.no_grad():
        untied.lm_head.weight.copy_(0.5 * torch.randn_like(untied.lm_head.weight))
    untied.save_pretrained(made / "untied" / "policy")
    config = GPT2Config(
        vocab_size=99, n_positions=64, n_embd=16, n_layer=2, n_head=2, bos_token_id=1, eos_token_id=1,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    GPT2LMHeadModel(config).save_pretrained(made / "absolute" / "policy")
    return made


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return save_policies(tmp_path_factory.mktemp("trl"))


@pytest.fixture(scope="module")
def found(folder) -> list[dict[str, Any]]:
    return in_processes(everything, folder)


def rows_one_by_one(model: Any, batch: dict[str, torch.Tensor], coefficients: torch.Tensor) -> torch.Tensor:
    """`(B, D)`: one backward pass per rollout, on one process, on the padded rows that the trainer had."""
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
    attention = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
    ahead = batch["prompt_ids"].shape[1]
    rows = []
    for i in range(len(ids)):
        logits = model(input_ids=ids[i : i + 1], attention_mask=attention[i : i + 1]).logits[0, ahead - 1 : -1]
        log_probs = torch.log_softmax(logits / TEMPERATURE, -1)
        chosen = log_probs.gather(1, batch["completion_ids"][i].unsqueeze(1)).squeeze(1)
        grads = torch.autograd.grad((chosen * coefficients[i]).sum(), list(model.parameters()))
        rows.append(torch.cat([grad.flatten() for grad in grads]).double())
    return torch.stack(rows)


@cache
def policy_in(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder / "policy").eval()


def model_with(weights: dict[str, torch.Tensor], folder: Path) -> Any:
    model = policy_in(folder)
    assert weights.keys() == dict(model.named_parameters()).keys()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])
    return model


def scores(found: list[dict[str, Any]], name: str, step: int, folder: Path) -> torch.Tensor:
    """`(N, D)` scores of a generation, process after process, as the trainer groups them."""
    rows = []
    for one in found:
        batch = one[name]["generations"][step]
        model = model_with(batch["weights"], folder / CASES[name].policy)
        rows.append(rows_one_by_one(model, batch, batch["completion_mask"].float()))
    return torch.cat(rows)


def close(got: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(got.double(), expected, rtol=0, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("name", [*SCORES, *ESTIMATORS])
def test_gram_of_every_group_is_that_of_single_backward_passes(name, found, folder):
    run = run_in(folder / "runs" / name)
    for step in range(2):
        rows = scores(found, name, step, folder)
        records = list(run.groups({step + 1}))
        assert len(records) * 4 == len(rows)
        for place, record in enumerate(records):
            own = rows[4 * place : 4 * place + 4]
            close(record.gram, own @ own.T)
            close(torch.stack([*record.by_layer.values()]).sum(0), own @ own.T)
        batches = list(run.batches({step + 1}))
        if "between" in name or "one group" in name:
            close(batches[0].gram, rows @ rows.T)
        else:
            assert not batches


@pytest.mark.parametrize("name", LOSSES)
def test_gram_of_a_loss_is_that_of_single_backward_passes(name, found, folder):
    """Two steps on the same rollouts; the mean over processes is the loss whose gradient the trainer takes."""
    run = run_in(folder / "runs" / name)
    for step in range(2):
        known: dict[tuple[int, ...], torch.Tensor] = {}
        for one in found:
            batch = one[name]["losses"][step]
            model = model_with(batch["weights"], folder / "tied")
            rows = rows_one_by_one(model, batch, batch["derivative"])
            known |= dict(zip(tokens_of(batch), rows, strict=True))
        rollouts = list(run.rollouts({step + 1}))
        assert len(rollouts) == 12
        for place, record in enumerate(run.groups({step + 1})):
            own = [rollout.token_ids.tolist() for rollout in rollouts if rollout.group == place]
            rows = torch.stack([known[tuple(tokens)] for tokens in own])
            close(record.gram, rows @ rows.T)
            assert record.kind == "loss" and len(own) == 4


def tokens_of(batch: dict[str, torch.Tensor]) -> list[tuple[int, ...]]:
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
    masks = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1).bool()
    return [tuple(row[mask].tolist()) for row, mask in zip(ids, masks, strict=True)]


@pytest.mark.parametrize("name", CASES)
def test_the_self_check_holds_and_is_the_same_everywhere(name, found):
    first, second = (one[name] for one in found)
    assert first["steps"] == [1, 2] and first["failures"] == second["failures"] == []
    assert 0 < max(first["errors"]) <= 1e-5
    for a, b in zip(first["scalars"], second["scalars"], strict=True):
        assert a == pytest.approx(b, rel=0, abs=0, nan_ok=True)


@pytest.mark.parametrize("name", CASES)
def test_one_process_writes_and_all_log_the_same(name, found, folder):
    first, second = (one[name] for one in found)
    assert first["writes"] and not second["writes"]
    written = run_in(folder / "runs" / name).metrics()
    assert [line["step"] for line in written] == [1, 2]
    for line, a, b in zip(written, first["logged"], second["logged"], strict=True):
        assert line["check/relative_error"] == a["scoregram/check/relative_error"]
        ours = {key for key in a if key.startswith("scoregram/")}
        assert {key: a[key] for key in ours} == {key: b[key] for key in ours}
        if "between" in name:
            assert line["gram/update_norm"] == pytest.approx(a["grad_norm"], rel=1e-5)
    assert run_in(folder / "runs" / name).config["processes"] == 2


@pytest.mark.parametrize("name", CASES)
def test_the_mean_gradient_of_all_processes_is_sketched_unless_it_is_sharded(name, found, folder):
    steps, sketches = run_in(folder / "runs" / name).update_sketches()
    assert steps.tolist() == ([] if CASES[name].sharded else [1, 2])
    for place, sketch in enumerate(sketches):
        for one in found:
            seen = one[name]["gradients"][place]
            torch.testing.assert_close(torch.from_numpy(sketch).double(), seen, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", CASES)
def test_it_ran_as_it_says(name, found):
    assert found[0][name]["kind"].startswith("FSDP") == CASES[name].sharded
    assert CASES[name].sharded or found[0][name]["kind"] == "DistributedDataParallel"


@pytest.mark.parametrize("name", ["parallel", "failing", "too large for one"])
def test_the_training_is_the_same_with_and_without(name, found):
    for one in found:
        assert all(torch.equal(one[name]["weights"][key], value) for key, value in one["plain"]["weights"].items())


def test_sharded_and_parallel_processes_measure_the_same(found, folder):
    parallel, sharded = (list(run_in(folder / "runs" / name).groups()) for name in ("parallel", "sharded"))
    for a, b in zip(parallel, sharded, strict=True):
        assert a.gram is not None and b.gram is not None
        assert (a.step, a.prompt_id, a.rewards.tolist()) == (b.step, b.prompt_id, b.rewards.tolist())
        close(b.gram, a.gram)


def test_all_processes_hear_the_recommendation_of_the_first(found, folder):
    first, second = (process["advised"]["recommended"] for process in found)
    assert first == second and [step for step, *_ in first] == [1, 2]
    assert all(process["advised"]["failures"] == [] for process in found)
    stored = recorded_recommendations(run_in(folder / "runs" / "advised").metrics())
    assert [(one.step, one.sizes) for one in stored] == [(step, sizes) for step, sizes, _ in first]
    for process in found:
        assert [line["scoregram/control/batch_size"] for line in process["advised"]["logged"]] == [12, 12]


def test_what_the_scores_do_not_explain_is_seen_alike(found):
    """Gradients parameter by parameter, and sketches of them: the same error, within what a sketch promises."""
    parallel, sharded = (found[0][f"{kind}, unexplained"]["errors"] for kind in ("parallel", "sharded"))
    assert max(parallel[0], sharded[0]) <= 1e-5 < 0.1 < parallel[1]
    bound = math.sqrt((6 + 4 / Sketch().features) / Sketch().features)  # of the error's standard deviation
    assert sharded[1] == pytest.approx(parallel[1], rel=3 * bound)
    assert found[0]["sharded, unexplained"]["errors"] == found[1]["sharded, unexplained"]["errors"]


def test_what_fails_in_one_process_fails_in_all_and_the_next_step_is_measured(found):
    first, second = (one["failing"] for one in found)
    assert second["failures"] == ["RuntimeError: no such kernel"]
    assert len(first["failures"]) == 1
    assert "every process must finish its part, got RuntimeError: no such kernel in process 1." in first["failures"][0]
    assert first["steps"] == second["steps"] == [2]


def test_what_does_not_fit_into_one_process_is_passed_over_by_all(found):
    for one in found:
        assert one["too large for one"]["steps"] == one["too large for one"]["failures"] == []


def test_a_folder_that_is_taken_is_refused_in_every_process(found):
    assert all("overwrite" in one["taken"] for one in found)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_estimators_see_whole_groups(name, found, folder):
    run = run_in(folder / "runs" / name)
    for step in range(2):
        records = list(run.groups({step + 1}))
        rewards = torch.stack([record.rewards for record in records])
        energies = scores(found, name, step, folder).square().sum(1).view(3, 4)
        expected = TABLE["optimal-loo"].fn(rewards, score_energies=energies)
        used = torch.cat([one[name]["generations"][step]["used"] for one in found]).view(3, 4).double()
        torch.testing.assert_close(used, expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(torch.stack([record.advantages for record in records]), used, rtol=1e-6, atol=1e-7)
