"""The commands as a user meets them: status, what goes to which stream, and strict JSON."""

import dataclasses
import importlib
import inspect
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from scoregram import __version__, cli, terminal
from scoregram.advantages import ESTIMATORS
from scoregram.advice import demo_names
from scoregram.errors import ScoregramError
from scoregram.studies.ledger import Claim, Finding, Verdict, as_printed
from scoregram.theory.lab.comparison import EXTRA_CREDITS
from scoregram.theory.lab.worlds import WORLDS
from scoregram.training.config import STARTING_ALLOCATION, STARTING_GROUP_SIZE
from tests.training_cases import save_policy

VERDICTS = {str(verdict) for verdict in Verdict}


def scoregram(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own, without the checks of this suite."""
    return subprocess.run([sys.executable, "-m", "scoregram.cli", *arguments], capture_output=True, text=True)


def strictly(text: str) -> dict:
    """JSON as the standard has it: no NaN, no Infinity."""

    def refuse(constant: str):
        raise ValueError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


@pytest.fixture
def ledger_of(monkeypatch):
    """Puts other claims into the ledger."""

    def put(*findings: Finding) -> None:
        claims = [
            Claim(f"claim-{i}", "here", f"Statement {i}.", lambda f=f: f, "paper") for i, f in enumerate(findings)
        ]
        monkeypatch.setattr("scoregram.studies.grpo_rank.claims.CLAIMS", tuple(claims))

    return put


def test_help_lists_the_commands():
    done = scoregram("--help")
    assert done.returncode == 0 and not done.stderr
    assert all(
        command in done.stdout
        for command in ("claims", "lab", "train", "measure", "replicate", "verify", "report", "bench")
    )


def test_ctrl_c_is_one_line_and_the_status_of_a_shell(monkeypatch, capsys):
    def interrupted(_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli.Train, "run", interrupted)
    assert cli.main(["train", "--out", "never-written"]) == 130
    assert capsys.readouterr().err == "scoregram: interrupted\n"


def test_version():
    assert scoregram("version").stdout.strip() == __version__


@pytest.mark.slow  # make test-docs runs it; the verdicts themselves are checked in test_claims_*.py
def test_the_whole_ledger_is_strict_json():
    done = scoregram("claims", "--json")
    assert done.returncode == 0, done.stderr
    record = strictly(done.stdout)
    claims = record["claims"]
    assert record["scoregram"] == __version__
    assert len(claims) >= 35
    assert len({claim["id"] for claim in claims}) == len(claims)
    for claim in claims:
        assert claim["verdict"] in VERDICTS - {str(Verdict.BROKEN)}, claim
        assert any(type(value) in (int, float) for value in claim["evidence"].values()), claim
        assert claim["place"] and claim["statement"] and claim["paper"]
        assert bool(claim["correction"]) == (claim["verdict"] != Verdict.HOLDS), claim["id"]


def test_an_unknown_id_is_one_sentence_and_status_two(capsys):
    assert cli.main(["claims", "--id", "thm-9.9"]) == 2
    out, err = capsys.readouterr()
    assert not out
    assert err.count("\n") == 1 and err.startswith("scoregram: claims: an id must be one of ")
    assert err.endswith("got 'thm-9.9'. Check the spelling.\n")


def test_how_to_follow_a_training_is_printed_after_all_checks(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(terminal, "find_spec", lambda name: True)
    policy, hint = save_policy(tmp_path / "policy"), f"Follow it in a browser: scoregram view {tmp_path / 'run'}"
    given = ["train", "--model", str(policy), "--task", "arithmetic:3", "--prompt", "plain"]
    options = f"--out {tmp_path / 'run'} --steps 1 --batch-size 8 --group-size 4 --eval-every 0 --max-new-tokens 4"
    given += options.split()
    assert cli.main([*given, "--estimator", "no-such"]) == 2
    assert hint not in capsys.readouterr().err
    assert cli.main(given) == 0
    assert capsys.readouterr().err.count(hint) == 1
    assert cli.main(given) == 2 and hint not in capsys.readouterr().err  # the folder holds a run now


def test_a_failed_check_is_status_one(ledger_of, capsys):
    ledger_of(as_printed(True, {"gap": 0.0}), as_printed(False, {"gap": 1.0}))
    assert cli.main(["claims", "--json"]) == 1
    verdicts = [claim["verdict"] for claim in strictly(capsys.readouterr().out)["claims"]]
    assert verdicts == ["holds", "check failed"]
    assert cli.main(["claims", "--json", "--id", "claim-0"]) == 0


def test_a_number_that_json_cannot_hold_becomes_null(ledger_of, capsys):
    ledger_of(as_printed(True, {"nan": float("nan"), "inf": float("inf"), "word": "nan", "yes": True, "whole": 3}))
    assert cli.main(["claims", "--json"]) == 0
    evidence = strictly(capsys.readouterr().out)["claims"][0]["evidence"]
    assert evidence == {"nan": None, "inf": None, "word": "nan", "yes": True, "whole": 3}


def test_the_table_names_every_claim_and_counts_verdicts(ledger_of, capsys):
    ledger_of(as_printed(True, {"gap": 0.125}), as_printed(True, {}), as_printed(False, {"off by [red]": 2}))
    assert cli.main(["claims"]) == 1
    out = capsys.readouterr().out
    assert all(f"claim-{i}" in out for i in range(3))
    assert "0.125" in out and "[red]" in out  # what stands in brackets is text, not a style
    assert "2  holds" in out and "1  check failed" in out and "3 claims checked" in out


def test_a_command_is_required():
    done = scoregram()
    assert done.returncode == 2 and not done.stdout


def test_the_help_of_the_lab_names_its_worlds():
    told = scoregram("lab", "--help").stdout
    assert all(world in told for world in WORLDS)


def test_the_comparison_is_strict_json(capsys):
    assert cli.main(["lab", "--world", "step_rewards", "--budget", "12", "--group-size", "2", "--json"]) == 0
    record = strictly(capsys.readouterr().out)
    names = [row["estimator"] for row in record["rows"]]
    assert set(names) | set(record["left_out"]) == {*ESTIMATORS, *EXTRA_CREDITS}
    assert all(row["rollouts"] <= 12 and row["group_size"] == 2 for row in record["rows"])
    within_reach = [row for row in record["rows"] if not row["given_values"]]
    assert within_reach[0]["estimator"] == record["least_error"]  # rows come with the least error first
    assert max(within_reach, key=lambda row: row["snr_squared"])["estimator"] == record["highest_snr"]


def test_the_comparison_marks_its_winners_and_says_what_is_missing(capsys):
    assert cli.main(["lab", "--world", "stopping", "--budget", "4", "--group-size", "2"]) == 0
    out = capsys.readouterr().out
    assert "stopping: a step of at most 4 rollouts in groups of 2" in out
    assert out.count("★") == 2 and out.count("☆") == 2  # in the table, and in what explains the marks
    assert "left out: vineppo" in out and "least error" in out


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--world", "moon"], "lab: the name must be one of output_only, .*got 'moon'. Check the spelling."),
        (["--budget", "3"], "comparison: the budget must cover one group of reinforce, 4 rollouts, got 3. Raise it."),
        (["--group-size", "0"], "lab: a group must have at least 1 rollout, got 0. Raise --group-size."),
    ],
)
def test_a_wrong_question_to_the_lab_is_one_sentence_and_status_two(options, says, capsys):
    assert cli.main(["lab", *options]) == 2
    out, err = capsys.readouterr()
    assert not out and re.fullmatch(f"scoregram: {says}\n", err)


@pytest.mark.parametrize(
    ("what", "room", "runs", "options", "asked"),
    [
        ("gram", "gram", "run_gram_bench", ["--tokens", "8", "16", "--lora", "2"], {"tokens": (8, 16), "lora": 2}),
        ("train", "train", "run_train_bench", ["--batch-sizes", "16"], {"batch_sizes": (16,), "group_size": 8}),
        (
            "sample",
            "sample",
            "run_sample_bench",
            ["--json", "--out", "a.json"],
            {"as_json": True, "out": Path("a.json")},
        ),
    ],
)
def test_every_benchmark_has_options_of_its_own(what, room, runs, options, asked, monkeypatch):
    given = {}
    real = getattr(importlib.import_module(f"scoregram.bench.{room}"), runs)
    monkeypatch.setattr(f"scoregram.bench.{room}.{runs}", lambda **settings: given.update(settings) or 0)
    assert cli.main(["bench", what, *options]) == 0
    assert asked.items() <= given.items()
    assert given.keys() == inspect.signature(real).parameters.keys()


def test_the_defaults_of_a_benchmark_are_those_of_its_function(monkeypatch):
    for room in ("train", "sample"):
        given = {}
        real = getattr(importlib.import_module(f"scoregram.bench.{room}"), f"run_{room}_bench")
        monkeypatch.setattr(f"scoregram.bench.{room}.run_{room}_bench", lambda given=given, **s: given.update(s) or 0)
        cli.main(["bench", room])
        assert given == {name: p.default for name, p in inspect.signature(real).parameters.items()}


def test_a_benchmark_must_be_named():
    done = scoregram("bench")
    assert done.returncode == 2 and "{gram, train, sample, trl, preset}" in done.stdout + done.stderr


LONG = "a" * 300
PATH_OPTIONS = [
    ("report", LONG),
    ("report", LONG, "other"),
    ("report", "runs/x", "--out", LONG),
    ("view", LONG),
    ("advise", LONG),
    ("filter", LONG, "--out", "x"),
    ("filter", "runs/x", "--out", LONG),
    ("whatif", LONG),
    ("verify", LONG),
    ("verify", "record", "--start", LONG),
    ("replicate", "--out", LONG),
    ("replicate", "--sign-with", LONG),
    ("compare", "--out", LONG),
    ("train", "--out", LONG),
    ("train", "--resume", "--out", LONG),
    ("measure", "--model", "tiny", "--rollouts", LONG, "--out", "x"),
    ("measure", "--model", "tiny", "--rollouts", "x.jsonl", "--out", LONG),
    ("claims", "--measured", LONG),
    ("bench", "gram", "--out", LONG),
    ("bench", "gram", "--plot", LONG),
]


@pytest.mark.parametrize("arguments", PATH_OPTIONS, ids=lambda one: " ".join(one).replace(LONG, "LONG"))
def test_a_name_of_300_bytes_is_refused_in_a_sentence(arguments, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(list(arguments)) == 2
    said = capsys.readouterr().err
    assert "a path must not be too long, got 300 bytes" in said and "Choose a shorter path" in said
    assert list(tmp_path.iterdir()) == []


def test_every_option_that_is_a_path_was_tried_with_a_long_name():
    tried = {(one[0], option.removeprefix("--")) for one in PATH_OPTIONS for option in one if option.startswith("--")}
    for annotated in cli.Command.__args__:  # type: ignore[union-attr]
        kind, marks = annotated.__origin__, annotated.__metadata__
        name = next(mark.name for mark in marks if hasattr(mark, "name"))
        for field in dataclasses.fields(kind):
            is_positional = "Positional" in str(field.type)
            if "Path" in str(field.type) and not is_positional:
                assert (name, field.name.replace("_", "-")) in tried, (name, field.name)
            if "Path" in str(field.type) and is_positional:
                assert any(one[0] == name and one[1] == LONG for one in PATH_OPTIONS), (name, field.name)


@pytest.mark.parametrize(
    "call", ["write_report", "write_several_report", "advise", "serve_runs", "verify", "open_dump"]
)
def test_library_functions_refuse_a_long_name_in_a_sentence(call):
    from scoregram.advice import advise
    from scoregram.integrations.dumps.stream import open_dump
    from scoregram.report import serve_runs, write_report, write_several_report
    from scoregram.studies import verify

    calls = {
        "write_report": lambda: write_report(LONG),
        "write_several_report": lambda: write_several_report([LONG, "b"]),
        "advise": lambda: advise(LONG),
        "serve_runs": lambda: serve_runs(Path(LONG)),
        "verify": lambda: verify(Path(LONG)),
        "open_dump": lambda: open_dump(Path(LONG)),
    }
    with pytest.raises(ScoregramError, match="a path must not be too long, got 300 bytes"):
        calls[call]()


def test_a_comparison_is_no_run_to_advise_on(tmp_path, capsys):
    (tmp_path / "compare.json").write_text("{}")
    assert cli.main(["advise", str(tmp_path)]) == 2
    assert f"got a comparison: {tmp_path}. Name one of its runs" in capsys.readouterr().err


def test_a_reader_that_stops_early_sees_no_traceback():
    command = f"{sys.executable} -m scoregram --help | head -n 1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert done.stdout.count("\n") == 1 and "Error" not in done.stderr


@pytest.mark.parametrize("arguments", [["advise", ""], ["advise", "--json", ""], ["whatif", ""], ["report", "a", ""]])
def test_an_empty_path_is_not_the_current_folder(arguments, capsys):
    assert cli.main(arguments) == 2
    assert f"{arguments[0]}: a path must not be empty, got ''. Name a file or folder" in capsys.readouterr().err


@pytest.mark.parametrize("out", [["--out="], ["--out", ""]])
def test_an_empty_folder_to_write_to_is_refused(out, capsys):
    assert cli.main(["train", *out]) == 2 and "train: a path must not be empty" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["advise", "whatif", "filter", "report"])
def test_a_missing_folder_names_the_command(command, tmp_path, capsys):
    out = ["--out", str(tmp_path / "out")] if command == "filter" else []
    assert cli.main([command, str(tmp_path / "none"), *out]) == 2
    assert capsys.readouterr().err.startswith(f"scoregram: {command}: ")


def test_the_help_of_demo_lists_the_recorded_runs(capsys):
    with pytest.raises(SystemExit):
        cli.main(["demo", "--help"])
    said = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert all(name in said for name in demo_names())


def test_the_help_of_train_says_with_which_size_a_division_starts(capsys):
    with pytest.raises(SystemExit):
        cli.main(["train", "--help"])
    said = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert f"auto: starts at {STARTING_GROUP_SIZE} ({STARTING_ALLOCATION} with --allocate)" in said
