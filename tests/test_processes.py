"""Two connected processes exchange results, and an error in one of them is an error in both."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from scoregram import distributed
from scoregram.checks import ScoregramError
from scoregram.distributed import ALONE, Processes, all_processes
from tests.forked import START_METHOD


def message_of(exchange: Any, *args: Any, **kwargs: Any) -> str:
    """Type and text of the error that a call raises."""
    try:
        exchange(*args, **kwargs)
    except (ScoregramError, ZeroDivisionError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def averaged(processes: Processes) -> tuple[list[torch.Tensor], list[int]]:
    """Means of tensors of several dtypes, layouts and sizes, and how many numbers each message had."""
    mine = float(processes.rank)
    tensors = [
        torch.full((2, 3), mine),
        torch.arange(6.0).view(2, 3).T * mine,  # not contiguous
        torch.tensor(mine, dtype=torch.float64),
        torch.full((40,), mine),  # larger than a bucket
        torch.tensor([]),
        torch.full((5,), 4 * mine),
    ]
    messages: list[int] = []
    inner, limit = dist.all_reduce, distributed.BUCKET_BYTES
    distributed.BUCKET_BYTES = 100
    try:
        dist.all_reduce = lambda value: messages.append(value.numel()) or inner(value)
        processes.average(tensors)
    finally:
        dist.all_reduce, distributed.BUCKET_BYTES = inner, limit
    return tensors, messages


def exchanges(rank: int, folder: Path) -> None:
    """Every exchange once, and one after each error: no process is left behind."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)

    def refused() -> int:
        raise ScoregramError("attach: every must be at least 1, got 0. 1 measures every step.")

    with all_processes() as processes:
        found = {
            "processes": (processes.rank, processes.count, processes.is_first),
            "gather": processes.gather(lambda: rank + 10),
            "to the first": processes.gather(lambda: rank + 10, only_first=True),
            "from first": processes.from_first(lambda: f"by {rank}"),
            "sum": processes.sum(torch.tensor([1.0, rank])),
            "average": averaged(processes),
            "any": (processes.any(rank == 1), processes.any(False)),
            "failed": message_of(processes.gather, lambda: 1 // (1 - rank)),
            "failed to the first": message_of(processes.gather, lambda: 1 // (1 - rank), only_first=True),
            "refused": message_of(processes.from_first, refused),
            "afterwards": processes.gather(lambda: rank),
        }
    assert dist.is_initialized()
    torch.save(found, folder / f"{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("processes")
    mp.start_processes(exchanges, (folder,), nprocs=2, start_method=START_METHOD)  # pyright: ignore[reportPrivateImportUsage]
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


def test_results_reach_all_processes_or_the_first(found):
    assert [one["processes"] for one in found] == [(0, 2, True), (1, 2, False)]
    assert [one["gather"] for one in found] == [[10, 11], [10, 11]]
    assert [one["to the first"] for one in found] == [[10, 11], []]
    assert [one["from first"] for one in found] == ["by 0", "by 0"]
    assert [one["sum"].tolist() for one in found] == [[2.0, 1.0], [2.0, 1.0]]
    for one in found:
        tensors, messages = one["average"]
        expected = [[[0.5] * 3] * 2, [[0.0, 1.5], [0.5, 2.0], [1.0, 2.5]], 0.5, [0.5] * 40, [], [2.0] * 5]
        assert [tensor.tolist() for tensor in tensors] == expected
        assert messages == [12, 1, 40, 5] and tensors[2].dtype == torch.float64
    assert [one["any"] for one in found] == [(True, False), (True, False)]


def test_an_error_in_one_process_is_an_error_in_all(found):
    for case in ("failed", "failed to the first"):
        assert found[1][case].startswith("ZeroDivisionError: ")
        assert found[0][case].startswith("ScoregramError: several processes: every process must finish its part, got ")
        assert "ZeroDivisionError" in found[0][case] and " in process 1." in found[0][case]
    refused = "ScoregramError: attach: every must be at least 1, got 0. 1 measures every step."
    assert [one["refused"] for one in found] == [refused, refused]
    assert [one["afterwards"] for one in found] == [[0, 1], [0, 1]]


def test_one_process_exchanges_nothing():
    with all_processes() as processes:
        assert processes == ALONE == Processes(0, 1)
    assert ALONE.gather(lambda: 1) == ALONE.gather(lambda: 1, only_first=True) == [1]
    assert ALONE.from_first(lambda: 2) == 2 and ALONE.any(True) and not ALONE.any(False)
    alone = torch.ones(2)
    ALONE.average([alone])
    assert torch.equal(alone, torch.ones(2)) and torch.equal(ALONE.sum(torch.ones(2)), torch.ones(2))
    with pytest.raises(ZeroDivisionError):
        ALONE.gather(lambda: 1 // 0)
