"""Advice, cards and pages: what a failed check, re-tokenised text or a wrong model spoils is left out or marked."""

import io
import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

from scoregram import cli
from scoregram.advice import GRAM_RULES, RunFinding, advise, advise_log, advise_run, run_log
from scoregram.advice.diagnose import WITHOUT_GRAMS, _attributed, print_diagnosis
from scoregram.advice.findings import Undecided
from scoregram.reading import FROM_GRAM, StoredGroup, layer_energy_shares, read_run, run_sets
from scoregram.reading.several import quantities
from scoregram.report.several_page import difference_table, several_figures
from scoregram.runs import GroupRecord, RunWriter
from tests.planted_faults import FOLDER
from tests.report_cases import Page, write_run

MEASURED = ("conflicting-prompts", "dominating-rollout", "exploding-layer", "random-verifier")
"""Planted faults whose runs hold Grams."""
FROM_GRAMS = GRAM_RULES.keys() - WITHOUT_GRAMS
REMARKS = {"model": "The model is not the policy.", "approximate": "Approximate: all text was tokenised again."}
MARK = " (approximate, model in doubt)"


def planted_run(name: str, folder: Path, failed: set[int] | None = None) -> Path:
    """A copy of a planted fault whose self-checks failed at some steps, or at all of them."""
    shutil.copytree(FOLDER / name / "fault", folder)
    metrics = folder / "metrics.jsonl"
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    for line in lines:
        is_failed = failed is None or line["step"] in failed
        line |= {"check/passed": float(not is_failed), "check/relative_error": 0.4 if is_failed else 1e-7}
    metrics.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return folder


def doubted_run(name: str, folder: Path) -> Path:
    """A copy of a planted fault with the remarks of a wrong model and of re-tokenised text."""
    shutil.copytree(FOLDER / name / "fault", folder)
    with RunWriter.resume(folder, None, environment={"python": "3"}) as writer:
        writer.write_remarks(REMARKS)
    return folder


def terminal_text(path: Path) -> str:
    console = Console(file=io.StringIO(), width=500)
    print_diagnosis(advise(path), console)
    return console.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", MEASURED)
def test_no_finding_rests_on_the_grams_of_failed_steps(name, tmp_path):
    found = advise(planted_run(name, tmp_path / "run"))
    run = read_run(tmp_path / "run")
    from_log = advise_log(run_log("", run.lines, run.config, run.last_third))
    allowed = {one.name for one in from_log.findings} | {"group size"}  # which has an answer from rewards alone
    assert {one.name for one in found.findings} <= allowed
    assert all(one.without_gram for one in found.findings if one.name == "group size")
    assert not any("gradient energy" in one.sentence for one in found.findings)
    steps = len(run.lines)
    reason = f"first make the self-check pass, which failed or could not be made at {steps} of {steps} measured steps"
    assert all(told.startswith(reason) for name, told in found.undecided.items() if name in FROM_GRAMS)
    assert not FROM_GRAMS & set(found.fine)


@pytest.mark.parametrize("name", MEASURED)
def test_every_finding_from_a_doubted_gram_is_marked(name, tmp_path):
    good = {one.name: one for one in advise(FOLDER / name / "fault").findings}
    found = advise(doubted_run(name, tmp_path / "run"))
    assert {one.name for one in found.findings} == good.keys()
    assert {one.name for one in found.findings} & FROM_GRAMS
    printed = terminal_text(tmp_path / "run")
    for one, plain in zip(found.findings, found.plain()["findings"], strict=True):
        if one.name not in FROM_GRAMS or one.without_gram:
            assert not one.mark and not plain["mark"] and one.confidence == good[one.name].confidence
            told = one.sentence.replace(f"of the gradient energy{MARK}.", "of the gradient energy.")
            assert told == good[one.name].sentence and ("gradient energy." in told) == (told != one.sentence)
            continue
        assert one.mark == MARK and one.confidence == "possible" and MARK in one.sentence
        assert one.change is None or MARK in one.change.sentence
        assert "may not be the policy" in one.evidence and plain["number"]["label"].endswith(MARK)
        assert plain["mark"] == "approximate, model in doubt" and f"{one.name}{MARK}\n" in printed


@pytest.mark.parametrize("spoilt", ["failed", "doubted"])
def test_advice_says_how_far_to_trust_the_numbers(spoilt, tmp_path, capsys):
    folder = tmp_path / "run"
    planted_run("exploding-layer", folder) if spoilt == "failed" else doubted_run("exploding-layer", folder)
    sentences = read_run(folder).trust.sentences()
    said = "It failed or could not be made at step 1, 2, 3" if spoilt == "failed" else REMARKS["model"]
    assert any(said in one for one in sentences)
    found = advise(folder)
    assert list(found.trust) == sentences == found.plain()["trust"]
    assert all(one in found.text() and one in terminal_text(folder) for one in sentences)
    assert cli.main(["advise", str(folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["trust"] == sentences


def test_the_page_of_a_doubted_run_marks_cards(tmp_path):
    pytest.importorskip("plotly")
    from scoregram.report import write_report

    folder = doubted_run("exploding-layer", tmp_path / "run")
    page = Page(write_report(folder).read_text())
    assert f"exploding layer{MARK}" in page.text("h3")
    assert f"lower its learning rate{MARK}." in page.text("p")
    assert f"Norms, cosines and shares here are in doubt{MARK}: Tokens of re-tokenised text" in page.text("p")
    failed = Page(write_report(planted_run("exploding-layer", tmp_path / "failed")).read_text())
    assert "exploding layer" not in failed.text("h3")


def test_a_failed_step_does_not_count_in_shares_of_layers(tmp_path):
    """The shares of the other steps are those of the definition, `aᵀ K_layer a` over the sum of all layers."""
    run = read_run(planted_run("exploding-layer", tmp_path / "run", failed={2, 3}))
    assert run.folder is not None
    found = layer_energy_shares(run, steps=5)
    assert found is not None and run.usable_steps[:3] == [1, 4, 5]
    names, first, _ = found
    wanted = []
    for step in run.usable_steps[:5]:
        energy = np.zeros(len(names))
        for record in run.folder.groups([step]):
            a = record.advantages.double().numpy()
            energy += [a @ record.by_layer[name].double().numpy() @ a for name in names]
        wanted.append(energy / energy.sum())
    np.testing.assert_allclose(first, np.array(wanted), rtol=1e-10)


# rows of a loss


def loss_run(folder: Path, steps: int = 12) -> dict[int, dict[str, torch.Tensor]]:
    """A run whose rows are gradients of a loss in two layers; step → layer → the rows."""
    known = {}
    with RunWriter.create(folder, {"group_size": 4}, environment={"python": "3"}, layers="float64") as writer:
        for step in range(1, steps + 1):
            generator = torch.Generator().manual_seed(step)
            rows = {name: torch.randn(4, 3, generator=generator, dtype=torch.float64) for name in ("a", "b")}
            rewards = torch.tensor([1.0, 0.0, 0.0, 0.0], dtype=torch.float64)
            record = GroupRecord(
                step=step,
                prompt_id="p/0",
                kind="loss",
                rewards=rewards,
                lengths=torch.ones(4).long(),
                advantages=100 * (rewards - rewards.mean()),  # would change every share if used
                gram=sum(one @ one.mT for one in rows.values()),  # type: ignore[arg-type]
                by_layer={name: one @ one.mT for name, one in rows.items()},
            )
            writer.write_groups(step, [record])
            norm = 1.0 + 1e-3 * step + 50 * (step == 9)
            writer.write_metrics(step, {"reward": 0.25, "grad_norm": norm})
            known[step] = rows
    return known


def test_layers_of_loss_rows_are_not_weighted_again(tmp_path):
    known = loss_run(tmp_path / "run")
    found = layer_energy_shares(read_run(tmp_path / "run"), steps=5)
    assert found is not None and found[0] == ["a", "b"]
    sums = [[float(known[step][name].sum(0).square().sum()) for name in ("a", "b")] for step in range(1, 6)]
    wanted = np.array(sums) / np.array(sums).sum(axis=1, keepdims=True)
    np.testing.assert_allclose(found[1], wanted, rtol=1e-9)


def test_energies_of_loss_rows_are_their_own_squared_norms(tmp_path):
    known = loss_run(tmp_path / "run")
    group = read_run(tmp_path / "run").groups[8]
    norms = sum(one.square().sum(1) for one in known[9].values())
    assert isinstance(norms, torch.Tensor)
    torch.testing.assert_close(group.row_energies(), norms)
    scores = StoredGroup(replace(group.record, kind="train"))
    torch.testing.assert_close(scores.row_energies(), scores.record.advantages.square() * norms)
    assert StoredGroup(replace(group.record, gram=None)).row_energies().tolist() == []


def spike_sentence(run) -> str:
    """Spikes at steps 7 and 9, of which the second is the worst."""
    spike = RunFinding(name="gradient spikes", severity="warning", sentence="A spike.", since=7, evidence="")
    norms = {7: 20.0, 9: 50.0}
    log = run_log("", [{"step": int(line["step"]), "grad_norm": norms.get(line["step"], 1.0)} for line in run.lines])
    return _attributed(spike, run, log).sentence


def test_a_spike_is_attributed_to_a_loss_row_and_to_no_failed_step(tmp_path):
    known = loss_run(tmp_path / "run")
    run = read_run(tmp_path / "run")
    norms = sum(one.square().sum(1) for one in known[9].values())
    assert isinstance(norms, torch.Tensor)
    place, share = int(norms.argmax()), float(norms.max() / norms.sum())
    energies = {name: float(rows.sum(0).square().sum()) for name, rows in known[9].items()}  # rows are weighted
    layer = max(energies, key=lambda name: energies[name])
    told = f"A spike. At step 9, rollout {place} of p/0 has {share:.0%} of the gradient energy, and the layer {layer} "
    told += f"{energies[layer] / sum(energies.values()):.0%} of the update's energy."
    assert spike_sentence(run) == told
    doubted = replace(run, remarks={"model": "Another one."})
    assert spike_sentence(doubted) == told[:-1] + " (model in doubt)."
    failed = replace(run, lines=[*run.lines[:8], {**run.lines[8], "check/passed": 0.0}, *run.lines[9:]])
    assert spike_sentence(failed).startswith("A spike. At step 7, rollout ")  # the worst one that can be trusted
    none = replace(run, lines=[{**line, "check/passed": 0.0} for line in run.lines])
    assert spike_sentence(none) == "A spike."


def test_cosines_of_loss_rows_decide_nothing(tmp_path):
    loss_run(tmp_path / "run")
    verdict = GRAM_RULES["lost exploration"](read_run(tmp_path / "run"))
    assert isinstance(verdict, Undecided) and "measure scores" in verdict.needs


# several runs, and other estimators


def set_of_two(tmp_path: Path, **second):
    write_run(tmp_path / "good", steps=18, evaluated=False)
    write_run(tmp_path / "other", steps=18, evaluated=False, **second)
    return {name: read_run(tmp_path / name) for name in ("good", "other")}


@pytest.mark.parametrize(
    ("second", "mark"),
    [
        ({}, ""),
        ({"exact": 0.5}, " (approximate: 1 of 2 runs)"),
        (
            {"errors": dict.fromkeys(range(1, 18), 1e-7) | {18: 0.5}},
            " (withheld after a failed self-check: 1 of 2 runs)",
        ),
        (
            {"errors": dict.fromkeys(range(2, 19), 1e-7) | {1: 0.5}},
            " (without steps whose self-check failed: 1 of 2 runs)",
        ),
    ],
)
def test_numbers_of_several_runs_carry_the_mark_of_each(second, mark, tmp_path):
    pytest.importorskip("plotly")
    runs = set_of_two(tmp_path, **second)
    (pooled,) = run_sets(runs)
    assert pooled.mark == mark
    rows = {str(row[0]): row[1] for row in difference_table([pooled]).rows}
    assert quantities(runs["good"]).keys() >= FROM_GRAM and len(rows.keys() & FROM_GRAM) >= 4  # one is infinite
    assert all(
        name == (f"{pooled.name}{mark}" if quantity in FROM_GRAM else pooled.name) for quantity, name in rows.items()
    )
    figures = {figure.id: [series.name for series in figure.series] for figure in several_figures([pooled])}
    assert figures["rank"] == figures["snr"] == figures["norm"] == [f"{pooled.name}{mark}"]
    assert figures["reward"] == [pooled.name]


def test_a_set_in_doubt_as_a_whole_has_one_mark(tmp_path):
    runs = set_of_two(tmp_path)
    runs = {name: replace(run, remarks=REMARKS) for name, run in runs.items()}
    assert [one.mark for one in run_sets(runs)] == [" (approximate; model in doubt)"]


def test_replayed_estimators_carry_the_mark(tmp_path, capsys):
    write_run(tmp_path / "run", exact=0.5)
    assert cli.main(["whatif", str(tmp_path / "run"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["mark"] == "approximate" and found["trust"] == read_run(tmp_path / "run").trust.sentences()
    assert cli.main(["whatif", str(tmp_path / "run")]) == 0
    assert "(approximate)" in capsys.readouterr().out


def test_a_run_without_faults_of_measurement_has_no_mark(tmp_path):
    write_run(tmp_path / "run", steps=18, exact=1.0)
    found = advise_run(read_run(tmp_path / "run"))
    assert not any(one.mark for one in found.findings) and "first make the self-check" not in found.text()
