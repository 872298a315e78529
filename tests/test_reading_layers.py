"""What layers have of a run: shares of norms and energies against their definition."""

from dataclasses import replace

import pytest
import torch

from scoregram.reading import layer_energy_shares, layer_shares, read_run
from scoregram.runs import GroupRecord, RunWriter, open_run


def test_layers_share_the_squared_norms(tmp_path):
    names = [*(f"layers.{depth}.mlp" for depth in range(30)), "head"]
    gram = torch.eye(2, dtype=torch.float64)
    by_layer = {name: gram * (1.0 + place) for place, name in enumerate(names)}
    record = GroupRecord(
        step=1,
        prompt_id="p",
        rewards=torch.tensor([1.0, 0.0]).double(),
        lengths=torch.ones(2).long(),
        advantages=torch.tensor([0.5, -0.5]).double(),
        gram=gram,
        by_layer=by_layer,
    )
    with RunWriter.create(tmp_path / "run", {}, environment={}) as writer:
        writer.write_groups(1, [record, replace(record, kind="fixed", by_layer={"other": gram})])
        writer.write_groups(2, [replace(record, step=2, by_layer={name: by_layer[name] for name in names[:2]})])
    run = open_run(tmp_path / "run")
    many = layer_shares(run, [1])  # 31 names: those that differ in depth alone are added up
    assert many.steps == (1.0,) and many.layers == ("layers.*.mlp", "head")
    assert [row[0] for row in many.shares] == pytest.approx([465 / 496, 31 / 496])
    few = layer_shares(run, [2])
    assert few.layers == tuple(names[:2]) and [row[0] for row in few.shares] == pytest.approx([1 / 3, 2 / 3])
    assert layer_shares(run, []).steps == ()


def test_shares_of_layers_are_those_of_their_update(tmp_path):
    generator = torch.Generator().manual_seed(0)
    wanted = {}
    with RunWriter.create(tmp_path / "run", {"group_size": 4}, environment={}, layers="float64") as writer:
        for step in range(1, 13):
            layers = {name: torch.randn(4, 3, generator=generator, dtype=torch.float64) for name in ("a", "b")}
            advantages = torch.tensor([1.0, -1.0, 0.5, -0.5], dtype=torch.float64)
            energy = {name: float((advantages @ scores).square().sum()) for name, scores in layers.items()}
            wanted[step] = energy["a"] / sum(energy.values())
            grams = {name: scores @ scores.mT for name, scores in layers.items()}
            record = GroupRecord(
                step=step,
                prompt_id="p",
                rewards=torch.tensor([1.0, 0.0, 1.0, 0.0], dtype=torch.float64),
                lengths=torch.ones(4).long(),
                advantages=advantages,
                gram=grams["a"] + grams["b"],
                by_layer=grams,
            )
            writer.write_groups(step, [record])
            writer.write_metrics(step, {"reward": 0.5})
    shares = layer_energy_shares(read_run(tmp_path / "run"))
    assert shares is not None
    names, first, last = shares
    assert names == ["a", "b"]
    assert first[:, 0].tolist() == pytest.approx([wanted[step] for step in range(1, 7)])
    assert last[:, 0].tolist() == pytest.approx([wanted[step] for step in range(7, 13)])
