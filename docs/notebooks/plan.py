# %% [markdown]
# # Plan a training run
#
# Every verb of the command line is a function. An answer shows itself as HTML, and has `rows` for a data frame and
# `to_json()`.

# %%
import rooftop

rooftop.model("llama3-70b")

# %% [markdown]
# Which mesh is fastest on 4,096 TPU v5p, how long does it take, and what binds?

# %%
plan = rooftop.plan_training("llama3-70b", on="v5p:16x16x16", batch_tokens="4Mi", seq=4096, tokens="15T")
plan

# %% [markdown]
# The rows are the ledger: one for each scope and phase, in seconds, bytes and FLOPs of one device.

# %%
longest = sorted(plan.rows, key=lambda row: -row["expected_s"] * row["count"])[:5]
[(row["scope"], row["phase"], row["bound"], round(row["expected_s"] * row["count"], 4)) for row in longest]

# %% [markdown]
# How does the step change with the number of tensor ways? Each plan is searched anew with one axis pinned.

# %%
for tensor in (1, 2, 4, 8, 16):
    pinned = rooftop.plan_training(
        "llama3-70b", on="v5p:16x16x16", batch_tokens="4Mi", seq=4096, mesh=f"fsdp={4096 // tensor},tensor={tensor}"
    ).plan
    print(f"tensor {tensor:2}: {pinned.expected_s:.3f} s, MFU {pinned.mfu:.1%}")
