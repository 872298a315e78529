"""The exact Gram of per-rollout scores of a language model.

A call runs through these files in this order:

    engine ─────── measure_gram · backward_with_gram · cross_gram · DeferredGram    the entry points
    cuda_graph ─── CudaGraphGram                                         the same as recorded CUDA graphs
       │
    batch ──────── make_batch · distinct_rollouts                     1  check the tokens, remove duplicates
       │
    model ──────── MeasuredModel.in_use                               2  prepare the model; `undo` restores it
       │
    in_passes ──── plan_passes · run_in_passes                           more rollouts than one pass holds
       ├─ memory ───── bytes_of_pass · free_bytes                        estimate what fits
       └─ kept ─────── KeptRows                                          gradients that outlive their pass
       │
    measurement ── Measurement.run                                       choose the passes and their order
       │
    passes ─────── Pass.run                                              run one forward and one backward pass
       ├─ intercept ── Interceptor                                    3  forward: find every use of a parameter
       │     ├─ axis ──── observed_axes                                  find the axes that run over the rollouts
       │     ├─ marks ─── low_rank_terms                                 find weights that are W + s L R
       │     └─ leaves ── Leaves                                         copy small parameters for each rollout
       ├─ head ─────── fused_head                                        log-probabilities and their gradient
       ├─ collect ──── Collector                                      4  backward: collect the factors (x, g)
       │     ├─ contract ── Contractor                                5  contract them to K and Σ w_i ψ_i
       │     │     ├─ preconditioner ── Diagonal                          optional: scale the gradients by √D
       │     │     └─ slab ── Slab · triton_kernels                       the same in half precision on a GPU
       │     └─ sketch ──── Sketcher                                     optional: sketch every score
       └─ plain_passes ── replayed_rows · verify_gram                    replay parameters without a rule; verify
       │
    result ─────── CollectedScores.gram → Gram                        6  K, its split by layer, gradients

Terms that all files share:

    use          one operation on a weight: a product or an embedding lookup. A tied weight has several
    factors      (x, g): input and output gradient of a product; `Σ_t g_t ⊗ x_t` is the weight's gradient
    rows         `(N, *shape)`: the gradients of a small parameter, one row per rollout
    leaf         `(N, *shape)`: one copy of a small parameter per rollout; its gradient is the rows
    narrow pass  intercepts only the modules that own trainable parameters
    wide pass    intercepts every operation of the model
    probe pass   a forward pass over two or three rollouts that only records the first axes of activations
    replay       measure a parameter that no rule covers, by one backward pass per rollout
    owner        of an entry of a first axis: its rollout. Of a Gram in `contract`: the id of its parameter

In `batch`, rows are also those of a batch, and in `contract` those of a weight matrix.

`batch`, `operations` (the torch functions that rules name), `preconditioner`, `slab` and `undo` import no other file of
this folder.
`model` also handles distributed models (`DistributedDataParallel`, FSDP2).
"""

from scoregram.gram.batch import segment_rows as segment_rows
from scoregram.gram.contract import row_gram as row_gram
from scoregram.gram.cuda_graph import CudaGraphGram as CudaGraphGram
from scoregram.gram.engine import DeferredGram as DeferredGram
from scoregram.gram.engine import backward_with_gram as backward_with_gram
from scoregram.gram.engine import cross_gram as cross_gram
from scoregram.gram.engine import measure_gram as measure_gram
from scoregram.gram.in_passes import PassPlan as PassPlan
from scoregram.gram.in_passes import plan_passes as plan_passes
from scoregram.gram.memory import MEMORY_SHARE as MEMORY_SHARE
from scoregram.gram.memory import bytes_of_pass as bytes_of_pass
from scoregram.gram.memory import free_bytes as free_bytes
from scoregram.gram.memory import gradient_bytes as gradient_bytes
from scoregram.gram.memory import text_config as text_config
from scoregram.gram.model import has_dropout_rate as has_dropout_rate
from scoregram.gram.model import is_distributed as is_distributed
from scoregram.gram.model import model_inside as model_inside
from scoregram.gram.model import modules_inside as modules_inside
from scoregram.gram.model import sharded_modules as sharded_modules
from scoregram.gram.model import survey as survey
from scoregram.gram.model import trainable_parameters as trainable_parameters
from scoregram.gram.plain_passes import gradients as gradients
from scoregram.gram.preconditioner import adam_preconditioner as adam_preconditioner
from scoregram.gram.result import ChangedLayers as ChangedLayers
from scoregram.gram.result import Gram as Gram
from scoregram.gram.sketch import Sketch as Sketch
from scoregram.gram.sketch import Sketcher as Sketcher
from scoregram.gram.sketch import gradient_sketch as gradient_sketch
from scoregram.gram.sketch import update_sketch as update_sketch
from scoregram.gram.undo import Undo as Undo
