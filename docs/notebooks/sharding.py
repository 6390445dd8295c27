# %% [markdown]
# # Multiply sharded arrays
#
# Chapter 3 of the book as a function. `A[I_X, J_Y]` is split over mesh axis X in I and Y in J.

# %%
import rooftop

rooftop.matmul("A[I_X, J_Y] * B[J_Y, K]", dims="I=8192,J=8192,K=32768", mesh="X=4,Y=4", on="v5e:4x4")

# %% [markdown]
# Both operands are split over the contracted dim, so the product comes out unreduced over Y. Asked for the sum, the
# answer is an AllReduce or a ReduceScatter after the matmul, or a matmul that scatters as it goes:

# %%
summed = rooftop.matmul(
    "A[I_X, J_Y] * B[J_Y, K] -> C[I_X, K_Y]", dims="I=8192,J=8192,K=32768", mesh="X=4,Y=4", on="v5e:4x4"
)
summed

# %%
summed.rows[:2]

# %% [markdown]
# One collective by itself, with the bytes that it moves:

# %%
rooftop.matmul("AllGather_Y(bf16[E_Y, F])", dims="E=2048,F=8192", mesh="X=8,Y=4", on="v5e:8x4")
