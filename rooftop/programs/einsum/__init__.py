"""Programs of the algebra: sharded einsums, and matmuls that overlap their collectives."""
