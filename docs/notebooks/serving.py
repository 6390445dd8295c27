# %% [markdown]
# # Plan a server, and simulate it
#
# A plan of one server: its step, its latencies, its memory, and the batch at the knee of the front.

# %%
import rooftop

plan = rooftop.plan_serving("llama3-70b", on="v5e:4x4", weights_dtype="int8", kv_dtype="int8", batch_seqs=32)
plan

# %% [markdown]
# Requests that arrive at random, four a second, against five prefill servers and one that generates:

# %%
simulated = rooftop.simulate(plan, requests_per_second=4, ttft="1.5s", tpot="12ms")
simulated

# %% [markdown]
# What users feel, as rows:

# %%
simulated.rows[:6]

# %% [markdown]
# And the other way round: which fleet serves ten requests a second within these latencies?

# %%
rooftop.plan_serving("llama3-8b", on="v5e", requests_per_second=10, ttft="1s", tpot="50ms")
