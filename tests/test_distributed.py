"""Several processes: the same Gram, and the same run folder, as from one."""

from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch.utils.checkpoint import checkpoint

from scoregram.gram import measure_gram
from scoregram.integrations.dumps.config import MeasureConfig
from scoregram.integrations.dumps.measure import measure
from scoregram.runs import open_run
from tests.distributed_cases import (
    OTHERS,
    PROCESSES,
    SHARDINGS,
    batch_of,
    everything,
    in_processes,
    model_of,
    rare_token_batch,
    rare_token_model,
    the_rest,
)
from tests.dump_cases import lines
from tests.training_cases import save_policy

RANKS = range(PROCESSES)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    made = tmp_path_factory.mktemp("shared")
    save_policy(made / "model")
    lines(made / "dump.jsonl", list(records()))
    return made


@pytest.fixture(scope="module")
def found(folder) -> list[dict[str, Any]]:
    return in_processes(everything, folder)


@pytest.fixture(scope="module")
def found_more(tmp_path_factory) -> list[dict[str, Any]]:
    return in_processes(the_rest, tmp_path_factory.mktemp("more"))


@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("case", SHARDINGS)
def test_a_sharded_model_has_the_gram_of_the_whole_one(case, rank, found):
    check(found[rank][case], *SHARDINGS[case][:2], rank)


@pytest.mark.slow
@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("case", OTHERS)
def test_so_it_has_whatever_is_sharded_and_however_it_is_measured(case, rank, found_more):
    check(found_more[rank][case], *OTHERS[case][:2], rank)
    assert bool(found_more[rank][case]["replayed"]) == (case == "replayed")


def check(got: dict[str, Any], name: str, dtype: torch.dtype, rank: int) -> None:
    truth = measure_gram(model_of(name, dtype), *batch_of(rank).arguments)
    scale = float(truth.matrix.abs().max())
    allowed = 1e-6 if dtype is torch.float32 else 1e-12
    torch.testing.assert_close(got["matrix"], truth.matrix, rtol=0, atol=allowed * scale)
    assert list(got["by_layer"]) == list(truth.by_layer)
    for layer, gram in truth.by_layer.items():
        torch.testing.assert_close(got["by_layer"][layer], gram, rtol=0, atol=allowed * scale)
    assert got["replayed"] == truth.replayed


@pytest.mark.parametrize("rank", RANKS)
def test_an_operation_that_one_process_alone_reaches_keeps_none_waiting(rank, found):
    truth = measure_gram(rare_token_model(), *rare_token_batch(rank).arguments, verify=True).matrix
    for matrix in found[rank]["rare token"]:
        torch.testing.assert_close(matrix, truth, rtol=0, atol=1e-12 * float(truth.abs().max()))


@pytest.mark.parametrize("rank", RANKS)
def test_rollouts_that_one_process_refuses_are_an_error_in_all(rank, found):
    error, after = found[rank]["refused"]
    assert error.startswith("measure_gram: token ids must lie in 0 … 60, got 1000 in rollout 0")
    truth = measure_gram(model_of("llama", torch.float64), *batch_of(rank).arguments).matrix
    torch.testing.assert_close(after, truth, rtol=0, atol=1e-12 * float(truth.abs().max()))


@pytest.mark.parametrize("rank", RANKS)
def test_the_model_inside_a_data_parallel_one_is_measured_and_nothing_is_sent(rank, found):
    truth = measure_gram(model_of("llama", torch.float64), *batch_of(rank).arguments)
    torch.testing.assert_close(found[rank]["data parallel"], truth.matrix, rtol=1e-12, atol=0)
    assert all(found[rank]["data parallel grads"])


@pytest.mark.parametrize("rank", RANKS)
def test_a_sharded_model_trains_on_as_if_nothing_had_happened(rank, found):
    assert found[rank]["left"] == dict.fromkeys(found[rank]["left"], True)


@pytest.mark.slow
@pytest.mark.parametrize("rank", RANKS)
def test_what_is_refused_of_a_sharded_model_leaves_it_ready(rank, found_more):
    interrupted, beyond, sharded, parallel, flattened, split, broken = found_more[rank]["failures"]
    assert interrupted == "in the middle of a pass"
    assert beyond.startswith("measure_gram: token ids must lie in 0 … 60, got 1000 in rollout 0")
    assert sharded == parallel
    assert sharded.startswith("backward_with_gram: the model must be in one process, got")
    assert "got FullyShardedDataParallel around the model. Use fully_shard (FSDP2)." in flattened
    assert "gathered parameters must not be DTensors, got lm_head.weight with placements (Shard(dim=0),)" in split
    assert "parameters must be finite, got nan or inf in model.norm.weight" in broken


def records():
    """Seven groups of one to three rollouts in three steps, one of them too long to be measured."""
    for group in range(7):
        for index in range(1 + (group + 1) % 3):
            long = "1" * 1000 if (group, index) == (3, 0) else ""
            yield {
                "prompt": f"{group}+{group}=",
                "completion": f"{2 * group + index}{long}",
                "reward": float(index == 0),
                "step": group // 3,
            }


def alone(folder: Path, out: Path, **settings: Any):
    config = MeasureConfig(
        model=str(folder / "model"), rollouts=folder / "dump.jsonl", out=out, device="cpu", **settings
    )
    measure(config, console=Console(file=StringIO()))
    return open_run(out)


@pytest.mark.parametrize(
    ("out", "settings"),
    [("whole", {}), ("fsdp", {}), ("resumed", {}), ("steps", {"between_prompts": True})],
)
def test_several_processes_write_the_run_of_one(out, settings, found, folder, tmp_path):
    one, several = alone(folder, tmp_path / "alone", **settings), open_run(folder / out)
    groups = list(zip(one.groups(), several.groups(), strict=True))
    assert len(groups) == 7
    for a, b in groups:
        assert (a.step, a.prompt_id, a.statistics.keys()) == (b.step, b.prompt_id, b.statistics.keys())
        assert a.gram is not None
        torch.testing.assert_close(b.gram, a.gram, rtol=1e-5, atol=1e-6 * float(a.gram.abs().max()))
        assert a.by_layer.keys() == b.by_layer.keys() and torch.equal(a.rewards, b.rewards)
    for a, b in zip(one.rollouts(), several.rollouts(), strict=True):
        assert (a.step, a.group, a.index, a.completion) == (b.step, b.group, b.index, b.completion)
        torch.testing.assert_close(a.log_probs, b.log_probs, rtol=0, atol=1e-5)
    for a, b in zip(one.metrics(), several.metrics(), strict=True):
        assert a.keys() == b.keys()
        same = {name for name in a if not name.startswith("time")}
        assert {n: b[n] for n in same} == pytest.approx({n: a[n] for n in same}, rel=1e-4, abs=1e-6, nan_ok=True)
    for a, b in zip(one.batches(), several.batches(), strict=True):
        torch.testing.assert_close(a.gram, b.gram, rtol=1e-4, atol=1e-6 * float(a.gram.abs().max()))


def test_every_process_counts_alike_and_the_first_one_speaks(found):
    first, second = found
    for name in ("whole", "fsdp", "steps", "first", "rest"):
        assert first[name]["counts"] == second[name]["counts"]
        assert first[name]["said"] and not second[name]["said"]
    assert first["whole"]["counts"] == (7, 0, 13, 1, 0)
    assert first["first"]["counts"][:2] == (3, 0) and first["rest"]["counts"][:2] == (4, 3)


def test_a_folder_that_is_taken_is_refused_in_every_process(found):
    first, second = found
    assert first["taken"] == second["taken"] and "overwrite" in first["taken"]


def test_layers_that_run_again_give_the_same_run(tmp_path, monkeypatch):
    save_policy(tmp_path / "model")
    lines(tmp_path / "dump.jsonl", list(records()))
    calls = []

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        return checkpoint(*args, **kwargs)

    monkeypatch.setattr("scoregram.gram.model.checkpoint", counted)
    plain = alone(tmp_path, tmp_path / "plain")
    assert not calls
    again = alone(tmp_path, tmp_path / "again", checkpointing=True)
    assert calls
    for a, b in zip(plain.groups(), again.groups(), strict=True):
        assert a.gram is not None
        torch.testing.assert_close(b.gram, a.gram, rtol=1e-5, atol=1e-6 * float(a.gram.abs().max()))


def test_one_process_cannot_shard(tmp_path):
    save_policy(tmp_path / "model")
    lines(tmp_path / "dump.jsonl", list(records()))
    with pytest.raises(ValueError, match="measure --fsdp: needs several processes, got one process"):
        alone(tmp_path, tmp_path / "out", fsdp=True)
