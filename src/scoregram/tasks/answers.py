r"""Whether a completion states the reference answer: compared as a number, as text, and by math-verify if installed.

The answer of a completion is the line after the first `####`, else the inside of the last `\boxed{…}`. Without either
it is the last number (if the reference is a number) or the last line.
"""

import importlib.util
import re
import threading
from decimal import Decimal
from typing import Any

ANSWER_MARK = "####"
_NUMBER = r"[-+]?\$?(?:\d[\d,]*(?:\.\d+)?|\.\d+)"
_ANY_NUMBER = re.compile(_NUMBER)
_PLAIN_NUMBER = re.compile(rf"[\s$€£]*({_NUMBER})\s*%?[\sA-Za-z.]*")
"""A number with currency, per cent, unit or full stop, and nothing else; comparing it needs no algebra."""
_EXPLOSIVE = re.compile(r"\^\s*\{?\s*-?\d{3,}|\^.*\^|\*\*|\d\s*!")
"""Powers and factorials on which a computer algebra system may hang."""
_LONGEST_EXPRESSION = 200
_SECONDS = 5


def right_answer(
    prompts: list[str], completions: list[str], *, answer: list[str], **columns: Any
) -> list[float | None]:
    """`1` where a completion states the reference answer, `0` otherwise."""
    return [float(same_answer(text, right)) for text, right in zip(completions, answer, strict=True)]


def same_answer(completion: str, answer: str) -> bool:
    r"""Whether `completion` states `answer`.

    Plain numbers are compared exactly, whatever their commas, currency, unit or trailing zeros; texts are compared
    without regard to case and spacing. math-verify decides other cases; if it is not installed, they count as wrong.

    Example:
        >>> same_answer("She pays 2 x $35,000.\n#### $70,000.00", "70000")
        True
        >>> same_answer("3 or 4, so it is 4.", "3")
        False
    """
    stated, number = stated_answer(completion), plain_number(answer)
    if number is not None and stated is None:
        return last_number(completion) == number
    stated = last_line(completion) if stated is None else stated
    if number is not None and (read := plain_number(stated)) is not None:
        return read == number
    return normalised_text(stated) == normalised_text(answer) != "" or equal_by_algebra(stated, answer)


def stated_answer(completion: str) -> str | None:
    r"""The line after the first `####`, else the inside of the last `\boxed{…}`, else `None`.

    The first mark counts, so text that the policy writes after its answer is ignored.
    """
    if ANSWER_MARK in completion:
        return completion.split(ANSWER_MARK, 1)[1].strip(" \t").split("\n")[0].strip()
    return last_boxed(completion)


def last_boxed(completion: str) -> str | None:
    r"""The inside of the last `\boxed{…}`, if its braces are balanced."""
    start = completion.rfind(r"\boxed{")
    depth = 0
    for at in range(start + len(r"\boxed"), len(completion)) if start >= 0 else ():
        depth += {"{": 1, "}": -1}.get(completion[at], 0)
        if depth == 0:
            return completion[start + len(r"\boxed{") : at].strip()
    return None


def plain_number(text: str) -> Decimal | None:
    """The number that `text` consists of, or `None` if there is anything else in it."""
    match = _PLAIN_NUMBER.fullmatch(text)
    return as_decimal(match[1]) if match else None


def last_number(text: str) -> Decimal | None:
    """The last number in `text`, or `None`."""
    numbers = _ANY_NUMBER.findall(text)
    return as_decimal(numbers[-1]) if numbers else None


def as_decimal(number: str) -> Decimal:
    """The value of a number as it is written, without commas and currency."""
    return Decimal(re.sub(r"[,$]", "", number))


def last_line(text: str) -> str:
    """The last line that is not blank; empty if all are."""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")


def normalised_text(text: str) -> str:
    """Text with folded case, single spaces and no final full stop."""
    return " ".join(text.casefold().split()).removesuffix(".")


def equal_by_algebra(stated: str, answer: str) -> bool:
    """Whether math-verify judges two expressions equal; `False` if it is not installed.

    math-verify enforces its time limit with a signal, which works only in the main thread. Expressions on which it may
    hang therefore count as unequal in every thread, so that the result does not depend on the thread.
    """
    if importlib.util.find_spec("math_verify") is None:
        return False
    if max(len(stated), len(answer)) > _LONGEST_EXPRESSION or _EXPLOSIVE.search(stated) or _EXPLOSIVE.search(answer):
        return False
    from math_verify import parse, verify

    seconds: Any = _SECONDS if threading.current_thread() is threading.main_thread() else None
    reference, candidate = (parse(as_expression(text), parsing_timeout=seconds) for text in (answer, stated))
    return bool(verify(reference, candidate, timeout_seconds=seconds))


def as_expression(text: str) -> str:
    r"""LaTeX in dollars, as math-verify expects it; other text unchanged."""
    return f"${text}$" if re.search(r"[\\^]", text) and "$" not in text else text
