"""The cases that are measured, each a problem that somebody computes, and how they are chosen."""

from __future__ import annotations

from bench.caches import STORAGE, Cached, CacheUse
from bench.kinds import Attention, Beside, Case, Product, Softmax
from bench.masks import Masked
from bench.steps import FeedForward, LayerNorm, Merge, RMSNorm, Rotary
from bench.weights import Stored

SETS = (
    "encoder", "causal", "decode", "cache", "gemm", "weights", "softmax", "options", "masks",
    "growth", "layer", "overhead",
)  # fmt: skip


def one_thread(case: Case) -> Case:
    """The case with our own call on one thread beside it."""
    return case.but(beside=(*case.beside, Beside("one thread", case.but(threads=1))))


def avx2(case: Case) -> Case:
    """The case with our own call by the avx2 backend beside it."""
    return case.but(beside=(*case.beside, Beside("avx2", case.but(backend="avx2"))))


def folded(case: Attention) -> Case:
    """A decode step of grouped heads, and torch given the heads of a group as rows of one head."""
    beside = Beside("torch, group as rows", case.but(fold=True), "torch")
    return case.but(beside=(*case.beside, beside))


def attention(name: str, sets: str, *shape: int, **fields: object) -> Attention:
    return Attention(name=name, sets=(sets,), shape=shape, **fields)  # type: ignore[arg-type]


BERT = attention("BERT, batch 8", "encoder", 8, 12, 12, 512, 512, 64)
ENCODER = attention("encoder 2k", "encoder", 1, 16, 16, 2048, 2048, 64, quick=True)
CAUSAL_1K = attention("causal 1k, GQA 4", "causal", 1, 32, 8, 1024, 1024, 128,
                      causal=True, quick=True)  # fmt: skip
CAUSAL_4K = attention("causal 4k", "causal", 1, 8, 8, 4096, 4096, 128, causal=True)
DECODE_32K = attention("decode 32k, GQA 4", "decode", 1, 32, 8, 1, 32768, 128, quick=True)

TABLE: tuple[Case, ...] = (
    attention("MiniLM, one sentence", "encoder", 1, 12, 12, 128, 128, 32, quick=True),
    one_thread(attention("MiniLM, batch 32", "encoder", 32, 12, 12, 128, 128, 32)),
    one_thread(BERT),
    attention("ViT", "encoder", 1, 12, 12, 197, 197, 64),
    avx2(one_thread(ENCODER)),
    attention("cross", "encoder", 1, 8, 8, 448, 1500, 64),
    one_thread(CAUSAL_1K),
    avx2(one_thread(CAUSAL_4K.but(beside=(Beside("not causal", CAUSAL_4K.but(causal=False)),)))),
    folded(attention("decode 4k, GQA 4", "decode", 1, 32, 8, 1, 4096, 128)),
    folded(DECODE_32K),
    folded(attention("decode batch 16, 1k, GQA 4", "decode", 16, 32, 8, 1, 1024, 128)),
    attention("decode 2k, no GQA", "decode", 1, 32, 32, 1, 2048, 128),
)

PRODUCTS = (
    (1, 384, 384), (16, 384, 1152), (128, 384, 384), (128, 384, 1152), (512, 768, 2304),
    (2048, 768, 768), (1, 4096, 4096), (1024, 1024, 1024), (2048, 4096, 4096),
)  # fmt: skip


def gemm() -> tuple[Case, ...]:
    rows: list[Case] = []
    for shape in PRODUCTS:
        for packed in (False, True):
            name = f"{'packed' if packed else 'matmul'} ({', '.join(map(str, shape))})"
            quick = shape == (128, 384, 1152)
            case = Product(
                name=name, sets=("gemm",), shape=shape, packed=packed, quick=quick,
                rivals=("NumPy", "torch", "ORT"),
            )  # fmt: skip
            rows.append(one_thread(case) if shape == (2048, 4096, 4096) else case)
    shape = (4096, 384, 1536)
    plain = Product(name=f"packed {shape}", shape=shape, packed=True)
    for name, residual in (("linear + gelu", False), ("linear + residual", True)):
        rows.append(
            FeedForward(name=f"{name} {shape}", sets=("gemm",), shape=shape, residual=residual,
                        rivals=("NumPy", "torch"), beside=(Beside("product alone", plain),))
        )  # fmt: skip
    return tuple(rows)


def weights() -> tuple[Case, ...]:
    rows: list[Case] = []
    for m, kind in ((1, "bfloat16"), (1, "float16"), (4, "bfloat16"), (128, "bfloat16")):
        case = Stored(name=f"weight {kind} ({m}, 4096, 4096)", sets=("weights",),
                      shape=(m, 4096, 4096), weight_dtype=kind, quick=not rows,
                      rivals=("NumPy",))  # fmt: skip
        rows.append(case.but(beside=(Beside("float32", case.but(weight_dtype="float32")),)))
    return tuple(rows)


def softmax() -> tuple[Case, ...]:
    return tuple(
        Softmax(
            name=f"softmax, rows of {columns}", sets=("softmax",), quick=columns == 1024,
            shape=(2**21 // columns, columns), rivals=("NumPy", "torch"),
        )
        for columns in (128, 1024, 8192)
    )  # fmt: skip


def options() -> tuple[Case, ...]:
    rows: list[Case] = []
    for d in (64, 128):
        rows.append(
            attention(f"window 1024 of 16k, D {d}", "options", 1, 8, 8, 16384, 16384, d,
                      causal=True, window=1024, rivals=("torch",), most_rounds=5)
        )  # fmt: skip
    masked = BERT.but(name="BERT, float mask", sets=("options",), mask=True, quick=True)
    rows.append(masked.but(beside=(Beside("no mask", BERT),)))
    rows.append(
        BERT.but(name="BERT, weights returned", sets=("options",), weights=True,
                 rivals=("NumPy", "torch"))
    )  # fmt: skip
    for dtype in ("float16", "bfloat16"):
        for case in (ENCODER, CAUSAL_1K, DECODE_32K):
            name = f"{case.name.split(',')[0]}, {dtype}"
            changed = case.but(
                name=name, sets=("options",), dtype=dtype, rivals=("torch",), quick=False
            )
            rows.append(changed.but(beside=(Beside("float32", case),)))
    return tuple(rows)


def masks() -> tuple[Case, ...]:
    """Masks that exclude tiles, and one that excludes none, beside the call without a mask."""
    rows: list[Case] = []
    plain = attention("no mask 4k", "masks", 1, 8, 8, 4096, 4096, 64)
    for pattern in ("prefix", "local and global", "documents", "tree", "random"):
        case = Masked(name=f"{pattern} 4k", sets=("masks",), shape=plain.shape, pattern=pattern,
                      rivals=("NumPy", "torch"), quick=pattern == "documents")  # fmt: skip
        forms = ("float", "segments", "varlen") if pattern == "documents" else ()
        others = [Beside(form, case.but(form=form)) for form in forms]
        rows.append(case.but(beside=(Beside("no mask", plain), *others)))
    plain = attention("no mask 16k", "masks", 1, 4, 4, 16384, 16384, 64)
    case = Masked(name="block mask 16k", sets=("masks",), shape=plain.shape, pattern="blocks",
                  form="blocks", rivals=("torch",), most_rounds=3)  # fmt: skip
    others = [Beside("bool", case.but(form="bool")), Beside("no mask", plain)]
    return (*rows, case.but(beside=tuple(others)))


def growth() -> tuple[Case, ...]:
    return tuple(
        attention(f"growth, L {2**power}", "growth", 1, 8, 8, 2**power, 2**power, 64,
                  memory=True, quick=power in (9, 11), most_rounds=3 if power > 13 else 99)
        for power in range(9, 16)
    )  # fmt: skip


def overhead() -> tuple[Case, ...]:
    plain = attention("call overhead", "overhead", 1, 1, 1, 4, 4, 8, overhead=True, quick=True)
    return (
        plain,
        plain.but(name="call overhead, options", causal=True, scale=0.25, quick=False),
        Rotary(name="rotary of one position", sets=("overhead",), shape=(1, 8, 1, 64),
               overhead=True, rivals=("NumPy",)),
        Merge(name="merge 2 short parts", sets=("overhead",), shape=(2, 1, 8, 1, 64),
              overhead=True, rivals=("NumPy",)),
        *(CacheUse(name=name, sets=("overhead",), shape=(batch, 8, 64, 64), use=use, count=count)
          for name, batch, use, count in (
              ("append 1 short key", 1, "append", 1),
              ("append 1 short key, batch 16", 16, "append", 1),
              ("attend of one short query", 1, "attend", 0))),
    )  # fmt: skip


def layer() -> tuple[Case, ...]:
    """What a layer's step is made of, and the step: of one token at E = 64 and 512, 8 heads."""
    rotary = Rotary(name="rotary 2k", sets=("layer",), shape=(1, 32, 2048, 128), quick=True,
                    rivals=("NumPy",))  # fmt: skip
    merge = Merge(name="merge 8 parts", sets=("layer",), shape=(8, 1, 32, 2048, 128),
                  rivals=("NumPy",))  # fmt: skip
    norms = (
        kind(name=f"{kind.kind} (32768, 1024)", sets=("layer",), shape=(32768, 1024),
             rivals=("NumPy", "torch"))
        for kind in (LayerNorm, RMSNorm)
    )  # fmt: skip
    moving = (
        case.but(beside=(Beside("copy", case.but(copy=True)),)) for case in (rotary, merge, *norms)
    )
    steps = (
        CacheUse(name=f"layer's step, E {8 * d}", sets=("layer", "overhead"), shape=(1, 8, 64, d),
                 use="layer", count=1)
        for d in (8, 64)
    )  # fmt: skip
    return *moving, *steps


def caches() -> tuple[Case, ...]:
    rows: list[Case] = []
    for name, *shape in (
        ("4k, GQA 4", 1, 32, 8, 1, 4096, 128),
        ("32k, GQA 4", 1, 32, 8, 1, 32768, 128),
        ("batch 16, 1k, GQA 4", 16, 32, 8, 1, 1024, 128),
        ("2k, no GQA", 1, 32, 32, 1, 2048, 128),
        ("100k, GQA 4", 1, 32, 8, 1, 102400, 128),
    ):
        whole = Cached(
            name=f"cache {name}",
            sets=("cache",),
            shape=tuple(shape),  # type: ignore[arg-type]
            quick=shape[4] == 4096,
        )
        rows.append(whole if shape[4] < 100_000 else whole.but(rivals=()))
        for stored in list(STORAGE)[1:]:
            small = whole.but(name=f"{whole.name}, {stored}", stored=stored, rivals=(), quick=False)
            rows.append(small.but(beside=(Beside("float32", whole),)))
    for name, batch, keys, use, count in (
        ("append 1 key", 1, 4000, "append", 1),
        ("append 1 key, batch 16", 16, 1000, "append", 1),
        ("append 4096 keys", 1, 4096, "append", 4096),
        ("fork, 100k keys", 1, 100_000, "fork", 0),
        ("reorder, batch 4, 32k keys", 4, 32768, "reorder", 0),
    ):
        rows.append(
            CacheUse(name=name, sets=("cache",), shape=(batch, 8, keys, 128), use=use, count=count)
        )
    return tuple(rows)


CASES: tuple[Case, ...] = (
    *TABLE,
    *caches(),
    *gemm(),
    *weights(),
    *softmax(),
    *options(),
    *masks(),
    *growth(),
    *layer(),
    *overhead(),
)


def chosen(sets: str = "", text: str = "", quick: bool = False) -> tuple[Case, ...]:
    """The cases of the comma-separated sets (all by default) whose name holds the text."""
    names = [name.strip() for name in sets.split(",") if name.strip()] or list(SETS)
    unknown = [name for name in names if name not in SETS]
    if unknown:
        raise ValueError(f"--set is a list of {', '.join(SETS)}; got {unknown[0]!r}")
    return tuple(
        case
        for case in CASES
        if set(case.sets) & set(names) and text in case.name and (case.quick or not quick)
    )
