"""The exact Gram of per-rollout scores of a language model."""

from scoregram.gram.engine import backward_with_gram as backward_with_gram
from scoregram.gram.engine import measure_gram as measure_gram
from scoregram.gram.result import Gram as Gram
from scoregram.gram.rows import cross_gram as cross_gram
from scoregram.gram.rows import segment_rows as segment_rows
from scoregram.gram.sketch import Sketch as Sketch
