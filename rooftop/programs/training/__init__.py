"""The training step: program, optimizer, microbatches and pipeline stages."""
