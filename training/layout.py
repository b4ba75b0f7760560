"""The rows of a training step: units of one block each, and which units each of them sees.

A sample is laid out as several *copies* of its blocks, and every copy of a block is one unit:

- **causal**: row i sees rows 0 to i of the causal copy. Its loss keeps the arithmetic alive in the diffusion stage.
- **clean**: the block-causal copy, which is what the prefix cache holds in decoding. Its last row predicts the next
  block's first token (token shift), and it is the context of the noisy units. The last block needs no clean copy.
- **noisy**: a variant of one answer block with masked rows. It sees the clean earlier blocks and itself.

Every unit therefore sees at most the earlier blocks of its sample and itself: attention runs over `context`, a table
of unit numbers, instead of over a square mask of the whole batch, and no row is spent on padding between samples.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

NO_TARGET = -100


class Units(NamedTuple):
    """A step's rows as tensors. U units, R rows per unit, C context slots; the last slot is the unit itself."""

    tokens_UR: Tensor
    positions_UR: Tensor
    context_UC: Tensor
    visible_UC: Tensor  # bool: whether a context slot holds an earlier block or nothing
    causal_U: Tensor  # bool: whether rows see only what is before them in their own unit too
    targets_UR: Tensor  # the token that the row's logits predict
    weights_UR: Tensor  # 0 where there is no loss

    def mask(self) -> Tensor:
        """Returns which keys each row sees: [U, 1, R, C * R]."""
        units, rows = self.tokens_UR.shape
        slots = self.context_UC.shape[1]
        earlier = self.visible_UC[:, None, :-1, None].expand(units, rows, slots - 1, rows)
        triangle = torch.ones(rows, rows, dtype=torch.bool).tril()
        own = triangle[None] | ~self.causal_U[:, None, None]
        return torch.cat((earlier.reshape(units, rows, -1), own), -1).unsqueeze(1)


@dataclass
class Sheet:
    """Units while they are being collected. `slots` is the number of blocks of the longest sample."""

    rows: int
    slots: int
    tokens: list[list[int]] = field(default_factory=list)
    first_positions: list[int] = field(default_factory=list)
    contexts: list[list[int]] = field(default_factory=list)
    causal: list[bool] = field(default_factory=list)
    targets: list[list[int]] = field(default_factory=list)
    weights: list[list[float]] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.tokens)

    def add(
        self,
        tokens: list[int],
        *,
        block: int,
        earlier: list[int],
        targets: list[int],
        weights: list[float],
        causal: bool = False,
    ) -> int:
        """Adds a unit that sees the units `earlier`, and returns its number."""
        assert len(tokens) == len(targets) == len(weights) == self.rows
        assert len(earlier) == block < self.slots
        self.tokens.append(tokens)
        self.first_positions.append(block * self.rows)
        self.contexts.append(earlier)
        self.causal.append(causal)
        self.targets.append(targets)
        self.weights.append(weights)
        return len(self) - 1

    def units(self, count: int) -> Units:
        """Returns the tensors, padded with units without loss to the fixed count that the compiled step needs."""
        assert len(self) <= count, f"{len(self)} units do not fit {count}"
        spare = count - len(self)
        contexts = [*self.contexts, *([[]] * spare)]
        table = [[*earlier, *([number] * (self.slots - len(earlier)))] for number, earlier in enumerate(contexts)]
        visible = [[slot < len(earlier) for slot in range(self.slots)] for earlier in contexts]
        first = torch.tensor([*self.first_positions, *([0] * spare)])
        return Units(
            tokens_UR=torch.tensor([*self.tokens, *([[0] * self.rows] * spare)]),
            positions_UR=first[:, None] + torch.arange(self.rows),
            context_UC=torch.tensor(table),
            visible_UC=torch.tensor(visible),
            causal_U=torch.tensor([*self.causal, *([False] * spare)]),
            targets_UR=torch.tensor([*self.targets, *([[NO_TARGET] * self.rows] * spare)]),
            weights_UR=torch.tensor([*self.weights, *([[0.0] * self.rows] * spare)]),
        )
