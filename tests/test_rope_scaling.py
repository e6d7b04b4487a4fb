"""rotary_inv_freq: published configs, an oracle of single numbers, refusals, transformers."""

import math
import re

import numpy as np
import pytest
from rope_configs import CONFIGS, FREQUENCIES, PHI
from tolerance import assert_same_bits

import qkv_ext
from qkv_ext import rotary_inv_freq, rotary_tables

ORIGINAL = "original_max_position_embeddings"
every_config = pytest.mark.parametrize("name", CONFIGS)


def of(config):
    return rotary_inv_freq(config.dim, config.base, config.scaling, **config.options())


# ---- one frequency at a time, in float64 --------------------------------------------------------


def between(x, low, high):
    return min(max(x, low), high)


def oracle(dim, base, scaling, length=None, longest=None, original=None):
    """(frequencies, attention factor) by the papers, by wavelengths and turns."""
    kind = scaling.get("rope_type", scaling.get("type"))
    trained, s = scaling.get(ORIGINAL, original), scaling.get("factor")
    result, attention = [], 1.0
    s = longest / trained if s is None and longest else s
    for t in range(dim // 2):
        wavelength = 2 * math.pi * math.exp(math.log(base) * 2 * t / dim)
        plain = 2 * math.pi / wavelength
        if kind == "linear":
            f = plain / s
        elif kind == "dynamic":
            growth = s * max(length, longest) / longest - (s - 1)
            f = (base * growth ** (dim / (dim - 2))) ** (-2 * t / dim)
        elif kind == "llama3":
            low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
            if wavelength < trained / high:
                f = plain
            elif wavelength > trained / low:
                f = plain / s
            else:
                smooth = (trained / wavelength - low) / (high - low)
                f = (1 - smooth) * plain / s + smooth * plain
        elif kind == "yarn":
            ends = [
                dim * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(base))
                for turns in (scaling.get("beta_fast", 32), scaling.get("beta_slow", 1))
            ]
            if scaling.get("truncate", True):
                ends = [math.floor(ends[0]), math.ceil(ends[1])]
            first, last = max(ends[0], 0), min(ends[1], dim - 1)
            ramp = between((t - first) / (last - first or 0.001), 0, 1)
            f = plain / s * ramp + plain * (1 - ramp)
            one, other = (
                0.1 * m * math.log(s) + 1 if s > 1 else 1
                for m in (scaling.get("mscale", 1), scaling.get("mscale_all_dim", 0))
            )
            attention = scaling.get("attention_factor", one / other)
        else:
            key = "long_factor" if length > trained else "short_factor"
            f = plain / scaling[key][t]
            attention = scaling.get("attention_factor") or math.sqrt(
                1 + math.log(max(s, 1)) / math.log(trained)
            )
        result.append(f)
    return np.array(result), attention


YARN = {"rope_type": "yarn", "factor": 4.0, ORIGINAL: 2048}
ROWS = [  # dim, base, scaling, length, max_position_embeddings, original beside the mapping
    (64, 10000.0, {"rope_type": "linear", "factor": 4.0}, None, None, None),
    (2, 10000.0, {"type": "linear", "factor": 0.5}, None, None, None),
    (64, 10000.0, {"rope_type": "dynamic", "factor": 4.0}, 10000, 2048, None),
    (64, 10000.0, {"rope_type": "dynamic", "factor": 2}, 2048, 2048, None),
    (64, 10000.0, {"rope_type": "dynamic", "factor": 2}, 1, 2048, None),
    (4, 500.0, {"rope_type": "dynamic", "factor": 3.0}, 2049, 2048, None),
    (128, 1e6, YARN, None, None, None),
    (128, 1e6, {**YARN, "factor": 0.5}, None, None, None),
    (128, 1e6, {**YARN, "truncate": False, "beta_fast": 16, "beta_slow": 2}, None, None, None),
    (64, 1e4, {**YARN, "beta_fast": 3, "beta_slow": 3, "truncate": False}, None, None, None),
    (64, 1e4, {**YARN, "beta_fast": 1e4}, None, None, None),
    (64, 1e4, {**YARN, "mscale": 0.707, "mscale_all_dim": 1.0}, None, None, None),
    (64, 1e4, {**YARN, "attention_factor": 1.25}, None, None, None),
    (64, 1e4, {"type": "yarn"}, None, 8192, 2048),
    (8, 20.0, {**YARN, ORIGINAL: 100}, None, None, None),
    (4, 1e4, {"type": "longrope", "short_factor": [1, 2], "long_factor": [2.0, 8]}, 64, 256, 64),
    (4, 1e4, {"type": "longrope", "short_factor": [1, 2], "long_factor": [2.0, 8], "factor": 0.5,
              ORIGINAL: 64}, 65, None, None),
    (4, 1e4, {"type": "longrope", "short_factor": [1, 2], "long_factor": [2.0, 8],
              "attention_factor": 1.5}, 65, None, 64),
    *((c.dim, c.base, c.scaling, c.length, c.longest, c.original) for c in CONFIGS.values()),
]  # fmt: skip


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[2].get("rope_type", row[2].get("type")))
def test_oracle(row):
    dim, base, scaling, length, longest, original = row
    expected, attention = oracle(*row)
    inv_freq, attention_factor = rotary_inv_freq(
        dim, base, scaling, length=length, max_position_embeddings=longest,
        original_max_position_embeddings=original,
    )  # fmt: skip
    assert inv_freq.shape == (dim // 2,)
    assert inv_freq.dtype == np.float64
    np.testing.assert_allclose(inv_freq, expected, rtol=1e-12)
    assert type(attention_factor) is float
    assert attention_factor == pytest.approx(attention, rel=1e-14)


@every_config
def test_published(name):
    """transformers computes in float32."""
    attention, some = FREQUENCIES[name]
    inv_freq, attention_factor = of(CONFIGS[name])
    assert attention_factor == pytest.approx(attention, rel=1e-14)
    np.testing.assert_allclose(inv_freq[list(some)], list(some.values()), rtol=1e-6)


# ---- what a mapping says, and how ---------------------------------------------------------------


def test_no_scaling_is_the_default():
    expected = 10000.0 ** (np.arange(0, 64, 2) / -64)
    nothing = dict.fromkeys(("rope_type", "factor", "rope_theta"))
    for scaling in (None, {}, nothing, {"rope_type": "default"}, {"type": "default"}):
        inv_freq, attention_factor = rotary_inv_freq(64, None, scaling)
        assert_same_bits(inv_freq, expected)
        assert attention_factor == 1.0
    assert_same_bits(rotary_inv_freq(64, 5e5).inv_freq, 5e5 ** (np.arange(0, 64, 2) / -64))


@every_config
def test_both_spellings(name):
    """rope_scaling with what stands beside it, and rope_parameters that hold it all."""
    config = CONFIGS[name]
    expected = of(config)
    kind = config.scaling.get("rope_type", config.scaling.get("type"))
    whole = config.scaling | {"rope_type": kind, "type": kind, "rope_theta": config.base}
    whole |= {"partial_rotary_factor": 0.5, "attention_factor": None}
    if config.original:
        whole[ORIGINAL] = config.original
    options = {"length": config.length, "max_position_embeddings": config.longest}
    for base in (None, config.base):
        inv_freq, attention_factor = rotary_inv_freq(2 * config.dim, base, whole, **options)
        assert_same_bits(inv_freq, expected.inv_freq)
        assert attention_factor == expected.attention_factor


def test_a_config_is_not_changed():
    scaling = {**YARN, "attention_factor": None}
    before = dict(scaling)
    rotary_inv_freq(64, None, scaling)
    assert scaling == before


# ---- tables -------------------------------------------------------------------------------------


@every_config
def test_tables(name):
    config = CONFIGS[name]
    frequencies = of(config)
    angles = np.outer(np.arange(50) / 2, frequencies.inv_freq)
    tables = rotary_tables(50, config.dim, scale=2, **frequencies._asdict())
    for table, exact in zip(tables, (np.cos(angles), np.sin(angles)), strict=True):
        assert_same_bits(table, (exact * frequencies.attention_factor).astype(np.float32))


def test_tables_of_unscaled_frequencies():
    for actual, expected in zip(
        rotary_tables(300, 64, **rotary_inv_freq(64, 5e5)._asdict()),
        rotary_tables(300, 64, base=5e5),
        strict=True,
    ):
        assert_same_bits(actual, expected)


TABLES = [
    ({"inv_freq": [1.0]}, ValueError, "inv_freq has shape (1,); expected (2,), half of dim = 4"),
    ({"inv_freq": [1.0, np.nan]}, ValueError, "inv_freq holds nan; expected finite numbers"),
    ({"inv_freq": [True, False]}, TypeError, "inv_freq has dtype bool; expected real numbers"),
    ({"inv_freq": [1.0, 1.0], "base": 5e5}, ValueError,
     "base is 500000.0 and inv_freq is given; expected one of them"),
    ({"inv_freq": [1e300, 1.0], "scale": 1e-300}, ValueError,
     "inv_freq is given and scale 1e-300; expected angles below infinity"),
    ({"attention_factor": 0}, ValueError,
     "attention_factor is 0; expected a positive finite float32 number"),
    ({"attention_factor": 1e39}, ValueError,
     "attention_factor is 1e+39; expected a positive finite float32 number"),
    ({"attention_factor": None}, TypeError,
     "attention_factor is None; expected a positive number"),
]  # fmt: skip


@pytest.mark.parametrize(("options", "error", "message"), TABLES)
def test_tables_reject(options, error, message):
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        rotary_tables(3, 4, **options)


# ---- what is refused ----------------------------------------------------------------------------

KINDS = "'default' or 'linear' or 'dynamic' or 'llama3' or 'yarn' or 'longrope'"
EVERY = "rope_type, type, rope_theta, partial_rotary_factor"
LLAMA = CONFIGS["Llama 3.1 8B"].scaling
LONG = {"type": "longrope", "short_factor": [1, 1], "long_factor": [1, 1], ORIGINAL: 8}
LINEAR = {"type": "linear", "factor": 2}
DYNAMIC = {"type": "dynamic", "factor": 2}
REFUSED = [  # dim, scaling, options, the message
    (4, {"type": "su"}, {}, f"scaling['type'] is 'su'; expected {KINDS}"),
    (4, {"rope_type": "linear", "type": "yarn"}, {},
     "scaling['rope_type'] is 'linear' and scaling['type'] 'yarn'; expected one of them, or the "
     "same"),
    (4, {"factor": 2.0}, {},
     f"scaling holds 'factor', which rope_type 'default' does not have; expected {EVERY}"),
    (4, {**LINEAR, "alpha": 1}, {},
     f"scaling holds 'alpha', which rope_type 'linear' does not have; expected {EVERY}, factor"),
    (4, {1: 1}, {}, f"scaling holds 1, which rope_type 'default' does not have; expected {EVERY}"),
    (4, {"full_attention": {"rope_type": "default"}}, {},
     "scaling holds 'full_attention', which rope_type 'default' does not have; expected "
     "scaling['full_attention']"),
    *((4, {"type": kind}, {}, f"scaling has no 'factor', which rope_type {kind!r} needs")
      for kind in ("linear", "dynamic", "llama3")),
    *((4, {k: v for k, v in LLAMA.items() if k != key}, {},
       f"scaling has no {key!r}, which rope_type 'llama3' needs")
      for key in ("factor", "low_freq_factor", "high_freq_factor")),
    *((4, {k: v for k, v in s.items() if k != ORIGINAL}, {"length": 1},
       f"scaling has no {ORIGINAL!r}, which rope_type {kind!r} needs; expected it there or as "
       f"{ORIGINAL}=")
      for kind, s in (("llama3", LLAMA), ("yarn", YARN), ("longrope", LONG))),
    (4, {"type": "yarn", ORIGINAL: 8}, {},
     "scaling has no 'factor', which rope_type 'yarn' needs; expected it there or "
     f"max_position_embeddings=, which is over {ORIGINAL}"),
    *((4, {k: v for k, v in LONG.items() if k != key}, {"length": 1},
       f"scaling has no {key!r}, which rope_type 'longrope' needs")
      for key in ("short_factor", "long_factor")),
    (4, LONG, {}, "length is None; expected an integer for rope_type 'longrope'"),
    (4, DYNAMIC, {"max_position_embeddings": 8},
     "length is None; expected an integer for rope_type 'dynamic'"),
    (4, DYNAMIC, {"length": 8},
     "max_position_embeddings is None; expected an integer for rope_type 'dynamic'"),
    (2, DYNAMIC, {"length": 8, "max_position_embeddings": 8},
     "dim is 2; expected at least 4 for rope_type 'dynamic'"),
    (4, {**DYNAMIC, "factor": 1e308}, {"length": 800, "max_position_embeddings": 8},
     "scaling['factor'] is 1e+308; expected less for a length of 800"),
    (4, {**LINEAR, "factor": 0}, {},
     "scaling['factor'] is 0; expected a positive finite number"),
    (4, {**LLAMA, "low_freq_factor": 4}, {},
     "scaling['low_freq_factor'] is 4.0 and scaling['high_freq_factor'] 4.0; expected the first "
     "to be less than the second"),
    (4, {**YARN, "beta_fast": 1, "beta_slow": 2}, {},
     "scaling['beta_fast'] is 1.0 and scaling['beta_slow'] 2.0; expected the first not to be less "
     "than the second"),
    (64, {**YARN, ORIGINAL: 2}, {},
     f"{ORIGINAL} is 2, in which no frequency of base 10000.0 is turned between 1.0 and 32.0 "
     "times; expected another length for rope_type 'yarn'"),
    (4, {**YARN, "rope_theta": 1}, {}, "base is 1.0; expected more than 1 for rope_type 'yarn'"),
    (4, {**YARN, "mscale": 1}, {},
     "scaling holds 'mscale' without 'mscale_all_dim'; expected both or neither"),
    (4, {**YARN, "mscale_all_dim": 1}, {},
     "scaling holds 'mscale_all_dim' without 'mscale'; expected both or neither"),
    (4, {**YARN, "mscale": 0, "mscale_all_dim": 0}, {},
     "scaling['mscale'] is 0; expected a positive finite number"),
    (4, {**YARN, "attention_factor": -1.0}, {},
     "scaling['attention_factor'] is -1.0; expected a positive finite float32 number"),
    (8, LONG, {"length": 1},
     "scaling['short_factor'] has shape (2,); expected (4,), half of dim = 8"),
    (4, {**LONG, "long_factor": [1, 0]}, {"length": 1},
     "scaling['long_factor'] holds 0.0; expected positive finite numbers"),
    (4, {"rope_theta": 5e5}, {"base": 10000.0},
     "base is 10000.0 and scaling['rope_theta'] 500000.0; expected one of them, or the same"),
    (4, LONG, {"length": 1, ORIGINAL: 9},
     f"{ORIGINAL} is 9 and scaling[{ORIGINAL!r}] 8; expected one of them, or the same"),
    (4, {**YARN, ORIGINAL: 1}, {}, f"scaling[{ORIGINAL!r}] holds 1; expected 2 to {1 << 40}"),
    (7, None, {}, "dim is 7; expected an even number"),
    (6, {"partial_rotary_factor": 0.5}, {},
     "scaling['partial_rotary_factor'] is 0.5 and dim 6, so 3 elements are turned; expected an "
     "even number of them"),
    (6, {"partial_rotary_factor": 1.5}, {},
     "scaling['partial_rotary_factor'] is 1.5; expected at most 1"),
    (64, None, {"base": 5e-324},
     "base is 5e-324 and scaling None; expected what gives finite frequencies and a finite "
     "attention factor"),
]  # fmt: skip


@pytest.mark.parametrize(("dim", "scaling", "options", "message"), REFUSED)
def test_rejects(dim, scaling, options, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        rotary_inv_freq(dim, scaling=scaling, **options)


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        ("yarn", "scaling is 'yarn'; expected the rope_scaling or rope_parameters of a config, a "
         "mapping, or None"),
        ({"type": 1}, f"scaling['type'] is 1; expected {KINDS}"),
        ({**LINEAR, "factor": True}, "scaling['factor'] is True; expected a positive number"),
        ({**YARN, "truncate": 1}, "scaling['truncate'] is 1; expected True or False"),
        ({**YARN, ORIGINAL: 8.0}, f"scaling[{ORIGINAL!r}] has dtype float64; expected integers"),
    ],
)  # fmt: skip
def test_rejects_types(scaling, message):
    with pytest.raises(TypeError, match=f"^{re.escape(message)}"):
        rotary_inv_freq(4, scaling=scaling)


# ---- transformers -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def torch():
    pytest.importorskip("transformers")
    return pytest.importorskip("torch")


def llama_config(dim, base, scaling, longest, original):
    from transformers import LlamaConfig

    beside = {} if original is None else {ORIGINAL: original}
    return LlamaConfig(
        hidden_size=2 * dim, num_attention_heads=2, head_dim=dim, num_hidden_layers=1,
        max_position_embeddings=longest or 8192, rope_parameters=scaling | {"rope_theta": base},
        **beside,
    )  # fmt: skip


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[2].get("rope_type", row[2].get("type")))
def test_frequencies_of_transformers(row, torch):
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    dim, base, scaling, length, longest, original = row
    config = llama_config(dim, base, {"factor": None} | scaling, longest, original)
    kind = config.rope_parameters["rope_type"]
    options = {"length": length, "max_position_embeddings": longest, ORIGINAL: original}
    inv_freq, attention_factor = rotary_inv_freq(dim, base, scaling, **options)
    theirs, factor = ROPE_INIT_FUNCTIONS[kind](config, "cpu", seq_len=length)
    np.testing.assert_allclose(inv_freq, theirs.double().numpy(), rtol=2e-6, atol=0)
    assert np.abs(inv_freq - theirs.double().numpy()).max() < 1e-6
    assert attention_factor == pytest.approx(factor, rel=1e-12)


@every_config
def test_queries_of_transformers(name, backend, torch, rng):
    """From the config to what a layer turns; their angles are of float32."""
    from transformers.models.llama import modeling_llama as llama

    config = CONFIGS[name]
    n = 40 if config.length is None else config.length
    at = np.arange(n - 40, n)
    q, k = rng.standard_normal((2, 1, 2, 40, config.dim), np.float32)
    own = llama_config(config.dim, config.base, config.scaling, config.longest, config.original)
    cos, sin = llama.LlamaRotaryEmbedding(own)(torch.from_numpy(q), torch.from_numpy(at[None]))
    theirs = llama.apply_rotary_pos_emb(torch.from_numpy(q), torch.from_numpy(k), cos, sin)
    tables = rotary_tables(n, config.dim, **of(config)._asdict())
    for x, expected in zip((q, k), theirs, strict=True):
        y = qkv_ext.apply_rotary(x, *tables, positions=at, backend=backend)
        np.testing.assert_allclose(y, expected.numpy(), rtol=0, atol=1e-5 + 2e-6 * n)


def test_softmax_scale_of_deepseek(torch):
    """mscale_all_dim is in the scale of attention too, as the docstring has it."""
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

    scaling = CONFIGS["DeepSeek-V3"].scaling
    config = DeepseekV3Config(
        hidden_size=32, num_attention_heads=1, num_key_value_heads=1, q_lora_rank=8,
        kv_lora_rank=8, rope_parameters=scaling | {"rope_theta": 10000.0},
    )  # fmt: skip
    head_dim = config.qk_nope_head_dim + config.qk_rope_head_dim
    scale = (0.1 * scaling["mscale_all_dim"] * math.log(scaling["factor"]) + 1) ** 2
    attention = DeepseekV3Attention(config, 0)
    assert attention.scaling == pytest.approx(scale / math.sqrt(head_dim), rel=1e-12)


def test_tables_of_phi_need_the_length():
    """A sequence that outgrows the length of training has other frequencies."""
    short, long = (of(PHI._replace(length=n)).inv_freq for n in (4096, 4097))
    assert (long < short)[1:].all()
