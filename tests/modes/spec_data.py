"""Random layers and inputs on which the modes differ, and the matrix of the run-time rotation."""

from __future__ import annotations

import numpy as np

from qgate.modes.definition import Array, Weights


def hadamard_matrix(n: int) -> Array:
    """Orthonormal, for n = 2^k or 12 * 2^k; the factor of 12 is Paley's second with q = 5."""
    matrix: Array = np.ones((1, 1))
    if n % 12 == 0:
        residues = np.array([0, 1, -1, -1, 1])
        core = np.ones((6, 6)) - np.eye(6)
        core[1:, 1:] = [[residues[(i - j) % 5] for j in range(5)] for i in range(5)]
        one = np.eye(6)
        matrix = np.block([[core + one, core - one], [core - one, -core - one]])
    while matrix.shape[0] < n:
        matrix = np.kron(matrix, np.array([[1, 1], [1, -1]]))
    return np.asarray(matrix / np.sqrt(n), np.float32)


def random_layer(
    seed: int, M: int = 24, D: int = 48, N: int = 16, R: int = 4, K: int = 4
) -> Weights:
    """Weights of usual size; every eighth channel answers strongly to one hidden feature."""
    g = np.random.default_rng(seed)
    in_proj = g.normal(size=(2 * D, M)) / np.sqrt(M)
    in_proj[np.arange(0, D, 8), np.arange(0, D, 8) % M] += 1.5
    dt = np.exp(g.uniform(np.log(1e-3), np.log(0.1), D))
    weights = {
        "in_proj": in_proj,
        "conv_weight": g.normal(size=(D, K)) * 0.4 + np.array([0.0] * (K - 1) + [0.6]),
        "conv_bias": g.normal(size=D) * 0.1,
        "x_proj": g.normal(size=(R + 2 * N, D)) / np.sqrt(D) * np.where(np.arange(D) % 8, 1, 0.2),
        "dt_proj": g.normal(size=(D, R)) / np.sqrt(R),
        "dt_bias": np.log(np.expm1(dt)),
        "A_log": np.log(np.arange(1, N + 1)) + g.normal(size=(D, N)) * 0.05,
        "D": 1 + g.normal(size=D) * 0.1,
        "out_proj": g.normal(size=(M, D)) / np.sqrt(D),
    }
    return {name: values.astype(np.float32) for name, values in weights.items()}


def random_hidden(seed: int, B: int, L: int, M: int) -> Array:
    """A residual stream in which one token in fifty has one feature far above the others."""
    g = np.random.default_rng(seed)
    hidden = g.normal(size=(B, L, M))
    spikes = g.random((B, L)) < 0.02
    features = g.integers(0, M // 8, (B, L)) * 8
    b, t = np.nonzero(spikes)
    hidden[b, t, features[b, t]] += 30
    return hidden.astype(np.float32)
