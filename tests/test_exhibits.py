import json
import math

import pytest

from scoregram.checks import ScoregramError
from scoregram.exhibits import Estimate, Figure, Series, Table, from_plain, to_plain

TABLE = Table("t", "A table", "Read it so.", ("R", "rank", "note"), ((2, Estimate(1.5, 1.0, 2.0), "x"), (4, 2.5, None)))
LINE = Series("measured", (0.0, 1.0), (2.0, 3.0), (1.5, 2.5), (2.5, 3.5))
CLOUD = Series("null", (0.5,), (1.0,), role="null", points=True)
FIGURE = Figure("f", "A figure", "Read it so.", "step", "rank", (LINE, CLOUD), x_log=True)


def test_exhibits_survive_json():
    text = json.dumps(to_plain([TABLE, FIGURE]), allow_nan=False)
    assert from_plain(json.loads(text)) == (TABLE, FIGURE)


def test_undefined_numbers_are_null_in_json_and_nan_again_after():
    table = Table("t", "", "", ("a",), ((Estimate(math.nan),),))
    figure = Figure("f", "", "", "", "", (Series("s", (0.0,), (math.inf,)),))
    plain = json.loads(json.dumps(to_plain([table, figure]), allow_nan=False))
    again_table, again_figure = from_plain(plain)
    assert isinstance(again_table, Table) and isinstance(again_figure, Figure)
    cell = again_table.rows[0][0]
    assert isinstance(cell, Estimate) and all(map(math.isnan, (cell.value, cell.low, cell.high)))
    assert math.isnan(again_figure.series[0].y[0])


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Table("t", "", "", ("a", "b"), ((1,),)), "2 cells"),
        (lambda: Series("s", (0.0, 1.0), (1.0,)), "equally long"),
        (lambda: Series("s", (0.0,), (1.0,), low=(0.0, 0.0)), "equally long"),
        (lambda: from_plain([{"kind": "poem"}]), "table or a figure"),
        (lambda: from_plain([{"kind": "table", "rows": []}]), "all its fields"),
    ],
)
def test_what_is_no_exhibit_is_refused(make, said):
    with pytest.raises(ScoregramError, match=said):
        make()
