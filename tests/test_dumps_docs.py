"""What docs/dumps.md shows is what the readers read."""

import ast
import re
from pathlib import Path

import pytest
import torch

from scoregram.integrations.dumps.formats import FORMATS
from scoregram.integrations.dumps.stream import open_dump
from tests.dump_cases import ids

DOCS = (Path(__file__).parents[1] / "docs" / "dumps.md").read_text()
EXAMPLES = dict(re.findall(r"```json ([\w-]+)\n(.*?)```", DOCS, re.DOTALL))


def test_every_format_has_a_section_and_its_row():
    assert re.findall(r"^### ([\w-]+)$", DOCS, re.MULTILINE) == list(FORMATS)
    for name, row in FORMATS.items():
        tokens = "if given" if name == "plain" else "yes" if row.token_ids else "no"
        assert f"\n| {name} | {tokens} | {'yes' if row.adjacent else 'no'} |" in DOCS
    assert EXAMPLES.keys() == {name for name, row in FORMATS.items() if row.suffix == ".jsonl"}


@pytest.mark.parametrize("name", sorted(EXAMPLES))
def test_an_example_is_read_as_what_it_is(name, tmp_path):
    path = tmp_path / "train_data_step7.jsonl" if name == "nemo-rl" else tmp_path / "7.jsonl"
    path.write_text(EXAMPLES[name])
    dump = open_dump(path, strict=True)
    assert dump.name == name
    for rollout in dump:
        assert rollout.reward == 1.0 and rollout.step in (7, None)
        if rollout.has_tokens:
            assert rollout.prompt_ids is not None and rollout.completion_ids is not None
            assert (rollout.prompt_ids.tolist(), rollout.completion_ids.tolist()) == (ids("1+1="), ids("2"))
            assert rollout.advantage == 0.5 and rollout.log_probs is not None and rollout.log_probs.tolist() == [-0.5]
        else:
            assert (rollout.prompt, rollout.completion) == ("1+1=", "2")


def test_the_example_of_slime(tmp_path):
    (written,) = re.findall(r"```python\n(.*?)```", DOCS, re.DOTALL)
    torch.save(ast.literal_eval(written), tmp_path / "data_7.pt")
    (rollout,) = open_dump(tmp_path, strict=True)
    assert rollout.step == 7 and rollout.group == "0" and rollout.reward == 1.0
    assert rollout.prompt_ids is not None and rollout.prompt_ids.tolist() == ids("1+1=")
