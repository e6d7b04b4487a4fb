"""G12: subclasses stay what they are in copies and pickles; all objects take weak references."""

import copy
import gc
import pickle
import weakref

import numpy as np
import pytest

import qkv_ext
from qkv_ext import KVCache, MultiHeadAttention, PackedWeight
from qkv_ext import cache as cache_module
from qkv_ext import multihead as multihead_module


class NamedCache(KVCache):
    """Attributes in a __dict__, and an __init__ of another signature."""

    def __init__(self, name, *sizes, **options):
        super().__init__(*sizes, **options)
        self.name, self.notes, self.me = name, [name], self


class SlottedCache(KVCache):
    __slots__ = ("__private", "name", "unset")

    def __init__(self, name, *sizes, **options):
        super().__init__(*sizes, **options)
        self.name, self.__private = name, [name]

    @property
    def notes(self):
        return self.__private


class BothCache(SlottedCache):
    """Slots below, a __dict__ above."""

    def __init__(self, name, *sizes, **options):
        super().__init__(name, *sizes, **options)
        self.me = self


class StatefulCache(NamedCache):
    """A state of its own making, of which the keys and values are no part."""

    def __getstate__(self):
        return [self.name]

    def __setstate__(self, state):
        (self.name,) = state
        self.notes, self.me = [self.name], self


class CountingCache(NamedCache):
    """The usual way to leave an attribute out of a pickle."""

    def __getstate__(self):
        state = super().__getstate__()
        attributes = dict(state[0] if isinstance(state, tuple) else state)
        attributes["name"] += "'"
        return (attributes, state[1]) if isinstance(state, tuple) else attributes


class NamedLayer(MultiHeadAttention):
    def __init__(self, name, *weights, **options):
        super().__init__(*weights, **options)
        self.name, self.notes, self.me = name, [name], self


class SlottedLayer(MultiHeadAttention):
    __slots__ = ("name", "notes")

    def __init__(self, name, *weights, **options):
        super().__init__(*weights, **options)
        self.name, self.notes = name, [name]


class PlainLayer(MultiHeadAttention):
    pass


class NamedWeight(PackedWeight):
    pass


PICKLES = [lambda x, n=n: pickle.loads(pickle.dumps(x, n)) for n in range(6)]
COPIES = {"copy": copy.copy, "deepcopy": copy.deepcopy} | {
    f"pickle {n}": again for n, again in enumerate(PICKLES)
}
every_copy = pytest.mark.parametrize("again", COPIES.values(), ids=COPIES)
CACHES = [NamedCache, SlottedCache, BothCache, StatefulCache, CountingCache]


def filled(cls, rng, **options):
    cache = cls("first", 2, 2, 8, **options)
    x = rng.standard_normal((2, 2, 300, 8), np.float32)
    cache.append(x, x, lengths=[300, 7])
    return cache


@pytest.mark.parametrize("cls", CACHES)
@pytest.mark.parametrize("again", [KVCache.fork, *COPIES.values()], ids=["fork", *COPIES])
def test_caches(again, cls, rng):
    cache = filled(cls, rng)
    other = again(cache)
    assert type(other) is cls
    assert repr(other) == repr(cache)
    assert repr(cache).startswith(f"{cls.__name__}(batch=2, ")
    assert other.name == ("first'" if cls is CountingCache else "first")
    assert other.notes == ["first"]
    shallow = again in (KVCache.fork, copy.copy) and cls is not StatefulCache
    assert (other.notes is cache.notes) is shallow
    if hasattr(cache, "me"):
        assert other.me is (cache if shallow else other)
    assert not hasattr(other, "unset")
    for b in range(2):
        np.testing.assert_array_equal(other.keys(b), cache.keys(b))
    x = np.ones((2, 2, 1, 8), np.float32)
    other.append(x, x)
    assert (cache.lengths.tolist(), other.lengths.tolist()) == ([300, 7], [301, 8])
    assert other.attend(x).shape == x.shape


@pytest.mark.parametrize("again", [KVCache.fork, *COPIES.values()], ids=["fork", *COPIES])
def test_caches_without_attributes(again, rng):
    cache = KVCache(1, 2, 8, dtype="int8")
    cache.append(*rng.standard_normal((2, 1, 2, 5, 8), np.float32))
    other = again(cache)
    assert type(other) is KVCache
    np.testing.assert_array_equal(other.keys(0), cache.keys(0))
    assert not hasattr(other, "__dict__")


def test_copies_of_many(rng):
    """One object stays one, as Python's own containers have it."""
    cache = filled(NamedCache, rng)
    cache.notes.append(cache)
    for one, two in (copy.deepcopy([cache, cache]), pickle.loads(pickle.dumps([cache, cache]))):
        assert one is two is one.notes[1]
        assert one is not cache


def test_copies_that_a_subclass_makes(rng):
    class Named(NamedCache):
        def fork(self):
            other = super().fork()
            other.name = f"a fork of {self.name}"
            return other

    cache = filled(Named, rng)
    assert cache.fork().name == copy.copy(cache).name == "a fork of first"
    assert copy.deepcopy(cache).name == "first"

    class Rebuilt(NamedCache):
        def __reduce__(self):
            build, arguments, _ = super().__reduce__()
            return build, arguments, {"name": "rebuilt"}

    again = copy.deepcopy(filled(Rebuilt, rng))
    assert (type(again), again.__dict__) == (Rebuilt, {"name": "rebuilt"})


def layer_of(cls, rng):
    w = rng.standard_normal((4, 8, 8), np.float32)
    b = {"b_q": w[0, 0], "b_o": w[1, 0]}
    return cls(*([] if cls is PlainLayer else ["first"]), *w, **b, num_heads=4, num_kv_heads=4)


@pytest.mark.parametrize("cls", [NamedLayer, SlottedLayer, PlainLayer])
@every_copy
def test_layers(again, cls, rng):
    layer = layer_of(cls, rng)
    other = again(layer)
    assert type(other) is cls
    assert repr(other) == repr(layer)
    assert repr(layer).startswith(f"{cls.__name__}(d_in=8, ")
    x = rng.standard_normal((3, 5, 8), np.float32)
    np.testing.assert_array_equal(other(x), layer(x))
    if cls is not PlainLayer:
        assert (other.name, other.notes) == ("first", ["first"])
        assert (other.notes is layer.notes) is (again is copy.copy)
    if cls is NamedLayer:
        assert other.me is (layer if again is copy.copy else other)


@every_copy
def test_weights(again, rng):
    w = rng.standard_normal((8, 70), np.float32)
    weight = NamedWeight.from_matrix(w)
    weight.notes = ["a"]
    other = again(weight)
    assert type(other) is NamedWeight
    assert repr(other) == repr(weight) == "NamedWeight(shape=(8, 70), dtype=float32)"
    assert other.notes == ["a"]
    np.testing.assert_array_equal(other.panels, weight.panels)


def test_named_constructors_of_a_subclass(rng):
    w = rng.standard_normal((4, 8, 8), np.float32)
    fused = PlainLayer.from_fused(np.concatenate(w[:3], axis=1), w[3], num_heads=2)
    names = {f"{part}_proj.weight": x for part, x in zip("qkvo", w, strict=True)}
    assert type(fused) is type(PlainLayer.from_state_dict(names, "", 2)) is PlainLayer


MADE = {
    "layer": lambda rng: MultiHeadAttention(*np.ones((3, 8, 8), np.float32), num_heads=2),
    "weight": lambda rng: qkv_ext.pack_weight(np.ones((8, 8), np.float32)),
    "cache": lambda rng: KVCache(1, 1, 8),
    "subclass of a layer": lambda rng: layer_of(NamedLayer, rng),
    "subclass of a cache": lambda rng: filled(NamedCache, rng),
}


@pytest.mark.parametrize("make", MADE.values(), ids=MADE)
def test_weak_references(make, rng):
    x = make(rng)
    reference, seen = weakref.ref(x), weakref.WeakSet([x])
    assert reference() is x
    assert x in seen
    del x
    gc.collect()
    assert reference() is None
    assert not seen


def test_pickles_of_0_1_0(rng):
    """They name two functions that are kept for them."""
    cache = KVCache(1, 2, 8)
    cache.append(*rng.standard_normal((2, 1, 2, 5, 8), np.float32))
    _, state = cache.__reduce__()
    np.testing.assert_array_equal(cache_module._restored(*state).keys(0), cache.keys(0))
    layer = MultiHeadAttention(*rng.standard_normal((3, 8, 8), np.float32), num_heads=2)
    _, state = layer.__reduce__()
    assert repr(multihead_module._restored(*state)) == repr(layer)
