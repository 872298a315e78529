"""No code from data: YAML of a run folder, chat templates of a model, and text with template syntax on a page.

Pickles are in `test_dumps_formats.py`, code of a model repository in `test_policy_load.py`.
"""

import json
from io import StringIO

import pytest
from rich.console import Console

from scoregram import cli
from scoregram.advice import advise
from scoregram.checks import ScoregramError
from scoregram.integrations.dumps.config import MeasureConfig
from scoregram.integrations.dumps.measure import measure
from scoregram.reading import read_run
from scoregram.runs import RunWriter, open_run
from scoregram.training import TrainConfig
from tests.dump_cases import lines
from tests.report_cases import Page, write_run
from tests.training_cases import save_policy

TAGS = (
    '!!python/object/apply:os.system ["touch {made}"]',
    '!!python/object/apply:pathlib.Path.touch [!!python/object/apply:pathlib.Path ["{made}"]]',
    '!!python/object/new:os.system ["touch {made}"]',
    "!!python/object/apply:builtins.open [{made}, w]",
    "!!python/name:os.system",
    "!!python/module:os",
    '!!python/object:scoregram.runs.Run {{folder: "{made}"}}',
    '!run "touch {made}"',
)
"""YAML tags that unsafe loaders turn into calls."""


@pytest.mark.parametrize("tag", TAGS)
@pytest.mark.parametrize("place", ["config: {{a: {}}}", "config: {{}}\nremarks: {{model: {}}}", "{}: 1\nconfig: {{}}"])
def test_no_code_from_the_config_of_a_run(tag, place, tmp_path, capsys):
    made, run = tmp_path / "made", tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text(f"schema: 1\n{place.format(tag.format(made=made))}\n")
    readers = (
        open_run,
        read_run,
        advise,
        TrainConfig.of_run,
        lambda folder: RunWriter.resume(folder, None, config={"a": 1}),
    )
    for read in readers:
        with pytest.raises(ScoregramError, match=r"config\.yaml must be "):
            read(run)
    assert cli.main(["advise", str(run)]) == 2 and "config.yaml must be " in capsys.readouterr().err
    assert not made.exists() and list(tmp_path.iterdir()) == [run]


TEMPLATES = (
    "{{{{ cycler.__init__.__globals__.os.system('touch {made}') }}}}",
    "{{{{ lipsum.__globals__['os'].popen('touch {made}').read() }}}}",
    "{{{{ ''.__class__.__mro__[1].__subclasses__() }}}}",
    "{{{{ messages.__class__.__base__.__subclasses__() }}}}",
    "{{{{ self.__init__.__globals__.__builtins__.open('{made}', 'w') }}}}",
    "{{{{ raise_exception.__globals__['__builtins__']['open']('{made}', 'w') }}}}",
    "{{% set x = messages.append({{}}) %}}1+1=",
)
"""Chat templates that reach for Python from jinja."""


@pytest.mark.parametrize("template", TEMPLATES)
def test_no_code_from_the_chat_template_of_a_model(template, tmp_path):
    """A record whose template reaches for Python is left out with the reason, and nothing runs."""
    made, model = tmp_path / "made", save_policy(tmp_path / "model")
    settings = model / "tokenizer_config.json"
    stored = json.loads(settings.read_text())
    settings.write_text(json.dumps(stored | {"chat_template": template.format(made=made)}))
    (model / "chat_template.jinja").unlink(missing_ok=True)
    rows = [{"prompt": [{"role": "user", "content": "a"}], "completion": "2", "group": 0, "reward": 1.0}] * 2
    said = StringIO()
    config = MeasureConfig(
        model=str(model), rollouts=lines(tmp_path / "x.jsonl", rows), out=tmp_path / "run", device="cpu", strict=True
    )
    with pytest.raises(ScoregramError, match=r"x\.jsonl line 1: .* got (SecurityError|UndefinedError)"):
        measure(config, console=Console(file=said))
    assert not made.exists()


def test_text_with_template_syntax_is_text_on_a_page(tmp_path):
    pytest.importorskip("plotly")
    from scoregram.report import write_report

    text = "{{ 7 * 191 }}{% for i in range(9) %}x{% endfor %}{# gone #}"
    write_run(tmp_path / "run", steps=2, text=text)
    html = write_report(tmp_path / "run").read_text()
    assert "7 * 191" in html and "gone" in html and "1337" not in Page(html).text()
