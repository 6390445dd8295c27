"""The two exchanges of a lookup and its gradients, and the one that sends less.

- ``rows``: ids go to the SparseCores that hold them, each different id of a partition once; rows come back, and the
  samples' devices combine them. Gradients go the same way, summed by row.
- ``activations``: ids go with their samples and gains; the holders combine what they have, and the partial sums are
  reduced and scattered to the samples' devices. Gradients of activations are gathered by all holders.

Rows are cheaper while a sample has few ids and samples share them; activations are once each SparseCore gets so many
ids that a sum for every sample is less than their rows. Buffers have the size of their limits, and so have transfers.
"""

from __future__ import annotations

from typing import Literal, get_args

from rooftop.core.ledger import Number

ExchangeKind = Literal["rows", "activations"]
EXCHANGES: tuple[ExchangeKind, ...] = get_args(ExchangeKind)
#: Bytes of an id, a float, and of an id with its sample and its gain.
_ID, _FLOAT, _ENTRY = 4, 4, 12


def exchanged_bytes(
    exchange: ExchangeKind,
    *,
    width: Number,
    max_ids: Number,
    max_unique_ids: Number,
    samples: Number,
    cores: int,
    per_device: int,
) -> dict[str, Number]:
    """Bytes of one device's operands, 'forward' and 'backward', its own part included.

    ``cores`` are all SparseCores, ``per_device`` those of a device; ``samples`` are rows of activations of one
    SparseCore. An AllToAll sends its operand, a ReduceScatter takes one activation for every device, and an AllGather
    makes one.
    """
    partitions = per_device * cores
    if exchange == "rows":
        ids, rows = partitions * max_unique_ids * _ID, partitions * max_unique_ids * width * _FLOAT
        return {"forward": ids + rows, "backward": ids + rows}
    entries = partitions * max_ids * _ENTRY
    activations = cores * samples * width * _FLOAT
    return {"forward": entries + activations, "backward": entries + activations}


def cheapest_exchange(
    *, width: int, max_ids: int, max_unique_ids: int, samples: int, cores: int, per_device: int
) -> ExchangeKind:
    """The exchange with the fewest bytes, forward and backward together; rows where both send as much."""

    def total(exchange: ExchangeKind) -> float:
        sent = exchanged_bytes(
            exchange,
            width=width,
            max_ids=max_ids,
            max_unique_ids=max_unique_ids,
            samples=samples,
            cores=cores,
            per_device=per_device,
        )
        return float(sum(sent.values()))

    return min(EXCHANGES, key=total)
