"""Links lead somewhere, commands are understood, and snippets and commands run as they are printed."""

import ast
import inspect
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from scoregram import Rollouts, attach, cli, cross_gram
from scoregram.errors import ScoregramError
from scoregram.gram import measure_gram
from scoregram.runs import open_run
from scoregram.training.effects import require_effects
from scoregram.training.loop import train
from tests.cases import build, rollouts
from tests.dump_cases import write_verl
from tests.test_whatif import drawn_groups
from tests.test_whatif import run_of as replayed_run
from tests.training_cases import config_for, save_policy

ROOT = Path(__file__).parent.parent
PAGES = sorted(
    str(path.relative_to(ROOT))
    for folder in (".", "docs", "results/*", "examples")
    for path in ROOT.glob(f"{folder}/*.md")
)
TEXT = {page: (ROOT / page).read_text(encoding="utf-8") for page in PAGES}


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    found: dict[str, int] = {}
    names = set()
    for heading in re.findall(r"^#{1,6} +(.*?)#*$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.MULTILINE):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
        name = re.sub(r"[^\w\- ]", "", words).replace(" ", "-")
        names.add(name if name not in found else f"{name}-{found[name]}")
        found[name] = found.get(name, 0) + 1
    return names


@pytest.mark.parametrize("page", PAGES)
def test_links_and_anchors_lead_somewhere(page):
    lost = []
    for target in re.findall(r"\]\((?!https?:)([^)\s]+)\)", TEXT[page]):
        file, _, anchor = target.partition("#")
        path = (ROOT / page).parent / file if file else ROOT / page
        if not path.exists() or (anchor and anchor not in anchors(path.read_text(encoding="utf-8"))):
            lost.append(target)
    assert lost == []


def test_anchors_are_those_of_github():
    page = "# A `code` title, with *stars*\n## Twice\n## Twice\n### [a link](x.md): it's\n```\n# no heading\n```\n"
    assert anchors(page) == {"a-code-title-with-stars", "twice", "twice-1", "a-link-its"}


# Commands.


def commands(page: str) -> Iterator[list[str]]:
    """Every command line of a page, in blocks and in running text, as words."""
    blocks = [
        line for block in re.findall(r"```[a-z]*\n(.*?)```", TEXT[page], re.DOTALL) for line in block.splitlines()
    ]
    indented = [line.strip() for line in TEXT[page].splitlines() if line.startswith("    ")]
    inline = re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", TEXT[page], flags=re.DOTALL))
    for line in (*blocks, *indented, *inline):
        try:
            yield shlex.split(line, comments=True)
        except ValueError:  # an apostrophe in a sentence
            continue


COMMANDS = (
    *("claims", "lab", "train", "compare", "measure", "bench", "replicate", "verify", "report", "version"),
    *("advise", "demo", "filter", "view", "whatif"),
)
METHOD_TO_ADD = "mean-tic"
"""The example of CONTRIBUTING.md, which tests/test_contributing.py adds."""
PLACEHOLDERS = {"…", "...", "--help"}


def scoregram_commands(page: str) -> list[list[str]]:
    """Arguments of every call of `scoregram`; a bare `scoregram measure` names the command and asks nothing."""
    found = []
    for words in commands(page):
        while words and re.fullmatch(r"\w+=\S*", words[0]):  # variables of the environment
            words = words[1:]
        if words[:1] == ["scoregram"] and words[1:2] and words[1] in COMMANDS:
            found.append(words[1:])
        elif words[:1] == ["torchrun"] and "scoregram.cli" in words:
            found.append(words[words.index("scoregram.cli") + 1 :])
    return [words for words in found if len(words) > 1]


@pytest.mark.parametrize("page", [page for page in PAGES if page != "CHANGELOG.md" and scoregram_commands(page)])
def test_commands_are_understood(page, capsys):
    refused = []
    for words in scoregram_commands(page):
        if any(METHOD_TO_ADD in word for word in words):
            continue
        try:
            command = cli.parsed_command([word for word in words if word not in PLACEHOLDERS])
            if isinstance(command, cli.Train):
                require_effects(command)
        except ScoregramError as error:
            if "acts only with" in str(error):
                refused.append(words)  # otherwise understood: the run that it would resume is not there
        except SystemExit:
            refused.append(words)
    assert refused == [], capsys.readouterr()


def test_targets_of_make_exist():
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    named = {words[1] for page in PAGES for words in commands(page) if words[:1] == ["make"] and len(words) > 1}
    assert {"run", "test", "check"} <= named <= targets


def scoregram(*arguments: str, folder: Path) -> str:
    """A command in a process of its own, in a folder."""
    call = [sys.executable, "-m", "scoregram.cli", *arguments]
    return subprocess.run(call, cwd=folder, check=True, capture_output=True, text=True).stdout


def block_after(page: str, words: str) -> list[list[str]]:
    """The lines of the block that begins with `words`."""
    (block,) = (block for block in re.findall(r"```\n(.*?)```", TEXT[page], re.DOTALL) if block.startswith(words))
    return [shlex.split(line, comments=True)[1:] for line in block.splitlines()]


@pytest.mark.slow
def test_the_commands_of_the_trainer_run(tmp_path):
    """As printed, but for three steps; the command that needs a downloaded model is only parsed, above."""
    for words in block_after("docs/training.md", "scoregram train"):
        if "--model" in words:
            continue
        steps = (
            [] if "--resume" in words and "--steps" not in words else ["--steps", "4" if "--resume" in words else "3"]
        )
        if "--rollouts" in words:
            steps = []  # the budget decides; a small one here
        small = {"20000": "192", "2000": "64"}
        given = [small.get(word, word) for word in words if word not in ("--steps", "400")]
        assert "step" in scoregram(*given, *steps, folder=tmp_path)
    assert scoregram("report", "runs/rloo", folder=tmp_path).strip().endswith("report.html")


@pytest.mark.slow
def test_the_commands_for_dumps_run(tmp_path):
    names = {"CHECKPOINT": str(save_policy(tmp_path / "policy")), "DUMP": str(write_verl(tmp_path / "dump"))}
    for words in block_after("docs/dumps.md", "scoregram measure"):
        scoregram(*[names.get(word, word) for word in words], folder=tmp_path)
    assert (tmp_path / "runs" / "x" / "report.html").exists()


# Snippets.


def snippets(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", TEXT[page], re.DOTALL)


def snippet_with(page: str, words: str) -> str:
    (snippet,) = (snippet for snippet in snippets(page) if words in snippet)
    return snippet


NOT_RUN = {
    "CONTRIBUTING.md": 5,  # run by test_contributing.py
    "docs/dumps.md": 1,  # a record, read by test_dumps_docs.py
    "docs/replication.md": 1,  # run by test_results.py
    "results/fixed-policies/README.md": 1,  # run by test_results_fixed_policies.py
    "docs/verl.md": 1,  # two lines for SkyRL's own script
}
"""Snippets of a page that no test below runs."""
RUN = {
    "README.md": 2,
    "docs/environments.md": 1,
    "docs/gram.md": 4,
    "docs/scale.md": 1,
    "docs/training.md": 3,
    "docs/trl.md": 1,
    "docs/verl.md": 1,
}
"""Snippets of a page that a test below runs."""


def test_every_snippet_is_listed_and_parses():
    counts = {page: len(snippets(page)) for page in PAGES if snippets(page)}
    assert counts == {page: RUN.get(page, 0) + NOT_RUN.get(page, 0) for page in RUN | NOT_RUN}
    for page in counts:
        for snippet in snippets(page):
            ast.parse(f"{{{snippet}}}" if snippet.startswith('"') else snippet)  # a row of a table, or code


def test_the_environment_of_the_page_trains(tmp_path, monkeypatch):
    (tmp_path / "guess.py").write_text(snippet_with("docs/environments.md", "class Guess"))
    monkeypatch.chdir(tmp_path)
    config = config_for(save_policy(tmp_path / "policy"), tmp_path / "run", task="python:guess:task", reward=None)
    trained = train(replace(config, method="gigpo", steps=2, eval_problems=2, batch_size=8))
    assert trained.step == 2


def test_the_step_scores_of_the_page_train(tmp_path, monkeypatch):
    (tmp_path / "my_scores.py").write_text(snippet_with("docs/training.md", "class LineScores"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (words,) = [words for words in scoregram_commands("docs/training.md") if "my_scores:line_scores" in words]
    given: Any = cli.parsed_command(words)
    changes = {"method": given.method, "step_scores": given.step_scores, "max_new_tokens": 12}
    train(config_for(save_policy(tmp_path / "policy"), tmp_path / "run", **changes))
    assert any(line["grad_norm"] > 0 for line in open_run(tmp_path / "run").metrics()[1:])


def test_a_run_is_read_from_python(tmp_path, monkeypatch):
    pytest.importorskip("pandas")
    monkeypatch.chdir(tmp_path)
    train(config_for(save_policy(tmp_path / "policy"), tmp_path / "runs" / "rloo", method="rloo"))
    snippet = snippet_with("docs/training.md", "read_run")
    assert "rollouts_of(20)" in snippet
    names: dict[str, Any] = {}
    exec(snippet.replace("rollouts_of(20)", "rollouts_of(2)"), names)
    assert [line["step"] for line in names["run"].lines] == [0, 1, 2, 3]


def test_the_functions_of_the_page_are_replayed():
    """The snippet as printed, on groups in memory, and what it says of its functions."""
    names: dict[str, Any] = {"run": replayed_run(drawn_groups(60, 8), steps=6)}
    exec(snippet_with("docs/training.md", "above_median"), names)
    rewards, lengths = torch.tensor([[1.0, 0.0, 0.0]]), torch.tensor([[3, 5, 4]])
    assert names["above_median"](rewards).tolist() == [[1, 0, 0]]
    assert names["without_longest"](rewards, lengths, rewards).tolist() == [[True, False, True]]
    rows = names["run"].what_if("rloo", names["above_median"], weights=names["without_longest"]).rows
    assert [row.estimator for row in rows] == ["rloo", "above_median"]


def test_the_pretrained_model_by_hand(tmp_path, monkeypatch, capsys):
    """The README's snippet as printed, on a small model in place of the one from the hub."""
    save_policy(tmp_path)
    template = "{% for message in messages %}{{ message.content[:20] }}{% endfor %}="
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": template}))
    snippet = snippet_with("README.md", "AutoTokenizer")
    name = '"HuggingFaceTB/SmolLM2-135M-Instruct"'
    assert name in snippet
    exec(snippet.replace(name, repr(str(tmp_path))), {})
    printed = capsys.readouterr().out.splitlines()
    assert printed[-2].startswith("effective rank ") and printed[-1].startswith("shares [")


def test_the_preconditioned_gram_by_hand():
    model, train, held_out = build("Llama"), rollouts(), rollouts(4, 9, seed=1)
    names: dict[str, Any] = {"model": model, "train": train.arguments, "held_out": held_out.arguments}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(train.input_ids).logits.square().mean().backward()
    optimizer.step()
    names |= {"optimizer": optimizer, "weights": torch.linspace(-1.0, 1.0, 5, dtype=torch.float64), "rate": 1e-3}
    exec(snippet_with("docs/gram.md", "adam_preconditioner"), names)
    plain = cross_gram(model, train.arguments, held_out.arguments).cross
    assert names["change"].shape == (4,) and float(names["gram"].cross.norm()) > 10 * float(plain.norm())


def test_the_gram_by_hand():
    model, batch = build("Llama"), rollouts()
    given = Rollouts(
        input_ids=batch.input_ids,
        attention_mask=batch.attention_mask.bool(),
        completion_mask=batch.completion_mask,
        prompt_lengths=torch.full((5,), 4),
        group_ids=torch.zeros(5, dtype=torch.long),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    advantages = torch.linspace(-1.0, 1.0, 5)
    names: dict[str, Any] = {"model": model, "rollouts": given, "advantages": advantages, "optimizer": optimizer}
    before = model.lm_head.weight.detach().clone()
    exec(snippet_with("docs/gram.md", "from scoregram import backward_with_gram"), names)
    assert names["gram"].matrix.shape == (5, 5) and not torch.equal(before, model.lm_head.weight)


def test_more_rollouts_than_one_pass_holds(capsys):
    ids, mask, _ = rollouts().arguments
    names: dict[str, Any] = {"model": build("Llama"), "input_ids": ids, "completion_mask": mask}
    exec(snippet_with("docs/gram.md", "plan_passes"), names)
    assert capsys.readouterr().out.startswith("64 rollouts in ") and names["gram"].matrix.shape == (5, 5)


def test_cuda_graphs_by_hand():
    model = build("Llama")
    batches = [(*rollouts(seed=seed).arguments, torch.linspace(-1.0, 1.0, 5)) for seed in range(2)]
    names: dict[str, Any] = {
        "model": model,
        "batches": batches,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
    }
    exec(snippet_with("docs/gram.md", "CudaGraphGram"), names)
    assert torch.allclose(names["graphs"].measure(*batches[0][:3]).matrix, measure_gram(model, *batches[0][:3]).matrix)


@pytest.mark.integration
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("page", ["README.md", "docs/trl.md"])
def test_one_line_in_a_script_of_trl(page, tmp_path, monkeypatch, capsys):
    pytest.importorskip("trl")
    from tests.trl_cases import arguments, dataset, graded

    monkeypatch.chdir(tmp_path)
    snippet = snippet_with(page, "GRPOTrainer")
    for name in ("model", "reward_funcs", "args", "train_dataset"):
        assert f"{name}=..." in snippet
        snippet = snippet.replace(f"{name}=...", f"{name}={name}")
    names = {
        "model": str(save_policy(tmp_path / "policy")),
        "reward_funcs": graded,
        "args": arguments("GRPO", tmp_path / "trainer"),
        "train_dataset": dataset(),
    }
    exec(snippet, names)
    assert "self-check" in capsys.readouterr().out
    assert (tmp_path / "runs" / "mine" / "metrics.jsonl").exists()


@pytest.mark.slow
def test_every_argument_of_attach_is_in_the_table():
    table = TEXT["docs/trl.md"].split("\n## Arguments\n")[1].split("\n## ")[0]
    listed = re.findall(r"^\| `(\w+)` \| (.*?) \|", table, flags=re.MULTILINE)
    parameters = inspect.signature(attach).parameters
    assert [name for name, _ in listed] == list(parameters)
    stated = {name: text.strip("`").replace('"', "'") for name, text in listed}
    special = {"trainer", "tolerance", "memory_gb"}  # none, or one that depends on trainer and machine
    defaults = {name: repr(one.default) for name, one in parameters.items() if name not in special}
    assert defaults.items() <= stated.items()


def test_a_sharded_model(tmp_path):
    script = tmp_path / "sharded.py"
    script.write_text(
        "import torch\nfrom tests.cases import build, rollouts\n"
        f"torch.distributed.init_process_group('gloo', init_method='file://{tmp_path}/store', rank=0, world_size=1)\n"
        "torch.distributed.device_mesh.init_device_mesh('cpu', (1,))\n"
        "model = build('Llama').float()\ninput_ids, completion_mask, _ = rollouts().arguments\n"
        f"{snippet_with('docs/scale.md', 'fully_shard')}\n"
        "print(tuple(gram.matrix.shape))\ntorch.distributed.destroy_process_group()\n"
    )
    environment = {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "PATH": ""}
    call = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True)
    assert call.stdout.strip() == "(5, 5)", call.stderr[-2000:]


def test_recorded_coefficients(tmp_path, monkeypatch):
    """The loss of prime-rl that records, its token exports, and the snippet that joins them."""
    from tests.test_integrations_prime_rl import export_of, sequence

    monkeypatch.chdir(tmp_path)
    recorded_sequences(tmp_path / "outputs" / "coefficients", monkeypatch)
    exports = tmp_path / "outputs" / "token_exports" / "step_7"
    exports.mkdir(parents=True)
    lines = [json.dumps(export_of(sequence(seed))) for seed in range(4)]
    (exports / "rank_0.jsonl").write_text("\n".join(lines) + "\n")
    names: dict[str, Any] = {"model": build("Llama")}
    exec(snippet_with("docs/verl.md", "read_coefficients"), names)
    assert names["gram"].matrix.shape == (4, 4)


def recorded_sequences(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `recorded_loss` writes for four sequences."""
    from types import ModuleType

    from scoregram.integrations.prime_rl import recorded_loss
    from tests.test_integrations_prime_rl import LossOutputs, sequence

    for name in ("prime_rl", "prime_rl.trainer", "prime_rl.trainer.rl", "prime_rl.trainer.rl.loss"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["prime_rl.trainer.rl.loss"].__dict__["LossOutputs"] = LossOutputs
    for seed in range(4):
        recorded_loss(sequence(seed), objective="dapo", record=str(folder)).loss.backward()
