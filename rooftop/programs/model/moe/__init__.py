"""A mixture of experts: each device routes its tokens, exchanges them over the expert axes, and gets the results back.

Dims: n tokens of one device, E experts, k active ones, C capacity, D model, F feed-forward.

Every pair (token, chosen expert) takes a slot. A device has C slots for each expert, or for each shard of experts, so
that all shapes are static and the AllToAll is even. If an expert has more than C pairs, those of the later tokens are
dropped: the token's sum lacks that part, and its other weights are unchanged. The experts' matmuls are

- ``batched``: einsums over the slots of each expert. With C = n nothing is dropped, since a token chooses an expert at
  most once; that is E/k times the rows of evenly chosen experts, and all of them are multiplied;
- ``grouped``: a slot belongs to a shard, for any of its experts. The device of the shard sorts its rows by expert, and
  multiplies only the rows of each expert (``rooftop.programs.model.grouped_matmul``). With C = n min(k, E/X) for each
  of X shards nothing is dropped: without expert parallelism, exactly the n k pairs. Over a mesh empty slots take memory
  and bandwidth, but are not multiplied; a capacity drops only pairs over the limit of a whole shard.

Servers, whose steps have few tokens and drop none, have no slots of shards: all devices get all tokens and choices, and
each multiplies the rows of its own experts. Their partial sums are scattered back. That moves as many rows as there are
tokens, where slots for any choice of them are min(k, E/X) times as many.

A row travels with its routing weight, which multiplies the hidden activations before the second matmul. The gradient of
the router then needs neither that matmul again nor a second exchange, and combining is a plain sum of k rows.
"""
