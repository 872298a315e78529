"""Two lists of exhibits: what differs is named, and rounding does not count."""

from typing import Any

import pytest

from scoregram.studies.verification import RTOL, recorded_differences


def table(*rows: list[Any], columns: tuple[str, ...] = ("R", "rank")) -> dict[str, Any]:
    return {"kind": "table", "id": "t", "columns": list(columns), "rows": list(rows)}


@pytest.mark.parametrize(
    ("recorded", "recomputed", "said"),
    [
        ([table([2, 1.5])], [table([2, 1.5 * (1 + RTOL / 2)])], []),
        ([table([2, 1.0], [4, 1e-17])], [table([2, 1.0], [4, -3e-17])], []),
        ([table([2, 1e-17])], [table([2, 3e-17])], ['"t", row 1 (R = 2), column "rank": 1e-17 recorded, 3e-17 rec']),
        ([table([2, 1.5])], [table([2, 1.5 * (1 + 2 * RTOL)])], ['"t", row 1 (R = 2), column "rank": 1.5 recorded']),
        ([table([2, None])], [table([2, 0.0])], ["null recorded, 0.0 recomputed"]),
        ([table([2, 1])], [table([2, True])], ["1 recorded, true recomputed"]),
        ([table([2, 1])], [table([2, 1.0])], []),
        ([table([10**12, 1])], [table([10**12 + 1, 1])], ["1000000000000 recorded, 1000000000001 recomputed"]),
        ([table([2, 1])], [table([2, {"value": 1}])], ['1 recorded, {"value": 1} recomputed']),
        ([table([2, 1], [4, 2])], [table([2, 1])], ['table "t": 2 rows recorded, 1 recomputed']),
        ([table([2, 1])], [table([2])], ['table "t", rows[0]: 2 entries recorded, 1 recomputed']),
        ([table([2, 1])], [table([2, 1], columns=("R", "x"))], ['"t", columns[1]: "rank" recorded, "x" recomputed']),
        ([{"id": "a"}, {"id": "b"}], [{"id": "b"}, {"id": "a"}], ["every exhibit is there, but in another order"]),
        ([{"id": "a"}, {"id": "a", "x": 1}], [{"id": "a"}, {"id": "a", "x": 2}], ['exhibit "a" (2), x: 1 recorded']),
        ([{"id": "a", "x": 1}], [{"id": "a", "y": 1}], ['"a", x: recorded only', '"a", y: recomputed only']),
        ([1, "x"], [1, "y"], ['exhibit 2: "x" recorded, "y" recomputed']),
        ([{"id": "a", "x": "long" * 99}], [{"id": "a", "x": ""}], ['..., "" recomputed']),
        (
            [{"id": "f", "series": [{"name": "s", "x": [1.0]}]}],
            [{"id": "f", "series": []}],
            ['"f", series "s": recorded'],
        ),
    ],
)
def test_differences_are_named_and_rounding_is_not_one(recorded, recomputed, said):
    found = recorded_differences(recorded, recomputed, "exhibit")
    assert len(found) == len(said), found
    for sentence, part in zip(found, said, strict=True):
        assert part.replace("..., ", "... recorded, ") in sentence
