"""Hostile dumps: whatever a file holds, `measure` succeeds or raises one `ScoregramError`, and says what it skipped."""

import copy
import math
import os
import random
import re
import shutil
import subprocess
import sys
import textwrap
import zipfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from decimal import Decimal
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from rich.console import Console

from scoregram.checks import ScoregramError
from scoregram.integrations.dumps.config import MeasureConfig
from scoregram.integrations.dumps.formats import FORMATS
from scoregram.integrations.dumps.grouping import rollout_groups
from scoregram.integrations.dumps.measure import MeasuredDump, measure
from scoregram.integrations.dumps.records import Location
from scoregram.integrations.dumps.steps import tokenised_rollout
from scoregram.integrations.dumps.stream import open_dump
from scoregram.policy import Policy, PolicyConfig, load_policy
from scoregram.runs import Run, open_run
from tests.dump_cases import RECORDS, ROLLOUTS, WRITERS, ids, lines, plain_record, slime_sample
from tests.training_cases import save_policy

HOSTILE_VALUES: list[Any] = [
    None,
    True,
    -1,
    2**63,
    2**64,
    10**400,
    1e308,
    -1e308,
    math.inf,
    math.nan,
    1.5,
    "",
    "\ud800",
    "text",
    [],
    [[]],
    [2**63],
    [50_000],
    [1e308],
    [math.nan],
    [None],
    ["a"],
    [1, [2]],
    {},
    {"a": 1e308},
    {"role": "user"},
    [{"role": "user", "content": "\ud800"}],
    [{"role": 3, "content": None}],
]
"""What may stand in the place of any value of a record."""
TENSORS: list[Any] = [
    torch.ones(1).expand(1 << 40),
    torch.ones(3, dtype=torch.bfloat16),
    torch.ones(2, 2),
    torch.ones(3, dtype=torch.complex64),
    torch.tensor(1.0),
    torch.eye(3).to_sparse(),
    torch.ones(4, requires_grad=True),
]
COLUMNS: list[Callable[[int], pa.Array]] = [
    lambda n: pa.array([b"\xff\xfe"] * n),
    lambda n: pa.array([Decimal("1.5")] * n),
    lambda n: pa.array([2**62] * n, pa.timestamp("us")),
    lambda n: pa.array([2**31 - 1] * n, pa.date32()),
    lambda n: pa.array([2**62] * n, pa.duration("s")),
    lambda n: pa.array([None] * n, pa.null()),
    lambda n: pa.array([[("a", 1)]] * n, pa.map_(pa.string(), pa.int64())),
    lambda n: pa.array([{"a": [1]}] * n),
    lambda n: pa.array([["a", None]] * n),
    lambda n: pa.array([[2**64 - 1]] * n, pa.list_(pa.uint64())),
    lambda n: pa.array([1.5] * n, pa.float32()).cast(pa.float16()),
    lambda n: pa.array([1e308] * n),
    lambda n: pa.array([-(2**63)] * n),
    lambda n: pa.array(["a"] * n).dictionary_encode(),
    lambda n: pa.array([[1, 2]] * n, pa.list_(pa.int8(), 2)),
    lambda n: pa.Array.from_buffers(pa.string(), n, [None, *pa.array([b"\xff"] * n).buffers()[1:]]),
]
"""Columns of types that no format has."""


PLACE = Location(Path("traces.jsonl"), 1)


@pytest.fixture(scope="module")
def policy(tmp_path_factory) -> Iterator[Policy]:
    """The model of every measurement, loaded once."""
    policy = load_policy(PolicyConfig(str(save_policy(tmp_path_factory.mktemp("model"))), device="cpu", prompt="plain"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("scoregram.integrations.dumps.measure.load_policy", lambda _: policy)
        patch.setattr("scoregram.runs.writer.this_environment", dict)  # three calls of git for each run
        yield policy


def measured(dump: Path, out: Path, **changes: Any) -> tuple[Run, MeasuredDump, str]:
    said = StringIO()
    config = MeasureConfig(**({"model": "loaded once", "rollouts": dump, "out": out, "device": "cpu"} | changes))
    done = measure(config, console=Console(file=said, width=500))
    return open_run(out), done, said.getvalue()


def flipped(content: bytes, chance: random.Random) -> bytes:
    """Content with a few bytes changed, removed or inserted, or cut off."""
    damaged = bytearray(content)
    for _ in range(chance.choice((1, 1, 2, 8))):
        at = chance.randrange(len(damaged))
        kind = chance.randrange(5)
        if kind == 0:
            damaged[at] ^= 1 << chance.randrange(8)
        elif kind == 1:
            damaged[at] = chance.randrange(256)
        elif kind == 2:
            del damaged[at : at + chance.randrange(1, 9)]
        elif kind == 3:
            damaged[at:at] = chance.randbytes(chance.randrange(1, 9))
        elif chance.random() < 0.3:
            del damaged[at:]
        if not damaged:
            break
    return bytes(damaged)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in a record that something else could stand in."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in inside:
        yield (*path, key)
        yield from places(inner, (*path, key))


def swapped(record: dict[str, Any], values: list[Any], chance: random.Random) -> dict[str, Any]:
    """A copy of a record with something else in one place."""
    record = copy.deepcopy(record)
    *path, last = chance.choice(list(places(record)))
    holder: Any = record
    for key in path:
        holder = holder[key]
    holder[last] = chance.choice(values)
    return record


def swap_values(name: str, file: Path, chance: random.Random) -> None:
    """Replace values in a file by values of other types, the file itself staying valid."""
    if name in RECORDS:
        records = [RECORDS[name](i, one) for i, one in enumerate(ROLLOUTS)]
        lines(file, [swapped(record, HOSTILE_VALUES, chance) if i != 2 else record for i, record in enumerate(records)])
    elif name == "slime":
        samples = [
            swapped(slime_sample(i, one), HOSTILE_VALUES[:-1] + TENSORS, chance) for i, one in enumerate(ROLLOUTS)
        ]
        torch.save({"rollout_id": chance.choice([7, None, "x", -1, 2**70]), "samples": samples}, file)
    else:
        table = pq.read_table(file)
        at = chance.randrange(table.num_columns)
        pq.write_table(table.set_column(at, table.column_names[at], chance.choice(COLUMNS)(len(table))), file)


def read_all(dump: Path, name: str, policy: Policy) -> None:
    """Everything that `measure` does before the model: read, group, tokenise; what cannot be read is skipped."""
    opened = open_dump(dump, name=name)
    for group in rollout_groups(opened, adjacent=opened.format.adjacent, window=1 << 20):
        for rollout in group.rollouts:
            with suppress(ScoregramError):
                tokenised_rollout(rollout, policy)


def attack(name: str, policy: Policy, folder: Path, count: int, *, measure_every: int, seed: int = 0) -> dict[str, int]:
    """Outcomes of `count` hostile inputs of a format: read, measured, or refused in one sentence. All else raises."""
    chance, outcomes = random.Random(f"{name}/{seed}"), {"read": 0, "measured": 0, "refused": 0}
    dump = WRITERS[name](folder / "dump")
    files = [path for path in sorted(dump.rglob("*")) if path.suffix == FORMATS[name].suffix]
    file = next(path for path in files if "metadata" not in path.name)
    content = file.read_bytes()
    for i in range(count):
        file.write_bytes(flipped(content, chance))
        if i % 2:
            file.write_bytes(content)
            swap_values(name, file, chance)
        shutil.copy(file, folder / "last")  # what caused a failure
        is_measured, given = i // 2 % measure_every == 0, chance.choice(["auto", name])
        try:
            if is_measured:
                measured(dump, folder / "out", format=given, overwrite=True)
            else:
                read_all(dump, given, policy)
            outcomes["measured" if is_measured else "read"] += 1
        except ScoregramError as error:
            outcomes["refused" if "\n" not in str(error) else "more than one line"] += 1
    return outcomes


FEW, MANY = 48, 400
"""Hostile inputs of each format, in `make test` and more in `make test-all`."""


def test_the_page_says_how_many_hostile_inputs_are_tried():
    page = (Path(__file__).parent.parent / "docs" / "trust.md").read_text(encoding="utf-8")
    formats = {9: "nine", 10: "ten", 11: "eleven"}[len(FORMATS)]
    assert f"{FEW * len(FORMATS):,} inputs in {formats} formats, {MANY * len(FORMATS):,} more" in page


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_hostile_inputs_are_measured_or_refused(name, policy, tmp_path):
    outcomes = attack(name, policy, tmp_path, count=FEW, measure_every=6)
    assert outcomes["read"] > 0 and outcomes["measured"] > 0 and sum(outcomes.values()) == FEW


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(FORMATS))
def test_many_hostile_inputs_are_measured_or_refused(name, policy, tmp_path):
    assert sum(attack(name, policy, tmp_path, count=MANY, measure_every=25, seed=2).values()) == MANY


def good_lines(count: int = 4) -> list[dict[str, Any]]:
    return [plain_record(i, ROLLOUTS[i % 4]) | {"group": i // 2} for i in range(count)]


def group_of(**changes: Any) -> list[dict[str, Any]]:
    """A group of three rollouts of which the second is changed."""
    rollouts = [{"prompt_ids": ids("1+1="), "completion_ids": ids(text), "reward": 1.0} for text in "234"]
    text = [{"prompt": "1+1=", "completion": text, "reward": 1.0} for text in "234"]
    chosen = text if changes.keys() & {"prompt", "completion"} else rollouts
    return [chosen[0], chosen[1] | changes, chosen[2]]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"completion": "\ud800"}, "the tokenizer must be able to encode the text"),
        ({"completion_ids": [2**63]}, "completion_ids must be a list of token ids, got 9223372036854775808"),
        ({"completion_ids": [50_000]}, "token ids must be below .*, got 50000"),
        ({"reward": 1e308}, r"reward must lie within ±1e\+30, got 1e\+308"),
        ({"prompt": [{"role": "user", "content": "a"}], "group": 0}, "needs a chat template|Hostile"),
    ],
)
def test_one_bad_record_is_named_skipped_and_counted_or_stops(changes, says, policy, tmp_path):
    rows = [row | {"group": 0} for row in group_of(**changes)]
    path = lines(tmp_path / "x.jsonl", rows)
    run, done, said = measured(path, tmp_path / "out")
    (group,) = run.groups()
    assert len(group.rewards) == 2 and done.broken + done.left_out == 1
    assert re.search(rf"(skipped|left out): .*x\.jsonl line 2: .*({says})", said), said
    assert re.search("broken records skipped: 1|rollouts left out: 1", said)
    assert re.search("1 broken records, 0 roll|0 broken records, 1 roll", run.remarks["skipped"])
    with pytest.raises(ScoregramError, match=rf"x\.jsonl line 2: .*({says})"):
        measured(path, tmp_path / "strict", strict=True)


def test_a_template_that_raises_is_a_record_left_out(policy, tmp_path, monkeypatch):
    template = "{% if messages[0]['content'] == 'bad' %}{{ raise_exception('no') }}{% endif %}1+1="
    monkeypatch.setattr(policy.tokenizer, "chat_template", template)
    rows = [
        {"prompt": [{"role": "user", "content": word}], "completion": "2", "group": 0} for word in ("a", "bad", "b")
    ]
    run, done, said = measured(lines(tmp_path / "x.jsonl", rows), tmp_path / "out")
    assert done.left_out == 1 and len(next(run.groups()).rewards) == 2
    assert "x.jsonl line 2: the tokenizer must be able to encode the text, got TemplateError: no." in said


def test_a_bad_record_at_the_beginning_does_not_stop_the_rest(policy, tmp_path):
    bad = {"prompt_ids": [5], "completion_ids": [50_000], "reward": 1.0, "step": 7}
    run, done, _ = measured(lines(tmp_path / "x.jsonl", [bad, *good_lines()]), tmp_path / "out")
    assert (done.groups, done.left_out) == (2, 1) and "1 rollouts left out" in run.remarks["skipped"]


def test_one_row_of_a_table_that_python_cannot_represent(policy, tmp_path):
    WRITERS["trl"](tmp_path)
    (path,) = tmp_path.rglob("*.parquet")
    table = pq.read_table(path)
    prompts = table["prompt"].to_pylist()
    encoded = pa.array([b"\xff" if i == 1 else text.encode() for i, text in enumerate(prompts)], pa.binary())
    broken = pa.Array.from_buffers(pa.string(), len(table), encoded.buffers())
    pq.write_table(table.set_column(1, "prompt", broken), path)
    dump = open_dump(path)
    said: list[str] = []
    dump.on_broken = said.append
    assert len(list(dump)) == 3 and "line 2: must be readable, got a value that Python cannot represent" in said[0]


def test_a_parquet_bomb_is_refused_with_the_way_to_read_it(policy, tmp_path):
    """A few KB that unpack to ten million numbers, 40 bytes each in Python, read with a limit of 300 MB."""
    count = 10_000_000
    row = pa.ListArray.from_arrays(pa.array([0, count], pa.int32()), pa.array(np.full(count, 7)))
    columns = {"token_ids": row, "prompt_length": pa.array([1]), "reward": pa.array([1.0])}
    path = tmp_path / "step-000000001-000.parquet"
    pq.write_table(pa.table(columns), path, compression="zstd")
    assert path.stat().st_size < 100_000
    with pytest.raises(
        ScoregramError,
        match=r"no readable record: row group 1 that unpacks from 1,\d+ bytes to 381 MB \(raise --unpacked-mb",
    ):
        measured(path, tmp_path / "out", unpacked_mb=300)


def write_bomb_of_text(path: Path, where: str) -> Path:
    """About 1 KB that unpacks to 5 GB: the file has one text, which all its values refer to."""
    count = 5_000
    index = pa.array(np.zeros(count, np.int32))
    prompts = pa.DictionaryArray.from_arrays(index, ["a" * (1 << 20)])
    if where == "a list":
        prompts = pa.ListArray.from_arrays(pa.array([0, count], pa.int32()), prompts)
    rows = len(prompts)
    columns = {"prompt": prompts, "completion": pa.array(["b"] * rows), "reward": pa.array([1.0] * rows)}
    pq.write_table(pa.table(columns), path, compression="brotli", dictionary_pagesize_limit=1 << 30)
    assert path.stat().st_size < 2_000
    return path


def test_a_parquet_bomb_of_repeated_text_is_refused_in_little_memory(tmp_path):
    paths = [str(write_bomb_of_text(tmp_path / f"{where}.parquet", where)) for where in ("rows", "a list")]
    script = f"""
        import resource
        from pathlib import Path
        from scoregram.integrations.dumps.stream import parquet_rows

        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 30), used + (1 << 30)))
        for path in {paths!r}:
            for limit in (1 << 28, 4 << 30):
                reasons = [row.reason for row in parquet_rows(Path(path), unpacked_bytes=limit)]
                print(len(reasons), reasons[-1])
    """
    environment = os.environ | {"ARROW_DEFAULT_MEMORY_POOL": "system"}  # the others reserve more than they use
    command = [sys.executable, "-c", textwrap.dedent(script)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    refused = r"row group 1, whose text is repeated, that unpacks from [\d,]+ bytes to \S+ MB \(raise --unpacked-mb"
    assert len(re.findall(refused, done.stdout)) == 4, done.stdout


def test_a_torch_bomb_is_refused_with_the_way_to_read_it(policy, tmp_path):
    path, packed = tmp_path / "data_7.pt", tmp_path / "packed" / "data_7.pt"
    torch.save({"rollout_id": 7, "samples": [slime_sample(0, ROLLOUTS[0])], "zeros": torch.zeros(1 << 22)}, path)
    packed.parent.mkdir()
    with zipfile.ZipFile(path) as source, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as target:
        for entry in source.infolist():
            target.writestr(entry.filename, source.read(entry))
    with pytest.raises(ScoregramError, match=r"a torch file that unpacks from .* to 16 MB \(raise --unpacked-mb"):
        measured(packed, tmp_path / "out", unpacked_mb=1)


@pytest.mark.parametrize("bomb", [torch.ones(1, dtype=torch.int64).expand(1 << 40), "nested"])
def test_a_tensor_or_a_list_that_expands_is_a_broken_record(bomb, policy, tmp_path):
    nested: Any = [1] * 100
    for _ in range(8):
        nested = [nested] * 100  # 10^18 numbers by reference
    samples = [slime_sample(i, one) for i, one in enumerate(ROLLOUTS)]
    samples[1]["tokens"] = nested if isinstance(bomb, str) else bomb
    torch.save({"rollout_id": 7, "samples": samples}, tmp_path / "data_7.pt")
    _, done, said = measured(tmp_path / "data_7.pt", tmp_path / "out")
    assert done.broken == 1 and "line 2: tokens must be one list of " in said


def test_paths_of_a_trace_that_add_up_to_its_square_are_refused():
    record = RECORDS["verifiers"](0, ROLLOUTS[0])
    first, last = record["traces"][0]["nodes"]
    chain = [first, *(last | {"parent": i} for i in range(300)), *(last | {"parent": 300} for _ in range(300))]
    with pytest.raises(ScoregramError, match="the paths of a trace must have at most 65,536 messages"):
        list(FORMATS["verifiers"].parse(record | {"traces": [record["traces"][0] | {"nodes": chain}]}, PLACE))


def test_a_group_size_that_does_not_fit_is_one_sentence(policy, tmp_path):
    rows = [{"prompt": "1+1=", "completion": text, "reward": 1.0} for text in "2345"]
    with pytest.raises(ScoregramError, match="measure --group-size: must divide the rollouts of a prompt at one step"):
        measured(lines(tmp_path / "x.jsonl", rows), tmp_path / "out", group_size=3)
