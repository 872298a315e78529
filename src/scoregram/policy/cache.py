"""Keys and values of plain attention layers in one block per layer, filled once per prompt for all its rollouts."""

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from scoregram.policy.modes import computed_in


class SharedCache(Cache):
    """A fixed block `(rows, heads, capacity, width)` of keys and of values for every layer, written column by column.

    A prompt goes through the model once; `fill` copies the keys and values that it leaves into the rows of all its
    rollouts. From then on every forward pass adds one column. The column is a number, or, for a step that is
    captured and replayed, a tensor on the device; then all of `visible` columns are returned and the mask decides.
    """

    def __init__(self, rows: int, capacity: int) -> None:
        super().__init__(layers=[])
        self.rows, self.capacity = rows, capacity
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self.length = 0
        """Columns written so far."""
        self.column: Tensor | None = None
        self.visible = capacity

    def fill(self, index: int, keys: Tensor, values: Tensor, first_row: int, repeats: int) -> None:
        """Copy what prompts left in a layer, `(P, heads, columns, width)`, each row `repeats` times in a row."""
        if index == len(self.keys):
            self.keys.append(self.block_like(keys))
            self.values.append(self.block_like(values))
        for block, part in ((self.keys[index], keys), (self.values[index], values)):
            rows = block[first_row : first_row + len(part) * repeats, :, : part.shape[2]]
            rows.unflatten(0, (len(part), repeats)).copy_(part[:, None])
        self.length = keys.shape[2]

    def block_like(self, part: Tensor) -> Tensor:
        """Room for every row, in the dtype that attention will compute with.

        Autocast would turn every key and value into its own dtype at every step. A captured step reads columns before
        they are written, behind a mask, and there a number that is none would spoil the sum: hence zeros on a GPU.
        """
        make = torch.zeros if part.is_cuda else torch.empty
        return make(self.rows, part.shape[1], self.capacity, part.shape[3], dtype=computed_in(part), device=part.device)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: object, **__: object
    ) -> tuple[Tensor, Tensor]:
        """Write the next column of a layer and return what its queries may see."""
        keys, values = self.keys[layer_idx], self.values[layer_idx]
        if self.column is not None:
            keys.index_copy_(2, self.column, key_states.to(keys.dtype))
            values.index_copy_(2, self.column, value_states.to(values.dtype))
            return keys[:, :, : self.visible], values[:, :, : self.visible]
        for block, states in ((keys, key_states), (values, value_states)):
            block.narrow(2, self.length, 1).copy_(states)
        return keys.narrow(2, 0, self.length + 1), values.narrow(2, 0, self.length + 1)

    @property
    def seen(self) -> int:
        """Columns that the next token sees."""
        return self.visible if self.column is not None else self.length + 1

    def advance(self) -> None:
        """The column that every layer has written is complete."""
        if self.column is not None:
            self.column += 1
        else:
            self.length += 1

    def keep(self, rows: Tensor) -> None:
        """Drop every other row; only columns in use are copied."""
        for blocks in (self.keys, self.values):
            for index, block in enumerate(blocks):
                kept = block.new_empty(len(rows), *block.shape[1:])
                torch.index_select(block[:, :, : self.length], 0, rows, out=kept[:, :, : self.length])
                blocks[index] = kept
        self.rows = len(rows)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns written so far."""
        return self.length

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Columns that a mask has to cover, and the first of them."""
        return (self.visible if self.column is not None else self.length + query_length), 0
