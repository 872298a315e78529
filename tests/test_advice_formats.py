"""Logs of every format give one diagnosis; torn and broken files are read as far as possible, or get one sentence."""

import csv
import json
import struct
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scoregram import cli
from scoregram.advice import advise, advise_log, run_log
from scoregram.advice.formats import protobuf_fields, read_log, wandb_records
from scoregram.checks import ScoregramError
from tests.test_advice import NOISE, RAMP, healthy, lines_of


def trl_state(folder: Path, lines: list[dict[str, Any]]) -> Path:
    (folder / "checkpoint-60").mkdir()
    path = folder / "checkpoint-60" / "trainer_state.json"
    path.write_text(json.dumps({"log_history": lines, "global_step": 60}))
    return folder


def verl_jsonl(folder: Path, lines: list[dict[str, Any]]) -> Path:
    path = folder / "metrics.jsonl"
    rows = ({"step": line["step"], "data": {k: v for k, v in line.items() if k != "step"}} for line in lines)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 61, "da')
    return path


def table_csv(folder: Path, lines: list[dict[str, Any]]) -> Path:
    path = folder / "log.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(lines[0]))
        writer.writeheader()
        writer.writerows(lines)
    return path


def event_files(folder: Path, lines: list[dict[str, Any]]) -> Path:
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(log_dir=str(folder / "tb")) as writer:
        for line in lines:
            for name, value in line.items():
                if name != "step":
                    writer.add_scalar(f"train/{name}", value, global_step=line["step"])
    return folder / "tb"


WRITERS = {"trainer_state.json": trl_state, "verl": verl_jsonl, "csv": table_csv, "tensorboard": event_files}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("kind", WRITERS)
def test_every_format_gives_the_same_diagnosis(kind, tmp_path):
    lines = lines_of({**healthy(), "entropy": np.exp(-4 * RAMP) * (1 + 0.05 * NOISE)})
    expected = advise_log(run_log("x", lines))
    found = advise(WRITERS[kind](tmp_path, lines))
    assert [one.name for one in found.findings] == [one.name for one in expected.findings] == ["entropy collapse"]
    tolerance = 1e-5 if kind == "tensorboard" else 1e-12  # event files hold float32
    assert found.findings[0].number.value == pytest.approx(expected.findings[0].number.value, rel=tolerance)


WANDB = Path(__file__).parent / "planted" / "offline.wandb"


def test_an_offline_run_of_wandb_is_read_without_the_package():
    """The file was written by wandb itself: 40 steps, reward step/40 and a NaN loss at step 7; one long text a step."""
    log = read_log(WANDB)
    reward = log.series("reward")
    assert reward.steps.tolist() == list(range(40))
    assert reward.values.tolist() == pytest.approx([step / 40 for step in range(40)])
    assert log.bad_steps("loss") == [7]
    assert "wandb" not in sys.modules


def test_a_torn_file_of_wandb_gives_what_is_complete(tmp_path):
    content = WANDB.read_bytes()
    whole = list(wandb_records(content))
    cut = tmp_path / "run.wandb"
    cut.write_bytes(content[: len(content) * 2 // 3])
    assert 0 < len(read_log(cut).lines) < 40 and len(list(wandb_records(content[:-5]))) <= len(whole)
    assert list(protobuf_fields(bytes([0x08, 0x96, 0x01, 0x12, 0x02, 0x68, 0x69]))) == [(1, 150), (2, b"hi")]


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("x.txt", "1", "must be a log"),
        ("x.jsonl", "{\n{}\n", "line 1 of"),
        ("x.jsonl", '{"reward": 1}\n', "no record with a step"),
        ("x.json", "[", "must be JSON"),
        ("x.json", "{}", "must have log_history"),
        ("x.wandb", "nothing", "must be a file of an offline run"),
        ("x.csv", "", "no readable record"),
        ("x.csv", "iteration,reward\n1,0.5\n", "but the columns iteration, reward. Name the column"),
        ("x.csv", "reward\n0.5\n", "but the column reward. Name"),
        ("x.jsonl", '{"iteration": 1, "reward": 0.5}\n', "but the columns iteration, reward. Name the column"),
        ("x.jsonl", '{"step": "12", "reward": 0.5}\n', "got no number as 'step', but '12'"),
        ("x.csv", "step,reward\n1e30,0.5\n", "got no number as 'step', but 1e\\+30"),
        ("x.jsonl", f'{{"step": 1{"0" * 400}, "reward": 0.5}}\n', "got no number as 'step', but 1000"),
        ("x.json", "[" * 100_000, "must be JSON, got maximum recursion depth"),
        ("x.jsonl", "[" * 100_000, "must be JSON, got maximum recursion depth"),
        ("x.csv", "s\0t\0e\0p\0", "must be text in UTF-8, got the byte 0x00 at place 1"),
        ("x.csv", f"step,note\n1,{'x' * 200_000}\n", "must be a table with a row per step, got field larger"),
    ],
)
def test_a_file_that_cannot_be_read_gets_one_sentence(name, content, told, tmp_path):
    (tmp_path / name).write_text(content)
    with pytest.raises(ScoregramError, match=told):
        advise(tmp_path / name)


def test_a_folder_without_a_log_says_what_it_holds(tmp_path, capsys):
    (tmp_path / "notes.md").write_text("x")
    assert cli.main(["advise", str(tmp_path)]) == 2 and "notes.md" in capsys.readouterr().err
    assert cli.main(["advise", str(tmp_path / "none")]) == 2 and "no such file" in capsys.readouterr().err


def test_the_training_step_comes_before_the_count_of_records():
    """Weights & Biases counts records; a record without a training step belongs to the one before it."""
    rows = [{"_step": place, "train/global_step": 10 * (place + 1), "train/kl": 0.1 * place} for place in range(20)]
    log = run_log("x", [*rows[:5], {"_step": 5, "eval/reward": 0.5}, *rows[5:]])
    assert log.series("kl").steps.tolist() == [10 * (place + 1) for place in range(20)]
    assert log.series("held_out").steps.tolist() == [50]
    assert run_log("x", [{"_step": 3, "kl": 0.1}]).series("kl").steps.tolist() == [3]
    assert run_log("x", [{"step": 3, "kl": 0.1}, {"kl": 0.2}]).series("kl").values.tolist() == [0.1]


def test_a_table_that_weights_and_biases_exports_is_read(tmp_path):
    ends = ("", "__MIN", "__MAX")
    rows = [{"Step": s, **{f"a run - train/kl{end}": s / 10 + len(end) for end in ends}} for s in range(1, 21)]
    series = read_log(table_csv(tmp_path, rows)).series("kl")
    assert series.steps.tolist() == list(range(1, 21)) and series.values.tolist() == [s / 10 for s in range(1, 21)]
    both = [{"Step": 1, "a - train/kl": 0.1, "b - train/kl": 0.2}]
    with pytest.raises(ScoregramError, match="must hold one run, got a, b"):
        read_log(table_csv(tmp_path, both))


def test_null_is_missing_and_nan_is_not_finite_however_it_is_spelled(tmp_path):
    """`to_json` of pandas fills rows of an evaluation with null."""
    path = tmp_path / "log.jsonl"
    values = {1: "0.5", 2: "null", 3: '"NaN"', 4: "NaN", 5: '"Infinity"', 6: "-Infinity", 7: '"none"', 8: "true"}
    path.write_text("".join(f'{{"step": {step}, "loss": {value}, "kl": 0.1}}\n' for step, value in values.items()))
    log = read_log(path)
    assert log.bad_steps("loss") == [3, 4, 5, 6] and log.series("loss").steps.tolist() == [1]
    merged = [*lines_of(healthy()), *({"step": 60 + s, "loss": None, "grad_norm": None} for s in range(1, 7))]
    path.write_text("".join(json.dumps(line) + "\n" for line in merged))
    assert [one.name for one in advise(path).findings] == []


@pytest.mark.parametrize("key", ["val/test_score/{}", "val-core/{}/reward/mean@8"])
def test_the_held_out_score_of_verl_is_the_mean_over_its_data_sources(key):
    lines: list[dict[str, Any]] = [{"step": step, "critic/score/mean": 0.5} for step in range(1, 9)]
    for step, one, other in ((2, 0.2, 0.6), (4, 0.4, 0.8)):
        lines[step - 1] |= {key.format("openai/gsm8k"): one, key.format("math"): other}
    lines[5][key.format("math")] = 1.0  # another mixture of sources is another score
    lines[1]["val-core/math/reward/best@8/mean"] = 9.0
    series = run_log("x", lines).series("held_out")
    assert series.steps.tolist() == [2, 4] and series.values.tolist() == pytest.approx([0.4, 0.6])


def test_the_logs_of_verl_show_a_dead_verifier_and_an_exploited_one(tmp_path):
    dead = {"critic/score/mean": 0 * RAMP, "critic/score/max": 0 * RAMP, "critic/score/min": 0 * RAMP}
    assert [one.name for one in advise(verl_jsonl(tmp_path, lines_of(dead))).findings] == ["constant reward"]
    equal_means = {**dead, "critic/score/max": 1 + 0 * RAMP}
    assert advise_log(run_log("x", lines_of(equal_means))).findings == ()
    noise = 0.01 * NOISE
    hacked = {"critic/score/mean": 0.2 + 0.4 * RAMP + noise, "val-core/m/reward/mean@1": 0.6 - 0.3 * RAMP + noise}
    found = advise_log(run_log("x", lines_of(hacked))).findings
    assert [one.name for one in found] == ["reward against held-out score"]


@pytest.mark.parametrize("end", ["", "\n", '\n{"step": 3, "rew', '\n{"step": 3, "rew\n'])
def test_a_line_of_json_ends_at_a_newline_only(end, tmp_path):
    """A string may hold U+2028, U+2029 or U+0085 as they are. A torn last line is skipped, also before a newline."""
    note = "one\u2028two\u2029three\x85four"
    rows = [json.dumps({"step": step, "reward": 0.5, "note": note}, ensure_ascii=False) for step in (1, 2)]
    path = tmp_path / "log.jsonl"
    path.write_text("\n".join(rows) + end, encoding="utf-8")
    log = read_log(path)
    assert [line["step"] for line in log.lines] == [1, 2] and {line["note"] for line in log.lines} == {note}


# Several runs below one folder


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_event_files_of_two_runs_are_not_mixed(tmp_path):
    for name in ("first", "second"):
        event_files(tmp_path / name, lines_of(healthy())[:12])
    with pytest.raises(ScoregramError, match=r"log of one run, got first/tb, second/tb\. Point it at one of them"):
        advise(tmp_path)
    assert advise(tmp_path / "first").source


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_one_writer_may_have_several_folders(tmp_path):
    """A folder of hyperparameters below that of the events, or scalars of which no two folders have the same."""
    from torch.utils.tensorboard import SummaryWriter

    lines = lines_of(healthy())[:12]
    event_files(tmp_path, lines)
    for name, tag in (("tb/hparams", "train/reward"), ("eval", "eval/reward")):
        with SummaryWriter(log_dir=str(tmp_path / name)) as writer:
            writer.add_scalar(tag, 0.5, global_step=1)
    log = read_log(tmp_path)
    assert len(log.series("reward")) == 12 and len(log.series("held_out")) == 12


@pytest.mark.parametrize("name", ["offline-run-1/run-a.wandb", "a.jsonl", "a.csv"])
def test_two_logs_in_a_folder_are_not_chosen_between(name, tmp_path):
    for path in (tmp_path / name, tmp_path / name.replace("1/", "2/").replace("a.", "b.")):
        path.parent.mkdir(exist_ok=True)
        path.write_text("")
    with pytest.raises(ScoregramError, match="must hold the log of one run"):
        read_log(tmp_path)


def test_a_link_to_a_run_is_no_second_run(tmp_path):
    (tmp_path / "run-1").mkdir()
    (tmp_path / "run-1" / "a.wandb").write_bytes(WANDB.read_bytes())
    (tmp_path / "latest-run").symlink_to(tmp_path / "run-1")
    assert len(read_log(tmp_path).lines) == 40


def test_checkpoints_are_one_run_and_two_output_folders_are_not(tmp_path):
    lines = lines_of(healthy())
    for folder in ("a/checkpoint-30", "a/checkpoint-60", "a"):
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        (tmp_path / folder / "trainer_state.json").write_text(json.dumps({"log_history": lines}))
    assert len(read_log(tmp_path).lines) == 60
    (tmp_path / "b" / "checkpoint-60").mkdir(parents=True)
    (tmp_path / "b" / "checkpoint-60" / "trainer_state.json").write_text(json.dumps({"log_history": lines}))
    with pytest.raises(ScoregramError, match="must hold the log of one run, got a, b"):
        read_log(tmp_path)


# Text that another program wrote


@pytest.mark.parametrize("name", ["log.csv", "log.jsonl", "trainer_state.json"])
def test_text_that_is_not_utf8_says_what_was_received(name, tmp_path, capsys):
    path = tmp_path / name
    path.write_bytes("step,Prämie\n1,0.5\n".encode("latin-1"))
    assert cli.main(["advise", str(path)]) == 2
    assert "must be text in UTF-8, got the byte 0xe4 at place 7. Save it again" in capsys.readouterr().err
    path.write_text("step,reward\n1,0.5\n", encoding="utf-16")
    with pytest.raises(ScoregramError, match="must be text in UTF-8, got UTF-16"):
        read_log(path)


@pytest.mark.parametrize(("kind", "name"), [("csv", "log.csv"), ("verl", "metrics.jsonl"), ("trainer_state.json", "")])
def test_a_byte_order_mark_is_no_part_of_the_text(kind, name, tmp_path):
    lines = lines_of(healthy())
    path = WRITERS[kind](tmp_path, lines)
    file = path if name else path / "checkpoint-60" / "trainer_state.json"
    file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes())
    assert read_log(path).series("reward").values.tolist() == [line["reward"] for line in lines]


def test_a_line_that_a_kill_tore_inside_a_character_is_skipped(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_bytes(b'{"step": 1, "reward": 0.5}\n' + '{"step": 2, "note": "ä'.encode()[:-1])
    assert [line["step"] for line in read_log(path).lines] == [1]


@pytest.mark.parametrize(
    ("content", "reward"),
    [
        ("step;reward;kl\n1;0.5;0.1\n", 0.5),
        ("step;reward, mean of 4;reward\n1;2;0.5\n", 0.5),
        ("step;reward\n1;0,5\n", 0.5),  # the comma is the decimal point
        ("step\treward\n1\t0.5\n", 0.5),
        ("step, reward\n1, 0.5\n", 0.5),
        ('step,"reward;mean",reward\n1,2,0.5\n', 0.5),
    ],
)
def test_the_separator_of_a_table_is_found(content, reward, tmp_path):
    (tmp_path / "log.csv").write_text(content)
    log = read_log(tmp_path / "log.csv")
    assert log.series("reward").values.tolist() == [reward] and log.series("reward").steps.tolist() == [1]


def record_of(content: bytes) -> bytes:
    """A record of an event file with right checksums."""
    from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c

    size = struct.pack("<Q", len(content))
    return size + struct.pack("<I", masked_crc32c(size)) + content + struct.pack("<I", masked_crc32c(content))


def _cut(content: bytes) -> bytes:
    return content[: len(content) // 2]


def _flipped(content: bytes) -> bytes:
    place = len(content) // 2
    return content[:place] + bytes([content[place] ^ 255]) + content[place + 1 :]


def _not_an_event(content: bytes) -> bytes:
    return content + record_of(b"\xff\xff\xff")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("damage", [_cut, _flipped, _not_an_event])
def test_a_damaged_event_file_is_read_up_to_the_damage(damage, tmp_path):
    folder = event_files(tmp_path, lines_of(healthy()))
    assert read_log(folder).remarks == () and advise(folder).trust == ()
    (file,) = folder.iterdir()
    file.write_bytes(damage(file.read_bytes()))
    for path in (folder, file):
        log = read_log(path)
        last = log.lines[-1]["step"]
        assert last == 60 if damage is _not_an_event else 10 < last < 50
        assert advise(path).trust == log.remarks
        assert log.remarks[0].startswith(f"{file.name} is read up to step {last}: the record after it is damaged")


def test_an_event_file_of_something_else_is_an_error(tmp_path):
    path = tmp_path / "events.out.tfevents.1"
    for content in (b"no events at all, a text\n" * 20, record_of(b"\xff\xff\xff"), b""):
        path.write_bytes(content)
        with pytest.raises(ScoregramError, match="got no readable record"):
            read_log(path)


def test_a_damaged_file_of_wandb_gives_no_traceback(tmp_path):
    content, path = WANDB.read_bytes(), tmp_path / "run.wandb"
    for place in range(7, len(content), 211):
        path.write_bytes(content[:place] + b"\xff\xfe\xfd" + content[place + 3 :])
        with suppress(ScoregramError):  # nothing is left to read
            read_log(path)


def test_an_empty_path_is_not_the_current_folder():
    with pytest.raises(ScoregramError, match="advise: a path must not be empty, got ''"):
        advise("")


def test_a_file_that_may_not_be_read_is_an_error(tmp_path, monkeypatch):
    def refuse(path):
        raise PermissionError(13, "Permission denied")

    (tmp_path / "log.csv").write_text("step,reward\n1,0.5\n")
    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(ScoregramError, match=r"must be a file that can be read, got Permission denied\. Check"):
        read_log(tmp_path / "log.csv")


def test_empty_lines_before_a_table_and_numbers_beyond_floats_are_left_out(tmp_path):
    (tmp_path / "log.csv").write_text("\r\n\nstep,reward\n1,0.5\n")
    assert read_log(tmp_path / "log.csv").series("reward").values.tolist() == [0.5]
    assert len(run_log("x", [{"step": 1, "kl": 10**400}]).series("kl")) == 0
