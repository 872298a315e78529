"""Every format on a small dump in the layout of its framework: what is read, and what a broken record says."""

import copy
import json
import math
import pickle
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from scoregram.checks import ScoregramError
from scoregram.integrations.dumps.formats import FORMATS
from scoregram.integrations.dumps.grouping import group_key, rollout_groups
from scoregram.integrations.dumps.records import DumpedRollout, Location
from scoregram.integrations.dumps.stream import open_dump
from tests.dump_cases import RECORDS, ROLLOUTS, STEP, WRITERS, ids, lines, log_probs, slime_sample

NAMES = sorted(FORMATS)


def parsed(name: str, record: dict[str, Any]) -> Any:
    (rollout,) = FORMATS[name].parse(record, Location(Path("step_3/x.jsonl"), 1))
    return rollout


def by_text(rollouts: list[DumpedRollout]) -> list[Any]:
    """In the order of the examples, which a format need not keep."""
    texts = {("".join(map(str, ids(one["prompt"]))), len(one["completion"])): i for i, one in enumerate(ROLLOUTS)}

    def place(rollout: Any) -> int:
        prompt = ids(rollout.prompt) if isinstance(rollout.prompt, str) else rollout.prompt_ids.tolist()
        length = len(rollout.completion_ids) if rollout.has_tokens else len(rollout.completion)
        return texts["".join(map(str, prompt)), length]

    return sorted(rollouts, key=place)


def test_every_format_has_an_example():
    assert WRITERS.keys() == FORMATS.keys()


@pytest.mark.parametrize("name", NAMES)
def test_a_dump_is_recognised_and_read_as_it_was_written(name, tmp_path):
    dump = open_dump(WRITERS[name](tmp_path / "dump"))
    assert dump.name == name
    found = by_text(list(dump))
    assert dump.broken == 0 and dump.bytes_read == dump.total_bytes > 0
    assert len(found) == len(ROLLOUTS)
    for rollout, one in zip(found, ROLLOUTS, strict=True):
        assert rollout.step == STEP
        assert rollout.reward == one["reward"]
        if FORMATS[name].token_ids:
            assert rollout.prompt_ids.tolist() == ids(one["prompt"])
            assert rollout.completion_ids.tolist() == ids(one["completion"])
            assert rollout.completion_mask is None or bool(rollout.completion_mask.all())
            assert rollout.log_probs.tolist() == log_probs(one["completion"])
        else:
            assert (rollout.prompt, rollout.completion) == (one["prompt"], one["completion"])
        assert rollout.advantage in (None, one["advantage"])


@pytest.mark.parametrize("name", NAMES)
def test_claims_of_the_table(name, tmp_path):
    row, dump = FORMATS[name], open_dump(WRITERS[name](tmp_path / "dump"))
    rollouts = list(dump)
    assert all(rollout.has_tokens == row.token_ids for rollout in rollouts)
    places = [place for place, _ in sorted(enumerate(rollouts), key=lambda pair: by_text(rollouts).index(pair[1]))]
    assert not row.adjacent or [place // 2 for place in places] == [0, 0, 1, 1]
    groups = list(rollout_groups(dump, adjacent=row.adjacent, window=1 << 20))
    assert [len(group.rollouts) for group in groups] == [2, 2]
    assert not any(group.late for group in groups)


@pytest.mark.parametrize("name", ["trl", "scoregram", "nemo-rl", "prime-rl", "verifiers", "open-instruct"])
def test_formats_that_tell_advantages(name, tmp_path):
    found = by_text(list(open_dump(WRITERS[name](tmp_path / "dump"))))
    assert [rollout.advantage for rollout in found] == [one["advantage"] for one in ROLLOUTS]
    assert all(rollout.advantages is None for rollout in found)


@pytest.mark.parametrize("name", sorted(RECORDS))
@pytest.mark.parametrize("bad", ["{", '"text"', '{"unknown": 1}', "\udcff", "[1]"])
def test_a_broken_line_is_named_and_passed_over_or_stops(name, bad, tmp_path):
    path = tmp_path / ("7.jsonl" if name == "verl" else "x.jsonl")
    good = [json.dumps(RECORDS[name](i, one)) for i, one in enumerate(ROLLOUTS)]
    path.write_bytes("\n".join([*good[:2], bad, "", *good[2:]]).encode("utf-8", "surrogateescape"))
    said: list[str] = []
    dump = open_dump(path, name=name)
    dump.on_broken = said.append
    assert len(list(dump)) == len(ROLLOUTS)
    assert dump.broken == 1
    assert said[0].startswith(f"{path} line 3: must ")
    with pytest.raises(ScoregramError, match=f"^{re.escape(str(path))} line 3: must "):
        list(open_dump(path, name=name, strict=True))


WRONG = {
    "nemo-rl": {"token_ids": [["a"]], "rewards": ["high"], "token_loss_mask": [[1.0]], "input_lengths": [99]},
    "prime-rl": {"token_ids": [1.5, 2.0], "loss_mask": [True], "inference_logprobs": [0.0], "advantages": ["x"]},
    "verifiers": {"traces": 3},
    "open-instruct": {"response_tokens": "text", "prompt_tokens": [-1], "logprobs": [0.0] * 9, "step": 1.5},
    "verl": {"input": None, "output": 3, "score": "good", "step": -1},
    "plain": {"prompt": 1, "completion": [{"role": "a", "content": "x"}] * 2, "reward": [1], "rewards": 3},
}


@pytest.mark.parametrize(("name", "key"), [(name, key) for name, wrong in WRONG.items() for key in wrong])
def test_a_value_of_the_wrong_kind_is_named(name, key, tmp_path):
    record = RECORDS[name](0, ROLLOUTS[0]) | {key: WRONG[name][key]}
    path = lines(tmp_path / "7.jsonl", [record])
    with pytest.raises(ScoregramError, match=rf"line 1: .*{key}.* must .*, got .*\. Repair or remove"):
        list(open_dump(path, name=name, strict=True))


@pytest.mark.parametrize("name", ["scoregram", "trl"])
def test_a_torn_table_is_one_broken_record(name, tmp_path):
    WRITERS[name](tmp_path)
    (path,) = tmp_path.rglob("*.parquet")
    path.with_name(path.name.replace("7", "8")).write_bytes(path.read_bytes()[:-40])
    dump = open_dump(tmp_path)
    assert len(list(dump)) == len(ROLLOUTS) and dump.broken == 1


@pytest.mark.parametrize(
    ("name", "column"), [("scoregram", "token_ids"), ("scoregram", "prompt_length"), ("trl", "prompt"), ("trl", "step")]
)
def test_a_broken_row_is_passed_over(name, column, tmp_path):
    WRITERS[name](tmp_path)
    (path,) = tmp_path.rglob("*.parquet")
    table = pq.read_table(path)
    rows = table.to_pylist()
    rows[1][column] = {"token_ids": [-3], "prompt_length": 99, "prompt": None, "step": -1}[column]
    pq.write_table(table.from_pylist(rows, schema=table.schema), path)
    dump = open_dump(tmp_path)
    assert len(list(dump)) == len(ROLLOUTS) - 1 and dump.broken == 1


def test_a_broken_sample_of_slime_is_passed_over(tmp_path):
    samples = [slime_sample(i, one) for i, one in enumerate(ROLLOUTS)]
    samples[2]["response_length"] = 99
    torch.save({"rollout_id": 1, "samples": samples}, tmp_path / "a_1.pt")
    (tmp_path / "b_2.pt").write_bytes((tmp_path / "a_1.pt").read_bytes()[:100])
    torch.save([1, 2], tmp_path / "c_3.pt")
    (tmp_path / "d_4.pt").touch()
    said: list[str] = []
    dump = open_dump(tmp_path, name="slime")
    dump.on_broken = said.append
    assert len(list(dump)) == 3
    assert [re.findall("line .:|invalid torch|without a list", text)[-1] for text in said] == [
        "line 3:",
        "invalid torch",
        "without a list",
        "invalid torch",
    ]


class Foreign:
    """Something that only a pickle can hold."""


def test_a_pickle_is_refused_unless_allowed(tmp_path):
    path = tmp_path / "data_7.pt"
    torch.save({"rollout_id": 7, "samples": [slime_sample(0, ROLLOUTS[0]) | {"metadata": Foreign()}]}, path)
    with pytest.raises(ScoregramError, match=r"readable without a pickle.* Pass --allow-pickle if you trust"):
        open_dump(path)
    (rollout,) = open_dump(path, allow_pickle=True)
    assert rollout.reward == 1.0
    (tmp_path / "batch.pkl").write_bytes(pickle.dumps({"a": 1}))
    with pytest.raises(ScoregramError, match=r"got the pickle .*batch\.pkl"):
        open_dump(tmp_path / "batch.pkl")


@pytest.mark.parametrize("content", ["", "\n\n", '{"a": 1}\n', "not json\n"])
def test_what_no_format_knows_lists_what_was_looked_for(content, tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text(content)
    with pytest.raises(ScoregramError) as error:
        open_dump(path)
    assert all(name in str(error.value) for name in FORMATS)
    assert "token_loss_mask" in str(error.value) and "x.jsonl with " in str(error.value)


def test_a_path_that_is_not_there_and_a_format_that_is_not():
    with pytest.raises(ScoregramError, match="the path must exist"):
        open_dump(Path("nowhere"))
    with pytest.raises(ScoregramError, match="measure --format: the name must be one of nemo-rl, open-instruct"):
        open_dump(Path(), name="tinker")


def test_files_are_read_in_the_order_of_their_numbers(tmp_path):
    for step in (10, 9, 2):
        lines(tmp_path / f"{step}.jsonl", [{"input": "a", "output": "b", "score": step}])
    assert [(rollout.step, rollout.reward) for rollout in open_dump(tmp_path)] == [(2, 2.0), (9, 9.0), (10, 10.0)]


def test_bytes_are_counted_as_they_are_read(tmp_path):
    records = [{"prompt": "a", "completion": "b" * i} for i in range(5)]
    for name in ("1", "2"):
        lines(tmp_path / f"{name}.jsonl", records)
    dump = open_dump(tmp_path)
    ends = [sum(len(json.dumps(one)) + 1 for one in records[: i + 1]) for i in range(5)]
    assert [dump.bytes_read for _ in dump] == ends + [ends[-1] + end for end in ends]
    assert dump.total_bytes == 2 * ends[-1]


def test_a_first_line_that_is_broken_does_not_hide_the_format(tmp_path):
    path = tmp_path / "mine.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "a"\n{"prompt": "a", "completion": "b"}')
    dump = open_dump(path)
    (rollout,) = dump
    assert dump.name == "plain" and dump.broken == 1
    assert math.isnan(rollout.reward) and rollout.group is None and rollout.step is None


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.just(10**400) | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=2),
    max_leaves=6,
)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in a record that something else could stand in."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in inside:
        yield (*path, key)
        yield from places(inner, (*path, key))


@given(data=st.data(), name=st.sampled_from(sorted(RECORDS)), value=JSON)
def test_whatever_stands_in_a_record_it_is_read_or_refused(data, name, value):
    record = copy.deepcopy(RECORDS[name](0, ROLLOUTS[3]))
    *path, last = data.draw(st.sampled_from(list(places(record))))
    holder: Any = record
    for key in path:
        holder = holder[key]
    holder[last] = value
    try:
        rollouts = list(FORMATS[name].parse(record, Location(Path("x.jsonl"), 1)))
    except ScoregramError as error:
        refusal = str(error)
        assert refusal.startswith("x.jsonl line 1: ") and refusal.endswith("Repair or remove this record.")
    else:
        for rollout in rollouts:
            group_key(rollout)
            assert rollout.has_tokens or rollout.completion is not None


def test_nemo_rl_reads_masks_and_filtered_rewards():
    record = RECORDS["nemo-rl"](0, ROLLOUTS[1]) | {"filtered_rewards": [0.75]}
    assert parsed("nemo-rl", record).reward == 0.75
    record["sample_loss_mask"] = [0.0]
    assert parsed("nemo-rl", record).advantage == 0.0
    record |= {"sample_loss_mask": [1.0], "advantages": [[0.0] * 4 + [1.0, 2.0] + [0.0] * 3]}
    rollout = parsed("nemo-rl", record)
    assert rollout.advantage is None and rollout.advantages.tolist() == [1.0, 2.0]


def test_a_turn_of_a_tool_stays_in_the_completion_and_out_of_the_mask():
    record = RECORDS["prime-rl"](0, ROLLOUTS[3])
    record["loss_mask"] = [False] * 4 + [True, False, True]
    rollout = parsed("prime-rl", record)
    assert rollout.completion_ids.tolist() == ids("4 .")
    assert rollout.completion_mask.tolist() == [True, False, True]


def test_prime_rl_without_rewards_or_advantages():
    record = RECORDS["prime-rl"](0, ROLLOUTS[0])
    record |= {"rewards": [None] * 5, "advantages": [None] * 5, "export_step": None, "step": None}
    rollout = parsed("prime-rl", record)
    assert math.isnan(rollout.reward) and rollout.advantage is None and rollout.advantages is None
    assert rollout.step == 3  # of the folder


def test_trl_conversations_and_their_rewards():
    record = {
        "step": 1,
        "prompt": [{"role": "user", "content": "1+1"}],
        "advantage": 0.1,
        "a": 1.0,
        "b": 0.5,
        "note": "x",
    }
    answer = [{"role": "assistant", "content": "2"}]
    rollout = parsed("trl", record | {"completion": answer})
    assert rollout.completion == "2" and rollout.prompt == record["prompt"]
    assert rollout.rewards == {"a": 1.0, "b": 0.5} and rollout.reward == 1.5
    assert math.isnan(parsed("trl", record | {"completion": "2", "a": None, "b": None}).reward)
    with pytest.raises(ScoregramError, match="completion must be one answer"):
        parsed("trl", record | {"completion": answer * 2})


def test_slime_rewards_in_parts_and_samples_that_were_removed():
    sample = slime_sample(0, ROLLOUTS[1]) | {"reward": {"score": 2.0, "format": 1.0}, "remove_sample": True}
    rollout = parsed("slime", sample)
    assert rollout.reward == 2.0 and rollout.rewards == {"score": 2.0, "format": 1.0}
    assert rollout.completion_mask.tolist() == [False, False]
    assert math.isnan(parsed("slime", sample | {"reward": {"a": 1.0, "b": 2.0}}).reward)
    assert math.isnan(parsed("slime", sample | {"reward": None}).reward)
    assert parsed("slime", sample | {"status": "truncated"}).finished is False
    none = parsed("slime", sample | {"response_length": 0, "rollout_log_probs": None, "response": ""})
    assert none.prompt_ids.tolist() == ids("1+1=13") and len(none.completion_ids) == 0


def test_verl_without_a_uid_groups_by_its_prompt(tmp_path):
    records = [{"input": one["prompt"], "output": one["completion"], "score": one["reward"]} for one in ROLLOUTS]
    path = lines(tmp_path / "12.jsonl", [records[i] for i in (0, 2, 1, 3)])
    groups = list(rollout_groups(open_dump(path), adjacent=False, window=1 << 20))
    assert [[rollout.reward for rollout in group.rollouts] for group in groups] == [[1.0, 0.0], [1.0, 0.5]]
    assert {group.step for group in groups} == {12}


def test_verifiers_paths_agents_and_traces_alone():
    record = RECORDS["verifiers"](0, ROLLOUTS[0])
    (trace,) = record["traces"]
    branched = trace | {"nodes": [*trace["nodes"], trace["nodes"][1] | {"logprobs": [], "finish_reason": "length"}]}
    frozen = trace | {"agent": {"name": "judge", "trainable": False}}
    where = Location(Path("step_9/traces.jsonl"), 4)
    found = list(FORMATS["verifiers"].parse(record | {"traces": [branched, frozen]}, where))
    assert [rollout.log_probs is None for rollout in found] == [False, True]
    assert [rollout.finished for rollout in found] == [True, False]
    assert {rollout.group for rollout in found} == {"solver/group-0"}
    (alone,) = FORMATS["verifiers"].parse(trace, where)
    assert alone.step == 9 and alone.group == "solver/sum/0" and alone.prompt_id == "sum/0"
    unscored = trace | {"rewards": {"right": None}}
    assert math.isnan(next(FORMATS["verifiers"].parse(unscored, where)).reward)
    loop = trace | {"nodes": [trace["nodes"][1] | {"parent": 0}]}
    with pytest.raises(ScoregramError, match="parent of a node"):
        list(FORMATS["verifiers"].parse(loop, where))


def test_verifiers_without_tokens_is_text_or_refused():
    (trace,) = RECORDS["verifiers"](0, ROLLOUTS[0])["traces"]
    bare = [{key: node[key] for key in node if key in ("parent", "message", "sampled")} for node in trace["nodes"]]
    where = Location(Path("traces.jsonl"), 1)
    rollout = parsed("verifiers", trace | {"nodes": bare})
    assert not rollout.has_tokens and rollout.completion == "2" and rollout.prompt[0]["content"] == "1+1="
    twice = [*bare, {"parent": 1, "message": {"role": "assistant", "content": "x"}, "sampled": True}]
    with pytest.raises(ScoregramError, match="must be one answer"):
        list(FORMATS["verifiers"].parse(trace | {"nodes": twice}, where))


def test_of_files_about_the_same_episodes_the_trained_ones_are_read(tmp_path):
    record = RECORDS["verifiers"](0, ROLLOUTS[0])
    for kind in ("train/all", "train/effective", "eval/all"):
        lines(tmp_path / "step_1" / kind / "traces.jsonl", [record])
    assert [file.relative_to(tmp_path).as_posix() for file in open_dump(tmp_path).files] == [
        "step_1/train/effective/traces.jsonl"
    ]


def test_plain_lines_with_token_ids_are_exact():
    record = {"prompt_ids": [5, 6], "completion_ids": [7, 8], "completion_mask": [1, 0], "log_probs": [-1.0, None]}
    rollout = parsed("plain", record | {"reward": 1, "finished": True, "rewards": {"a": 1}, "advantage": 0.5})
    assert rollout.has_tokens and rollout.completion_mask.tolist() == [True, False]
    assert rollout.log_probs[0] == -1.0 and rollout.log_probs[1].isnan()
    assert rollout.finished is True and rollout.rewards == {"a": 1.0} and rollout.advantage == 0.5
