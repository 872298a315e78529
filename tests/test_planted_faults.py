"""Every planted fault is found first, and nothing in its healthy twin.

The runs were made by `python -m tests.planted_faults` and are stored; a slow test makes some of them again.
"""

from dataclasses import replace

import pytest

from scoregram.advice import DEMOS, advise, advise_run, demo_names
from scoregram.reading import read_run
from tests.contradictions import contradictions
from tests.planted_faults import FAULTS, FOLDER, make


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found_first(name):
    found = advise(FOLDER / name / "fault")
    assert [one.name for one in found.findings][:1] == [FAULTS[name].finding]
    assert contradictions(found.findings) == []


@pytest.mark.parametrize("name", FAULTS)
def test_its_healthy_twin_has_no_finding(name):
    assert [one.name for one in advise(FOLDER / name / "healthy").findings] == []


@pytest.mark.parametrize("kind", ["fault", "healthy"])
def test_settings_of_trl_are_read_from_its_arguments(kind):
    """`attach` stores the arguments of the trainer one level below those of `scoregram train`."""
    run = read_run(FOLDER / "idle-clipping" / kind)
    trl = {"integration": {"name": "trl"}, "arguments": {"num_iterations": run.config["inner_updates"]}}
    found = advise_run(replace(run, config=trl))
    assert "idle clipping" not in found.undecided
    assert ("idle clipping" in [one.name for one in found.findings]) == (kind == "fault")


def test_there_are_enough_faults_and_they_are_small():
    assert len(FAULTS) >= 22 and len({row.finding for row in FAULTS.values()}) >= 21
    assert sum(path.stat().st_size for path in FOLDER.rglob("*") if path.is_file()) < 2_000_000


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dead-verifier", "truncation", "stuck-batch"])
def test_a_fault_made_again_is_found_again(name, tmp_path):
    assert advise(make(name, "fault", tmp_path / "run")).findings[0].name == FAULTS[name].finding


@pytest.mark.parametrize("name", demo_names())
def test_every_demo_finds_the_fault_that_its_text_names(name):
    fault = (DEMOS / name / "README.md").read_text()
    assert f"“{advise(DEMOS / name).findings[0].name}”" in fault
