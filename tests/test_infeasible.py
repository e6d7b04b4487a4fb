"""Sizes of which no machine computes a result: an error at once, before any integer wraps.

Broadcast arrays, and those with an axis of length 0, take no memory that would limit them.
"""

import numpy as np
import pytest

import qkv_ext
from qkv_ext import KVCache

F32 = np.float32


def broadcast(*shape):
    return np.broadcast_to(F32(0), shape)


def nothing(*shape):
    return np.zeros(shape, F32)


def attend(q, k, v, **options):
    return lambda **rest: qkv_ext.scaled_dot_product_attention(q, k, v, **options, **rest)


CALLS = {
    "tasks beyond 2**64": attend(nothing(2**20, 1, 1, 1), *[broadcast(1, 1, 2**54, 1)] * 2),
    "years": attend(nothing(2**20, 1, 1, 1), *[broadcast(1, 1, 2**46, 1)] * 2),
    "years of lengths": attend(nothing(2**20, 1, 1, 1), *[broadcast(2**20, 1, 2**27, 2**10)] * 2,
                               kv_lengths=np.full(2**20, 2**27)),
    "L": attend(nothing(1, 1, 2**60, 0), nothing(1, 1, 1, 0), nothing(1, 1, 1, 0), scale=1.0),
    "S": attend(nothing(1, 1, 1, 0), *[nothing(1, 1, 2**60, 0)] * 2, scale=1.0),
    "B": attend(*[nothing(2**60, 1, 1, 0)] * 3, scale=1.0),
    "B, L = 0": attend(nothing(2**50, 1, 0, 4), *[nothing(1, 1, 1, 4)] * 2),
    "rank 2": attend(nothing(2**60, 0), nothing(1, 0), nothing(1, 0), scale=1.0),
    "varlen": lambda **rest: qkv_ext.varlen_attention(
        *[broadcast(2**33, 1, 1)] * 3, [0, 2**33], [0, 2**33], **rest),
    "matmul, M": lambda **rest: qkv_ext.matmul(nothing(2**50, 0), nothing(0, 0), **rest),
    "matmul, N": lambda **rest: qkv_ext.matmul(nothing(0, 0), nothing(0, 2**50), **rest),
    "matmul, K": lambda **rest: qkv_ext.matmul(
        broadcast(2**20, 2**45), broadcast(2**45, 4), **rest),
    "linear": lambda **rest: qkv_ext.linear_projection(nothing(2**50, 0), nothing(0, 3), **rest),
    "residual": lambda **rest: qkv_ext.linear_projection(
        nothing(2**50, 0), nothing(0, 3), residual=broadcast(2**50, 3), **rest),
    "softmax": lambda **rest: qkv_ext.softmax(nothing(2**60, 0), **rest),
    "softmax, axis": lambda **rest: qkv_ext.softmax(nothing(2**40, 0), axis=0, **rest),
    "merge": lambda **rest: qkv_ext.merge_attention(
        [nothing(1, 2**60, 0)], [broadcast(1, 2**60)], **rest),
    "layer_norm": lambda **rest: qkv_ext.layer_norm(nothing(2**60, 0), nothing(0), **rest),
    "rotary": lambda **rest: qkv_ext.apply_rotary(
        nothing(1, 2**60, 0), *[broadcast(2**60, 0)] * 2, **rest),
    "pack": lambda backend: qkv_ext.pack_weight(nothing(0, 2**50)),
    "cache": lambda backend: KVCache(1, 0, 8).append(*[nothing(1, 0, 2**50, 8)] * 2),
}  # fmt: skip


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_at_once(call, backend):
    with pytest.raises((ValueError, MemoryError)):
        call(backend=backend)


def test_what_is_left_out_does_not_count(backend):
    q, keys = np.ones((1, 1, 1, 1), F32), broadcast(1, 1, 2**40, 1)
    output = qkv_ext.scaled_dot_product_attention(q, keys, keys, kv_lengths=[5], backend=backend)
    assert output.shape == (1, 1, 1, 1)
