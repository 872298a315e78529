import math

import torch

from scoregram.exhibits import Estimate
from scoregram.reading import read_run
from scoregram.report.run_page import gain_table
from scoregram.runs import GroupRecord, RunWriter, open_run


def evaluated(step: int, kind: str, rewards: dict[str, list[float]]) -> list[GroupRecord]:
    return [
        GroupRecord(
            step=step,
            kind=kind,
            prompt_id=name,
            rewards=torch.tensor(each, dtype=torch.float64),
            lengths=torch.zeros(len(each), dtype=torch.int64),
            advantages=torch.zeros(len(each), dtype=torch.float64),
        )
        for name, each in rewards.items()
    ]


def test_gains_are_paired_by_problem(tmp_path):
    before = {f"p{i}": [float(i < 5), 0.0] for i in range(10)}
    after = {f"p{i}": [float(i < 5), 1.0] for i in range(10)}
    with RunWriter.create(tmp_path / "run", {"seed": 0}, environment={}) as writer:
        writer.write_groups(0, evaluated(0, "test", before))
        writer.write_groups(3, evaluated(3, "test", {"p0": [0.0, 0.0]}))
        writer.write_groups(7, evaluated(7, "test", {**after, "new": [1.0, 1.0]}))
        writer.write_groups(7, evaluated(7, "test, greedy", {"p0": [1.0]}))
    run = read_run(open_run(tmp_path / "run"))
    assert run.summary.tested.value == (5 * 1.0 + 5 * 0.5 + 1.0) / 11
    table = gain_table(run.tests)
    assert len(table.rows) == 1  # one greedy evaluation alone says nothing
    name, problems, start, end, gain = table.rows[0]
    assert (name, problems) == ("sampled, as trained", 10)
    assert isinstance(start, Estimate) and isinstance(end, Estimate)
    assert (start.value, end.value) == (0.25, 0.75)
    assert gain == Estimate(0.5, 0.5, 0.5)  # the same for every problem, however much they differ


def test_a_run_without_evaluations_has_no_rows(tmp_path):
    RunWriter.create(tmp_path / "run", {"seed": 0}, environment={}).close()
    run = read_run(open_run(tmp_path / "run"))
    assert not gain_table(run.tests).rows and math.isnan(run.summary.tested.value)
