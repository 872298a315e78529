"""Words of the field that a page explains where they stand, and once in a list."""

import re
from types import MappingProxyType

from markupsafe import Markup, escape

WORDS = MappingProxyType(
    {
        "score": "The gradient of a rollout's log-probability, summed over its completion tokens. An update is a "
        "weighted sum of scores.",
        "Gram": "The matrix of inner products between the gradients of rollouts: their scores or, in a run measured "
        'with mode="loss", their parts of the gradient of the loss. With the rewards it is enough for every number on '
        "this page.",
        "null": "What would be measured if the gradients of a group's rollouts were orthogonal, with the same norms. "
        "It is always the grey dashed line: a value on it says nothing about similarity.",
        "live group": "A group whose rewards differ. In any other group every advantage is 0, so it adds nothing to "
        "the update.",
        "dead group": "A group whose rollouts all have the same reward: all 1 (right), all 0 (wrong), or tied at "
        "another.",
        "effective rank": "Over how many directions the gradients of a group's rollouts spread: 1 if all are parallel, "
        "at most the number of rollouts. Unequal advantages and norms lower it too, hence the null.",
        "top-1 fraction": "Share of a group's gradient energy, the sum of squared norms, that lies in one direction.",
        "R": "Rollouts per prompt: the group size.",
        "σ_r": "Standard deviation of the rewards of a group.",
        "noise scale": "The number of rollouts at which signal and error of a step have equal power.",
        "signal to noise": "Power of the true gradient over the power of a step's error; power is the squared norm.",
        "coherence": "Share of the rollouts' gradient energy that survives being summed: 1 if all agree, 0 if they "
        "cancel.",
        "share of the update": "Part of the squared norm of an update that one rollout or prompt accounts for: of the "
        "update of the whole step, or of its group alone where the page says so. Shares add up to 1 over all rollouts "
        "of that update; a negative one pulls against the rest.",
        "self-check": "The gradient of the update is computed once more from the Gram and compared with the trainer's "
        "own.",
    }
)
"""Word → what it is, in one or two sentences."""

_PATTERN = re.compile(
    r"(?<![\w-])("
    + "|".join(re.escape(word) for word in sorted(WORDS, key=len, reverse=True) if len(word) > 3)
    + r")s?(?![\w-])"
)


def marked_terms(text: str) -> Markup:
    """Plain text, escaped, in which the first occurrence of every known word shows its definition on hover.

    Text between backticks is code. Single letters and other words of up to three characters are left out.

    Example:
        >>> print(marked_terms("a < b"))
        a &lt; b
        >>> print(marked_terms("as DAPO does (--method dapo)"))
        as DAPO does (<code>--method dapo</code>)
        >>> print(marked_terms("type `a --score <b`"))
        type <code>a <span>--score</span> &lt;b</code>
    """
    seen: set[str] = set()
    pieces = [
        _marked_command(part) if place % 2 else _marked_words(part, seen) for place, part in enumerate(text.split("`"))
    ]
    return Markup("").join(pieces)


def _marked_command(text: str) -> Markup:
    """A command as code, in which no option is broken over two lines at its hyphens."""
    options = Markup("<span>{}</span>")
    parts = [options.format(part) if part.startswith("-") else escape(part) for part in text.split(" ")]
    return Markup("<code>{}</code>").format(Markup(" ").join(parts))


def _marked_words(text: str, seen: set[str]) -> Markup:
    """Text, escaped, with definitions of the words that are not in `seen`, to which they are added."""
    pieces, end = [], 0
    for found in _PATTERN.finditer(text):
        word = found.group(1)
        if word in seen:
            continue
        seen.add(word)
        pieces.append(_marked_options(text[end : found.start()]))
        pieces.append(
            Markup('<dfn class="term" tabindex="0" data-tip="{}">{}</dfn>').format(WORDS[word], found.group())
        )
        end = found.end()
    pieces.append(_marked_options(text[end:]))
    return Markup("").join(pieces)


def _marked_options(text: str) -> Markup:
    """Text, escaped, with options such as `--method dapo` as code, which is not broken over two lines."""
    return Markup(_OPTION.sub(r"<code>\g<0></code>", str(escape(text))))


_OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]*(?: [a-z][a-z-]*(?=\)))?")
_READ_ROLLOUTS = re.compile(r"[Rr]ead some (?:truncated )?rollouts")


def linked_rollouts(text: str, has_texts: bool = True) -> Markup:
    """Text, escaped, in which an advice to read rollouts leads to those on the page, if it holds their texts.

    Example:
        >>> print(linked_rollouts("Read some rollouts: a < b"))
        <a href="#glass" class="to-rollouts">Read some rollouts</a>: a &lt; b
    """
    safe = escape(text)
    if not has_texts:
        return safe
    return Markup(_READ_ROLLOUTS.sub(r'<a href="#glass" class="to-rollouts">\g<0></a>', str(safe)))


def marked_setting(text: str) -> Markup:
    """A setting, escaped: what to type as code, the present value behind it as text.

    Example:
        >>> print(marked_setting("--steps 150 (now 60)"))
        <code>--steps 150</code> (now 60)
    """
    typed, now, present = text.partition(" (now ")
    return Markup("<code>{}</code>{}").format(typed, now + present)
