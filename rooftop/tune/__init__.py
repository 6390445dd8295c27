"""A search of compiler options and plans by compiling: what is tried, the trials on the disk, and the answer."""
