"""Training of a DLRM on embedding tables: steps, checkpoints and metrics."""
