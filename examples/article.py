"""Scaled dot-product attention on four tokens: X to Q, K and V, to weights, to the output.

    softmax(Q Kᵀ / √d_k) V    with    Q = X W_Q,  K = X W_K,  V = X W_V

Run it with `python examples/article.py`.
"""

import numpy as np

from qkv_ext import linear_projection, scaled_dot_product_attention

rng = np.random.default_rng(seed=0)
X = rng.standard_normal((4, 8), dtype=np.float32)  # 4 tokens, each a vector of 8 numbers
# A trained model has learned these three; 1/√8 keeps Q, K and V as large as X.
W_Q, W_K, W_V = rng.standard_normal((3, 8, 8), dtype=np.float32) / 8**0.5

Q = linear_projection(X, W_Q)  # what each token looks for
K = linear_projection(X, W_K)  # what each token can be found by
V = linear_projection(X, W_V)  # what each token hands over when it is found

output, weights = scaled_dot_product_attention(Q, K, V, return_weights=True)


def show():
    np.set_printoptions(precision=3, suppress=True)
    print("X", X.shape, " Q", Q.shape, " K", K.shape, " V", V.shape)
    print("\nweights", weights.shape, "- row i says how much of each token's V goes to token i")
    print(weights)
    print("sums of its rows", weights.sum(axis=-1))
    print("\noutput", output.shape)
    print(output)


if __name__ == "__main__":
    from qkv_ext._core._program import run  # ends quietly where nobody reads on

    run(show)
