r"""Whether a written answer is the reference answer: by exact number, by text, and by math-verify where installed.

The answer of a completion stands behind the first `####`, else in the last `\boxed{…}`; where neither is written it
is the last number (for a reference that is a number) or the last line.
"""

import importlib.util
import re
import threading
from decimal import Decimal
from typing import Any

MARK = "####"
NUMBER = r"[-+]?\$?(?:\d[\d,]*(?:\.\d+)?|\.\d+)"
LAST_NUMBER = re.compile(NUMBER)
PLAIN = re.compile(rf"[\s$€£]*({NUMBER})\s*%?[\sA-Za-z.]*")
"""A number with nothing around it but currency, per cent, units and a full stop; what it says needs no algebra."""
EXPLOSIVE = re.compile(r"\^\s*\{?\s*-?\d{3,}|\^.*\^|\*\*|\d\s*!")
"""Powers and factorials that a computer algebra system may work at for ever."""
LONGEST_EXPRESSION = 200
SECONDS = 5


def right_answer(
    prompts: list[str], completions: list[str], *, answer: list[str], **columns: Any
) -> list[float | None]:
    """`1` where a completion states the reference answer, `0` otherwise."""
    return [float(same_answer(text, right)) for text, right in zip(completions, answer, strict=True)]


def same_answer(completion: str, answer: str) -> bool:
    r"""Whether `completion` states `answer`.

    A plain number is compared exactly, whatever its commas, currency, unit or trailing zeros; a text without regard to
    case and spacing. Anything else is left to math-verify where it is installed, and is wrong where it is not.

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
    return normalised(stated) == normalised(answer) != "" or equal_by_algebra(stated, answer)


def stated_answer(completion: str) -> str | None:
    r"""The line behind the first `####`, else the inside of the last `\boxed{…}`, else `None`.

    The first mark counts, so that what a policy rambles on about after its answer changes nothing.
    """
    if MARK in completion:
        return completion.split(MARK, 1)[1].strip(" \t").split("\n")[0].strip()
    return last_boxed(completion)


def last_boxed(completion: str) -> str | None:
    r"""The inside of the last complete `\boxed{…}`, braces within it balanced."""
    start = completion.rfind(r"\boxed{")
    depth = 0
    for at in range(start + len(r"\boxed"), len(completion)) if start >= 0 else ():
        depth += {"{": 1, "}": -1}.get(completion[at], 0)
        if depth == 0:
            return completion[start + len(r"\boxed{") : at].strip()
    return None


def plain_number(text: str) -> Decimal | None:
    """The number that `text` consists of, or `None` where it says more than one number."""
    found = PLAIN.fullmatch(text)
    return as_decimal(found[1]) if found else None


def last_number(text: str) -> Decimal | None:
    """The last number in `text`, or `None`."""
    found = LAST_NUMBER.findall(text)
    return as_decimal(found[-1]) if found else None


def as_decimal(number: str) -> Decimal:
    """The value of a match of `NUMBER`."""
    return Decimal(re.sub(r"[,$]", "", number))


def last_line(text: str) -> str:
    """The last line that is not blank; empty where there is none."""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")


def normalised(text: str) -> str:
    """Text without regard to case, spacing and a final full stop."""
    return " ".join(text.casefold().split()).removesuffix(".")


def equal_by_algebra(stated: str, answer: str) -> bool:
    """Whether math-verify takes two expressions for equal; `False` where it is not installed.

    Its time limit is a signal, which only the main thread may set. Expressions that could run away are refused in every
    thread, so that the verdict does not depend on the thread it is reached in.
    """
    if importlib.util.find_spec("math_verify") is None:
        return False
    if max(len(stated), len(answer)) > LONGEST_EXPRESSION or EXPLOSIVE.search(stated) or EXPLOSIVE.search(answer):
        return False
    from math_verify import parse, verify

    seconds: Any = SECONDS if threading.current_thread() is threading.main_thread() else None
    reference, candidate = (parse(as_expression(text), parsing_timeout=seconds) for text in (answer, stated))
    return bool(verify(reference, candidate, timeout_seconds=seconds))


def as_expression(text: str) -> str:
    r"""What looks like LaTeX set inside dollars, as math-verify expects it; other text unchanged."""
    return f"${text}$" if re.search(r"[\\^]", text) and "$" not in text else text
