# %% [markdown]
# # Embedding tables on SparseCores
#
# Stacks of tables, what one step moves, and what binds it. The tables are those of `docs/tables.toml`.

# %%
import rooftop

plan = rooftop.plan_embedding("docs/tables.toml", on="v6e:2x2", batch_samples="16Ki")
plan

# %%
plan.rows[:4]

# %% [markdown]
# Twice the samples of a step:

# %%
for samples in ("8Ki", "16Ki", "32Ki"):
    print(samples, rooftop.plan_embedding("docs/tables.toml", on="v6e:2x2", batch_samples=samples).summary)
