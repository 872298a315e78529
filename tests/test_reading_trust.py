"""Rows of a loss, failed self-checks and approximate tokens never look like the rest, in a reading and on its page."""

import math

import pytest
import torch

from scoregram.checks import ScoregramError
from scoregram.exhibits import Figure, Table
from scoregram.reading import CHECK_ERROR, CHECK_ROLLOUTS, Trust, read_run, run_noise
from scoregram.reading.group import OF_SCORES
from scoregram.reading.trust import trust_of
from scoregram.report import write_report
from scoregram.report.run_page import run_page
from scoregram.runs import CHECK_PASSED, RunWriter, needs_gram, open_run
from tests.report_cases import Page, write_run

pytest.importorskip("plotly")

PASSED = dict.fromkeys(range(1, 7), 1e-7)


def reading(folder):
    return read_run(open_run(folder))


def shown(folder) -> tuple[dict, str]:
    """The summary of a page, row by row, and the whole text of the page."""
    page = run_page(open_run(folder))
    tables = [one for section in page.sections for one in section.exhibits if isinstance(one, Table)]
    text = "\n".join(
        [
            *(answer for _, answer in page.answers),
            *(sentence for _, sentence in page.trust),
            *(f"{section.title} {section.text}" for section in page.sections),
        ]
    )
    return {str(row[0]): row for table in tables if table.id == "summary" for row in table.rows}, text


# rows of a loss


def test_rows_of_a_loss_are_not_weighted_again(tmp_path):
    grams = write_run(tmp_path / "loss", kind="loss", evaluated=False)
    run = reading(tmp_path / "loss")
    assert run.rows == "loss" and run.group_size == 4
    for group in run.groups:
        energies = torch.linalg.eigvalsh(grams[group.record.step][0][_rows(group), :][:, _rows(group)]).clamp(min=0)
        rank = energies.sqrt().sum() ** 2 / energies.sum()  # of the rows themselves, no advantages
        assert group.reading is not None and group.reading.effective_rank == pytest.approx(float(rank), rel=1e-9)
        assert all(math.isnan(getattr(group.reading, name)) for name in OF_SCORES)
        assert group.nonzero_rows == 4 and not group.is_complete
        assert group.possible_ranks[0] - 1e-9 <= rank <= group.possible_ranks[1] + 1e-9


def _rows(group) -> slice:
    place = int(group.record.prompt_id.removeprefix("p/"))
    return slice(4 * place, 4 * place + 4)


@pytest.mark.parametrize("statistics", [True, False])
def test_numbers_of_scores_are_absent_from_a_loss_with_the_reason(statistics, tmp_path):
    write_run(tmp_path / "loss", kind="loss", statistics=statistics)
    write_run(tmp_path / "scores")
    rows, text = shown(tmp_path / "loss")
    of_scores = {"variance saved by optimal-loo", "cosine between rollouts", "best group size"}
    of_scores |= {"signal to noise of a step", "noise scale, in rollouts"}
    assert of_scores <= shown(tmp_path / "scores")[0].keys() and not of_scores & rows.keys()
    assert {"effective rank", "top-1 fraction"} <= rows.keys()
    assert "gradients of the trainer's loss, which include their weights" in text
    assert "Gram between prompts was not measured" not in text and "A_i ψ_i" not in text
    assert not any(
        name.removeprefix("group/") in OF_SCORES for line in reading(tmp_path / "loss").lines for name in line
    )


def test_parts_of_groups_say_nothing_about_dead_groups(tmp_path):
    write_run(tmp_path / "run", kind="loss", size=3)  # the config says 4
    run = reading(tmp_path / "run")
    assert math.isnan(run.summary.dead.value) and run.group_size == 4
    assert "parts of groups" in shown(tmp_path / "run")[1]


def test_the_reason_without_noise_components_is_the_right_one(tmp_path):
    write_run(tmp_path / "one", prompts=1)
    assert "no step had two prompts" in shown(tmp_path / "one")[1]


# self-checks


def test_a_run_whose_checks_passed_says_how_well(tmp_path):
    write_run(tmp_path / "run", errors=PASSED | {3: 4e-7})
    run = reading(tmp_path / "run")
    assert not run.trust.failed and not run.is_withheld
    (sentence, few) = run.trust.sentences()
    assert sentence == "Self-check passed at 6 of 6 measured steps, worst relative error 4e-07."
    assert few == (
        "Gradients were measured at 6 steps; conclusions on noise need 13, of which the last 5 are pooled. "
        "Rewards and lengths come from every logged step."
    )
    page = write_report(tmp_path / "run").read_text()
    assert page.index(sentence) < page.index("Contents")


def test_steps_checked_by_their_norm_alone_are_counted_apart():
    lines = [
        {"step": step, CHECK_PASSED: 1.0, CHECK_ERROR: 4e-7, CHECK_ROLLOUTS: float(step <= 2)} for step in range(1, 7)
    ]
    trust = trust_of(lines, [], {})
    assert trust.norm_only == {3, 4, 5, 6}
    ending = "worst relative error 4e-07; 2 of them were compared with the trainer's own gradient."
    assert trust.check_sentence() == f"Self-check passed at 6 of 6 measured steps, {ending}"
    assert trust_of(lines[:2], [], {}).check_sentence().endswith("worst relative error 4e-07.")


def test_means_are_withheld_where_a_step_of_the_last_third_failed(tmp_path):
    write_run(tmp_path / "good", errors=PASSED)
    write_run(tmp_path / "bad", errors=PASSED | {2: 0.5, 6: math.nan})
    good, bad = (reading(tmp_path / name) for name in ("good", "bad"))
    assert bad.trust.failed == {2, 6} and bad.is_withheld and bad.trust.worst_error == 0.5
    for name, value in vars(bad.summary).items():  # what needs no Gram is the same, everything else is unknown
        same = name in ("groups", "reward", "tested", "dead", "equally_hard_dead")
        assert (value == getattr(good.summary, name)) == same, name
    assert "effective rank" in shown(tmp_path / "good")[0] and "effective rank" not in shown(tmp_path / "bad")[0]
    text = Page(write_report(tmp_path / "bad").read_text()).text("li")
    assert "Self-check passed at 4 of 6 measured steps, worst relative error 0.5." in text
    assert "the self-check failed at step 6" in text and "effective rank of a group" not in shown(tmp_path / "bad")[1]


def test_steps_that_failed_are_series_of_their_own(tmp_path):
    write_run(tmp_path / "run", errors=PASSED | {2: 0.5})
    run = reading(tmp_path / "run")
    names = {name for line in run.lines for name in line if needs_gram(name) and not math.isnan(float(line[name]))}
    assert {"gram/snr", "group/effective_rank"} <= names
    for name in names:
        assert 2.0 not in run.series(name)[0] and set(run.series(name, failed=True)[0]) <= {2.0}, name
    assert 2.0 in run.series("reward")[0] and run.series("reward", failed=True) == ((), ())
    sections = run_page(open_run(tmp_path / "run")).sections
    figures = {one.id: one for section in sections for one in section.exhibits if isinstance(one, Figure)}
    for name in ("effective-rank", "top1-fraction", "cosine", "update-norm", "coherence", "drivers"):
        for series in figures[name].series:
            is_failed = series.name.endswith("self-check failed")
            assert (is_failed and series.points and series.x == (2.0,)) or 2.0 not in series.x, (name, series.name)
        assert any(series.name.endswith("self-check failed") for series in figures[name].series)


def test_a_run_without_self_checks_says_so_among_what_it_lacks(tmp_path):
    write_run(tmp_path / "run")
    assert not any("elf-check" in sentence for sentence in reading(tmp_path / "run").trust.sentences())
    assert "No self-check: there was no second gradient" in shown(tmp_path / "run")[1]


# tokens and remarks


def test_everything_from_tokenised_text_is_marked(tmp_path):
    write_run(tmp_path / "run", exact=0.75)
    run = reading(tmp_path / "run")
    assert run.trust.approximate == pytest.approx(0.25) and run.trust.is_approximate
    rows, text = shown(tmp_path / "run")
    exact = {"mean reward", "test accuracy, last", "share of dead groups"}
    assert all(name.endswith(" (approximate)") != (name in exact) for name in rows)
    assert "25.0% of the rollouts are text" in text
    page = run_page(open_run(tmp_path / "run"))
    for section in page.sections:
        if section.title.startswith(("Noise", "Drivers", "Geometry")):
            assert all("(approximate)" in title for title in (section.title, *(one.title for one in section.exhibits)))
    write_run(tmp_path / "long", steps=18, exact=0.75)
    signal = run_page(open_run(tmp_path / "long")).tiles[2]
    assert signal.state != "unknown" and signal.headline.endswith(" (approximate)")
    write_run(tmp_path / "exact", exact=1.0)
    assert "Exact: all token ids are the sampled ones." in reading(tmp_path / "exact").trust.sentences()


def test_every_remark_of_a_run_is_shown(tmp_path):
    write_run(tmp_path / "run")
    with RunWriter.resume(tmp_path / "run", None, environment={"python": "3"}) as writer:
        writer.write_remarks({"model": "The model is not the policy.", "skipped": "2 records were skipped."})
    run = reading(tmp_path / "run")
    assert run.trust.sentences()[-2:] == ["The model is not the policy.", "2 records were skipped."]
    assert all(" (model in doubt)" in name for name in list(shown(tmp_path / "run")[0])[3:])


def test_the_footer_has_a_command_that_works_from_here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "my runs" / "one", steps=1)
    assert "scoregram report &#39;my runs/one&#39;" in write_report("my runs/one").read_text()
    assert run_page(open_run("my runs/one")).answers[0][1].startswith("Yes: test accuracy")


@pytest.mark.parametrize("measured", range(1, 20))
def test_trust_and_noise_count_the_same_last_third(measured):
    """For a training from step 1, for one that was resumed at step 500, and for steps at uneven distances."""
    scalars = {"gram/score_norm": 1.0, "gram/gradient_squared": 1.0, "gram/between_prompts": 0.5}
    scalars |= {"gram/within_prompt": 2.0, "gram/group_baseline": 3.0, "gram/complete_prompts": 4.0}
    for number in (lambda i: 10 * i + 1, lambda i: 500 + i, lambda i: i * i):
        noise = run_noise([{"step": number(i), **scalars} for i in range(measured)], 8)
        trust = Trust(measured=measured)
        assert trust.last_measured == noise.steps and trust.has_few_steps == (not noise.is_conclusive)


def test_what_if_says_that_a_self_check_failed(tmp_path):
    write_run(tmp_path / "run", errors=PASSED | {6: 0.2})
    with pytest.raises(
        ScoregramError, match=r"every self-check in the last third .* got a failed one at step 6\. Train"
    ):
        reading(tmp_path / "run").what_if("rloo")
    write_run(tmp_path / "early", errors=PASSED | {1: 0.2})
    assert reading(tmp_path / "early").what_if("rloo").groups > 0
