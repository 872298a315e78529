"""`bench preset`: the trainer itself, on a small shape; what it records and what it refuses."""

import json
from dataclasses import replace

import pytest
import torch

from scoregram.bench import preset as bench
from scoregram.bench.preset import every_other, run_preset_bench
from scoregram.checks import ScoregramError
from scoregram.studies.grpo_rank import presets
from scoregram.studies.grpo_rank.presets import PRESETS, largest_config


@pytest.fixture(autouse=True)
def _small_preset(monkeypatch):
    small = replace(PRESETS["quick"], batch_size=16, max_new_tokens=3)
    monkeypatch.setattr(presets, "PRESETS", {"quick": small})


def run_bench(**settings) -> int:
    """As the command does: the preset's config from its study, the rest as given."""
    return run_preset_bench(largest_config(settings["preset"]), **settings)


SMALL = {"preset": "quick", "shape": "llama-tiny", "prompt_tokens": 4, "steps": 5, "eval_problems": 8, "device": "cpu"}


def test_the_record_has_a_row_for_every_size_of_a_pass(tmp_path, capsys):
    out = tmp_path / "records" / "preset.json"
    assert run_bench(**SMALL, micro_batch_sizes=(0, 8), as_json=True, out=out) == 0
    record = json.loads(out.read_text(), parse_constant=pytest.fail)
    assert json.loads(capsys.readouterr().out) == record
    assert [row["micro_batch_size"] for row in record["rows"]] == [0, 8]
    for row in record["rows"]:
        assert row["skipped"] is None and row["plain_seconds"] > row["sample_seconds"] / 2 > 0
        assert min(row["measured_seconds"], row["probe_seconds"], row["eval_seconds"]) > 0
    assert record["settings"]["batch_size"] == 16 and record["settings"]["group_size"] == 8


def test_a_run_that_does_not_fit_says_so(monkeypatch, capsys):
    def no_room(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate much.")

    monkeypatch.setattr(bench, "train", no_room)
    assert run_bench(**SMALL) == 0
    assert "all per pass: skipped. CUDA out of memory" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"preset": "nope"}, "must be one of"),
        ({"shape": "nope"}, "must be one of"),
        ({"prompt_tokens": 0}, "--prompt-tokens: must be at least 1, got 0"),
        ({"steps": 4}, "--steps: must be at least 5, got 4"),
        ({"eval_problems": 0}, "--eval-problems: must be at least 1, got 0"),
        ({"device": "tpu"}, "must be auto, cpu or cuda"),
    ],
)
def test_sizes_without_meaning(changes, match):
    with pytest.raises(ScoregramError, match=match):
        run_bench(**(SMALL | changes))


def test_every_group_has_right_and_wrong_rollouts():
    assert every_other(["a", "b", "c", "d"], prompts=[]) == [1.0, 0.0, 1.0, 0.0]
