"""The key by which the ids of stacks are sorted, and where its fields begin: NumPy's and numba's kernels have the same.

A source is a SparseCore that holds samples; a destination one that holds rows. From the highest bits on a key says

    stack | source | destination | table of the stack | local row of the table | row of activations of the table

of those stacks and sources that are sorted at once. So sorted keys have the order in which SparseCores read them, a
sample's duplicates side by side, and what one buffer holds is in one piece.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rooftop.embed.keys import bits
from rooftop.embed.lookups import TableBatch


@dataclass(frozen=True, kw_only=True)
class Fields:
    """Where the fields of a key begin (rows of activations do at 0), and how many there are of each.

    ``used`` are the bits of a key.
    """

    row: int
    table: int
    core: int
    source: int
    stack: int
    used: int
    cores: int
    #: Sources and stacks of one sort.
    sources: int
    stacks: int

    @classmethod
    def of(
        cls,
        stacks: Sequence[Sequence[TableBatch]],
        sources: int,
        most_bits: int,
        *,
        dividing: bool = False,
    ) -> Fields | None:
        """For at most ``sources`` sources, and all of the stacks if so many fit; None if not even one source does.

        With ``dividing``, as many sources as divide them without a rest.
        """
        layouts = [one.table.layout for tables in stacks for one in tables]
        row = max(layout.sample_bits for layout in layouts)
        table = row + max(layout.row_bits for layout in layouts)
        core = table + bits(max(len(tables) for tables in stacks))
        source = core + bits(layouts[0].cores)
        if source > most_bits:
            return None
        at_once = min(sources, 1 << (most_bits - source))
        while dividing and sources % at_once:
            at_once -= 1
        stack = source + bits(at_once)
        together = min(len(stacks), 1 << (most_bits - stack)) if at_once == sources else 1
        return cls(
            row=row,
            table=table,
            core=core,
            source=source,
            stack=stack,
            used=stack + bits(together),
            cores=layouts[0].cores,
            sources=at_once,
            stacks=together,
        )
