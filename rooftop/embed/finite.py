"""Whether tables and the dense part are still numbers: what is not is named with its place and the batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from rooftop.errors import Infeasible
from rooftop.models.tables_stacking import Stacking, unpack
from rooftop.programs.embedding_state import EmbeddingState, host_state


def check_finite(state: EmbeddingState[jax.Array], stacking: Stacking, batch: int) -> None:
    """Raises Infeasible, naming the table, its first bad row and the batch, where a table holds NaN or infinity."""
    for stack in stacking.stacks:
        if not bool(jnp.isfinite(state.tables[stack.name]).all()):
            whole = unpack(stacking, host_state(stacking, state)[0])
            for place in stack.places:
                bad = np.flatnonzero(~np.isfinite(whole[place.table.name]).all(axis=1))
                if len(bad):
                    what = f"table {place.table.name} after batch {batch}"
                    raise Infeasible(what, f"{len(bad)} rows that are no finite numbers, first row {bad[0]}")


def check_dense(arrays: Mapping[str, NDArray[Any]], batch: int) -> None:
    """Raises Infeasible, naming the first array and the batch, where one of the dense part holds NaN or infinity."""
    for name, array in arrays.items():
        count = int(array.size - np.isfinite(array).sum())
        if count:
            raise Infeasible(f"dense part after batch {batch}", f"{count} values of {name} that are no finite numbers")
