"""The exact Gram of per-rollout scores of a language model.

A model passes through these files, in this order:

    engine ─────── measure_gram · backward_with_gram · cross_gram · DeferredGram    the entry points
       │
    batch ──────── make_batch · distinct_rollouts                     1  checked, unpacked, duplicates removed
       │
    model ──────── MeasuredModel.in_use                               2  surveyed, prepared, put back by `undo`
       │
    measurement ── Measurement.run                                       which passes, in which order
       │
    passes ─────── Pass.run                                              one forward and one backward pass
       ├─ intercept ── Interceptor                                    3  forward: every use of a parameter seen
       │     ├─ axis ──── observed_axes                                  which first axes run over the rollouts
       │     └─ leaves ── Leaves                                         small parameters: one copy per rollout
       ├─ head ─────── fused_head                                        log-probabilities and their gradient
       ├─ collect ──── Collector                                      4  backward: factors (x, g) of products
       │     ├─ contract ── Contractor                                5  factors → K and Σ w_i ψ_i, in chunks
       │     │     └─ triton_kernels                                     the same in half precision on a GPU
       │     └─ sketch ──── Sketcher                                     optional: a short sketch of every score
       └─ plain_passes ── replayed_rows · verify_gram                    parameters without a rule; verification
       │
    result ─────── CollectedScores.gram → Gram                        6  K, its split by layer, gradients

`batch`, `contract` and `undo` import no other file of this folder. `model` also handles models spread over processes
(`DistributedDataParallel`, FSDP2).
"""

from scoregram.gram.batch import segment_rows as segment_rows
from scoregram.gram.contract import CHUNK_ELEMENTS as CHUNK_ELEMENTS
from scoregram.gram.contract import CHUNK_ELEMENTS_CUDA as CHUNK_ELEMENTS_CUDA
from scoregram.gram.contract import row_gram as row_gram
from scoregram.gram.engine import DeferredGram as DeferredGram
from scoregram.gram.engine import backward_with_gram as backward_with_gram
from scoregram.gram.engine import cross_gram as cross_gram
from scoregram.gram.engine import measure_gram as measure_gram
from scoregram.gram.head import STORE_BYTES as STORE_BYTES
from scoregram.gram.model import is_distributed as is_distributed
from scoregram.gram.model import model_inside as model_inside
from scoregram.gram.model import sharded_modules as sharded_modules
from scoregram.gram.model import survey as survey
from scoregram.gram.plain_passes import gradients as gradients
from scoregram.gram.result import Gram as Gram
from scoregram.gram.sketch import Sketch as Sketch
from scoregram.gram.sketch import Sketcher as Sketcher
from scoregram.gram.undo import Undo as Undo
