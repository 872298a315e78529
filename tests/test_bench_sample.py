"""`bench sample`: the record it writes, and the sizes it refuses."""

import json

import pytest

from scoregram.bench.sample import run_sample_bench
from scoregram.checks import ScoregramError

SMALL = {"shape": "llama-tiny", "rollouts": 4, "group_size": 2, "prompt_tokens": 3, "tokens": 5, "repeats": 2}


def test_the_record_holds_both_samplers(tmp_path, capsys):
    out = tmp_path / "records" / "sample.json"
    assert run_sample_bench(**SMALL, device="cpu", as_json=True, out=out) == 0
    record = json.loads(out.read_text())
    assert json.loads(capsys.readouterr().out) == record
    assert [row["way"] for row in record["rows"]] == ["generate", "sample"]
    assert record["rows"][0]["speedup"] == 1
    for row in record["rows"]:
        assert row["tokens_per_second"] == pytest.approx(4 * 5 / row["seconds"])
    assert record["settings"]["decoding"] == "fused" and record["settings"]["rollouts"] == 4
    run_sample_bench(**SMALL, device="cpu")
    assert "tokens/s" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"rollouts": 5}, "rollouts must be whole groups, got 5 rollouts in groups of 2"),
        ({"tokens": 0}, "--tokens: must be at least 1, got 0"),
        ({"prompt_tokens": 0}, "--prompt-tokens: must be at least 1"),
        ({"shape": "nope"}, "must be one of"),
        ({"dtype": "int8"}, "must be one of"),
        ({"device": "tpu"}, "must be auto, cpu or cuda"),
    ],
)
def test_sizes_without_meaning(changes, match):
    with pytest.raises(ScoregramError, match=match):
        run_sample_bench(**(SMALL | {"device": "cpu"} | changes))
