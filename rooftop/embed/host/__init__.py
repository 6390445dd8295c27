"""Host preprocessing: ids of a batch become the buffers that SparseCores read, within limits learned from data."""
