"""The exact Gram of per-rollout scores of a language model."""

from scoregram.gram.backward import gradients as gradients
from scoregram.gram.deferred import DeferredGram as DeferredGram
from scoregram.gram.engine import backward_with_gram as backward_with_gram
from scoregram.gram.engine import measure_gram as measure_gram
from scoregram.gram.head import STORE_BYTES as STORE_BYTES
from scoregram.gram.outer import CHUNK_ELEMENTS as CHUNK_ELEMENTS
from scoregram.gram.outer import CHUNK_ELEMENTS_CUDA as CHUNK_ELEMENTS_CUDA
from scoregram.gram.outer import row_gram as row_gram
from scoregram.gram.restore import attributes as attributes
from scoregram.gram.restore import gradients_put_aside as gradients_put_aside
from scoregram.gram.restore import random_state_kept as random_state_kept
from scoregram.gram.result import Gram as Gram
from scoregram.gram.rows import cross_gram as cross_gram
from scoregram.gram.rows import segment_rows as segment_rows
from scoregram.gram.sharding import is_distributed as is_distributed
from scoregram.gram.sharding import model_inside as model_inside
from scoregram.gram.sharding import sharded_modules as sharded_modules
from scoregram.gram.sketch import Sketch as Sketch
from scoregram.gram.sketch import Sketcher as Sketcher
from scoregram.gram.survey import survey as survey
