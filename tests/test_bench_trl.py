"""The cost of a measured step of TRL is measured, and says what it found."""

import json

import pytest

from scoregram.bench.trl import run_trl_bench
from scoregram.checks import ScoregramError

SMALL = {"shape": "llama-tiny", "rollouts": 8, "group_size": 4, "micro_batch_size": 4, "tokens": 8, "repeats": 1}


@pytest.mark.integration
@pytest.mark.filterwarnings("ignore")
def test_measured_and_plain_steps_take_turns(tmp_path, capsys):
    pytest.importorskip("trl")
    ways = ["fused", "separate", "accumulated", "idle"]
    run_trl_bench(**SMALL, ways=ways, device="cpu", checkpointing=(False,), as_json=True, out=tmp_path / "record.json")
    record = json.loads((tmp_path / "record.json").read_text())
    assert json.loads(capsys.readouterr().out) == record
    assert record["settings"]["rollouts"] == 8
    assert [(row["mode"], row["way"]) for row in record["rows"]] == [(m, w) for m in ("scores", "loss") for w in ways]
    for row in record["rows"]:
        # fused steps compare one rollout, or none while comparisons take too large a share of the time
        expected = {"separate": ([8, 8, 8],), "idle": ([],)}.get(row["way"], ([8, 1, 1], [8, 1, 0]))
        assert row["compared"] in expected
        assert len(row["seconds"][0]) == len(row["seconds"][1]) == (2 if row["way"] == "idle" else 1)
        assert row["overhead"] == pytest.approx(row["measured_seconds"] / row["plain_seconds"] - 1)
        assert row["error"] is None if row["way"] == "idle" else row["error"] <= 1e-5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"shape": "llama-9t"}, "--shape"),
        ({"rollouts": 6}, "multiple of --group-size 4, got 6"),
        ({"group_size": 1}, "--group-size: must be at least 2"),
        ({"repeats": 0}, "--repeats: must be at least 1"),
        ({"modes": ("psi",)}, "must be among scores, loss"),
        ({"ways": ("twice",)}, "must be among fused, separate, accumulated"),
        ({"ways": ("replayed",), "device": "cpu"}, "bench trl --ways: CUDA graphs need a GPU, got replayed."),
        ({"device": "tpu"}, "bench trl --device: must be auto, cpu or cuda, got 'tpu'."),
        ({"micro_batch_size": 8}, "--micro-batch-size: must be less than --rollouts to accumulate"),
    ],
)
def test_what_leaves_nothing_to_measure_is_refused(changes, message):
    with pytest.raises(ScoregramError, match=message):
        run_trl_bench(**(SMALL | changes))
