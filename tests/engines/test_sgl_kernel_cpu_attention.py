"""Attention of ``sgl-kernel-cpu`` against its definition in float64, one query and one head at a time."""

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sgl_kernel_cpu.attention import decode_attention_cpu, extend_attention_cpu

quick = settings(max_examples=60, deadline=None)

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2}


@dataclass(frozen=True, slots=True)
class Shape:
    heads: int
    key_heads: int
    width: int
    value_width: int
    scale: float
    cap: float
    sinks: bool
    dtype: torch.dtype

    def random_sinks(self):
        return torch.randn(self.heads, dtype=self.dtype) if self.sinks else None

    def check(self, out, expected):
        assert out.dtype == self.dtype
        tolerance = TOLERANCE[self.dtype]
        torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)


@st.composite
def shapes(draw, dtypes=(torch.float32, torch.bfloat16)):
    key_heads = draw(st.integers(1, 3))
    width = draw(st.integers(1, 6))
    return Shape(
        heads=key_heads * draw(st.integers(1, 3)),
        key_heads=key_heads,
        width=width,
        value_width=draw(st.sampled_from([width, 1, 5])),
        scale=draw(st.sampled_from([0.3, 1.0])),
        cap=draw(st.sampled_from([0.0, 0.0, 1.5])),
        sinks=draw(st.booleans()),
        dtype=draw(st.sampled_from(dtypes)),
    )


def definition(shape, q, keys, values, sinks):
    """``[H, V]`` of one query ``[H, D]`` over the keys it sees."""
    out = torch.zeros(shape.heads, values.shape[-1], dtype=torch.float64)
    for head in range(shape.heads):
        shared = head // (shape.heads // keys.shape[1])
        scores = []
        for key in keys[:, shared].double():
            score = shape.scale * sum((q[head].double() * key).tolist())
            scores.append(shape.cap * math.tanh(score / shape.cap) if shape.cap else score)
        total = sum(math.exp(score) for score in scores)
        if sinks is not None:
            total += math.exp(sinks[head].item())
        for score, value in zip(scores, values[:, shared].double(), strict=True):
            out[head] += math.exp(score) / total * value
    return out


@dataclass(frozen=True, slots=True)
class Batch:
    """Requests of some lengths in a shuffled cache, encoder tokens first in each row."""

    table: torch.Tensor
    rows: torch.Tensor
    lengths: list[int]
    encoder: list[int]
    slots: int

    def own(self, i):
        """Slots of the tokens of request i, in order, as a list."""
        row = self.table[self.rows[i]].tolist()
        return row[self.encoder[i] : self.encoder[i] + self.lengths[i]]

    def encoded(self, i):
        return self.table[self.rows[i]].tolist()[: self.encoder[i]]

    def encoder_lens(self):
        return torch.tensor(self.encoder) if any(self.encoder) else None


@st.composite
def batches(draw, encoder=False):
    lengths = draw(st.lists(st.integers(1, 7), min_size=1, max_size=3))
    before = [draw(st.integers(1, 3)) if encoder else 0 for _ in lengths]
    width = max(a + b for a, b in zip(lengths, before, strict=True)) + 1
    pool = len(lengths) + 1
    torch.manual_seed(draw(st.integers(0, 2**31)))
    table = torch.randperm(pool * width).int().view(pool, width)
    rows = torch.randperm(pool)[: len(lengths)]
    return Batch(table, rows, lengths, before, pool * width)


@quick
@given(shapes(), batches(), st.integers(0, 4), st.booleans())
def test_decode(shape, batch, window, given_):
    b, dtype = len(batch.lengths), shape.dtype
    k_cache = torch.randn(batch.slots, shape.key_heads, shape.width, dtype=dtype)
    v_cache = torch.randn(batch.slots, shape.key_heads, shape.value_width, dtype=dtype)
    q = torch.randn(b, shape.heads, shape.width, dtype=dtype)
    out = torch.full((b, shape.heads, shape.value_width), float("nan"), dtype=dtype)
    key = torch.randn(b, shape.key_heads, shape.width, dtype=dtype) if given_ else None
    value = torch.randn(b, shape.key_heads, shape.value_width, dtype=dtype) if given_ else None
    new = torch.tensor([batch.own(i)[-1] for i in range(b)])
    keys, values, sinks = k_cache.clone(), v_cache.clone(), shape.random_sinks()
    if given_:
        for i, slot in enumerate(new.tolist()):
            keys[slot], values[slot] = key[i], value[i]
    visible = [batch.own(i)[-window:] if window else batch.own(i) for i in range(b)]
    for cache in (k_cache, v_cache, keys, values):
        forget_all_but(cache, [slot for seen in visible for slot in seen])
    decode(shape, q, k_cache, v_cache, out, batch, window=window, sinks=sinks, new=(key, value, new))
    assert torch.equal(k_cache.nan_to_num(9.0), keys.nan_to_num(9.0))
    assert torch.equal(v_cache.nan_to_num(9.0), values.nan_to_num(9.0))
    for i, seen in enumerate(visible):
        shape.check(out[i], definition(shape, q[i], keys[seen], values[seen], sinks))


def forget_all_but(cache, slots):
    """What no query sees may be anything, also outside a window: its slots may be another's by now."""
    gone = torch.ones(len(cache), dtype=torch.bool)
    gone[slots] = False
    cache[gone] = float("nan")


def decode(shape, q, k, v, out, batch, *, scales=(1.0, 1.0), cross=False, window=0, sinks=None, new=None):
    key, value, loc = new or (None, None, torch.zeros(len(q), dtype=torch.int64))
    decode_attention_cpu(
        *(q, k, v, *scales, out, key, value, loc, torch.empty(0)),
        *(batch.table, batch.rows, torch.tensor(batch.lengths), shape.scale, shape.cap),
        *(cross, window, batch.encoder_lens(), sinks),
    )


@quick
@given(shapes(), batches(encoder=True), st.booleans())
def test_decode_beside_an_encoder(shape, batch, cross):
    b = len(batch.lengths)
    k = torch.randn(batch.slots, shape.key_heads, shape.width, dtype=shape.dtype)
    v = torch.randn(batch.slots, shape.key_heads, shape.value_width, dtype=shape.dtype)
    q = torch.randn(b, shape.heads, shape.width, dtype=shape.dtype)
    out = torch.empty(b, shape.heads, shape.value_width, dtype=shape.dtype)
    decode(shape, q, k, v, out, batch, cross=cross)
    for i in range(b):
        seen = batch.encoded(i) if cross else batch.own(i)
        shape.check(out[i], definition(shape, q[i], k[seen], v[seen], None))


@quick
@given(shapes(dtypes=(torch.float32,)), batches())
def test_a_float8_cache_is_scaled(shape, batch):
    b = len(batch.lengths)
    k = torch.randn(batch.slots, shape.key_heads, shape.width).to(torch.float8_e4m3fn)
    v = torch.randn(batch.slots, shape.key_heads, shape.value_width).to(torch.float8_e4m3fn)
    q = torch.randn(b, shape.heads, shape.width)
    out = torch.empty(b, shape.heads, shape.value_width)
    decode(shape, q, k, v, out, batch, scales=(0.5, 3.0))
    for i in range(b):
        seen = batch.own(i)
        keys, values = k.double()[seen] * 0.5, v.double()[seen] * 3.0
        shape.check(out[i], definition(shape, q[i], keys, values, None))


@quick
@given(st.integers(1, 4), st.integers(1, 6), st.integers(0, 3), batches())
def test_latents_are_their_own_values(heads, rank, rotary, batch):
    """MLA: one key head, whose first ``rank`` columns are the values, in one memory."""
    shape = Shape(heads, 1, rank + rotary, rank, 0.3, 0.0, False, torch.float32)
    b = len(batch.lengths)
    k = torch.randn(batch.slots, 1, rank + rotary)
    v = k[..., :rank]
    key = torch.randn(b, 1, rank + rotary)
    new = torch.tensor([batch.own(i)[-1] for i in range(b)])
    expected = k.clone()
    expected[new] = key
    q, out = torch.randn(b, heads, rank + rotary), torch.empty(b, heads, rank)
    decode(shape, q, k, v, out, batch, new=(key, key[..., :rank], new))
    assert torch.equal(k, expected)
    for i in range(b):
        seen = batch.own(i)
        shape.check(out[i], definition(shape, q[i], expected[seen], expected[seen][..., :rank], None))

    news = [max(1, length // 2) for length in batch.lengths]
    slots = [slot for i, n in enumerate(news) for slot in batch.own(i)[-n:]]
    q, out = torch.randn(len(slots), heads, rank + rotary), torch.empty(len(slots), heads, rank)
    extend(shape, q, k[slots], v[slots], out, k, v, batch, news)
    check_extended(shape, q, out, k, v, batch, news, causal)


def extend(shape, q, key, value, out, k, v, batch, news, *, scales=(1.0, 1.0), **options):
    starts = [sum(news[:i]) for i in range(len(news))]
    extend_attention_cpu(
        *(q, key, value, out, k, v, *scales, batch.table, batch.rows, torch.tensor(batch.lengths)),
        *(torch.tensor(news), torch.tensor(starts), max(news), shape.scale, shape.cap),
        encoder_lens=batch.encoder_lens(),
        **options,
    )


def causal(i, query, key):
    """Position ``query`` of request i sees position ``key``."""
    return key <= query


def check_extended(shape, q, out, k, v, batch, news, sees, sinks=None):
    """Every new token against the definition; ``sees(request, query position, key position)``."""
    row = 0
    for i, (length, new) in enumerate(zip(batch.lengths, news, strict=True)):
        for query in range(length - new, length):
            seen = [slot for key, slot in enumerate(batch.own(i)) if sees(i, query, key)]
            shape.check(out[row], definition(shape, q[row], k[seen], v[seen], sinks))
            row += 1


@st.composite
def extensions(draw, encoder=False):
    """A shape, a batch, how many tokens of each request are new, and what goes in and out."""
    shape, batch = draw(shapes()), draw(batches(encoder))
    news = [draw(st.sampled_from([length, draw(st.integers(0, length))])) for length in batch.lengths]
    if not any(news):
        news[0] = 1
    k = torch.randn(batch.slots, shape.key_heads, shape.width, dtype=shape.dtype)
    v = torch.randn(batch.slots, shape.key_heads, shape.value_width, dtype=shape.dtype)
    q = torch.randn(sum(news), shape.heads, shape.width, dtype=shape.dtype)
    out = torch.full((sum(news), shape.heads, shape.value_width), float("nan"), dtype=shape.dtype)
    return shape, batch, news, k, v, q, out


@quick
@given(extensions(), st.integers(0, 4), st.booleans(), st.booleans())
def test_extend(case, window, is_causal, given_):
    shape, batch, news, k, v, q, out = case
    slots = [slot for i, n in enumerate(news) for slot in batch.own(i)[len(batch.own(i)) - n :]]
    key, value = (k[slots], v[slots]) if given_ else (None, None)
    sinks = shape.random_sinks()

    def sees(i, query, position):
        return not is_causal or (position <= query and not 0 < window <= query - position)

    visible = {
        batch.own(i)[position]
        for i, (length, new) in enumerate(zip(batch.lengths, news, strict=True))
        for query in range(length - new, length)
        for position in range(length)
        if sees(i, query, position)
    }
    for cache in (k, v):
        forget_all_but(cache, list(visible))
    extend(
        *(shape, q, key, value, out, k, v, batch, news),
        sliding_window_size=window,
        is_causal=is_causal,
        sinks=sinks,
    )
    check_extended(shape, q, out, k, v, batch, news, sees, sinks)


@quick
@given(extensions())
def test_new_tokens_are_taken_as_given(case):
    """A cache that rounds (float8) does not touch the new tokens' own keys and values."""
    shape, batch, news, k, v, q, out = case
    slots = [slot for i, n in enumerate(news) for slot in batch.own(i)[len(batch.own(i)) - n :]]
    small, little = (k / 0.5).to(torch.float8_e4m3fn), (v / 2.0).to(torch.float8_e4m3fn)
    extend(shape, q, k[slots], v[slots], out, small, little, batch, news, scales=(0.5, 2.0))
    keys, values = small.to(shape.dtype) * 0.5, little.to(shape.dtype) * 2.0
    keys[slots], values[slots] = k[slots], v[slots]
    check_extended(shape, q, out, keys, values, batch, news, causal)


@quick
@given(extensions(), st.integers(0, 4), st.data())
def test_a_tree_decides_among_new_tokens(case, window, data):
    shape, batch, news, k, v, q, out = case
    trees = [torch.rand(n, n) < 0.5 for n in news]
    for tree in trees:
        tree.fill_diagonal_(True)
    mask = torch.cat([tree.flatten() for tree in trees])
    extend(shape, q, None, None, out, k, v, batch, news, tree_mask=mask, sliding_window_size=window)

    def sees(i, query, position):
        before = batch.lengths[i] - news[i]
        seen = position < before or bool(trees[i][query - before, position - before])
        return seen and not 0 < window <= query - position

    check_extended(shape, q, out, k, v, batch, news, sees)


@quick
@given(extensions(encoder=True), st.booleans())
def test_extend_beside_an_encoder(case, cross):
    shape, batch, news, k, v, q, out = case
    extend(shape, q, None, None, out, k, v, batch, news, is_cross_attn=cross)
    if not cross:
        return check_extended(shape, q, out, k, v, batch, news, causal)
    row = 0
    for i, new in enumerate(news):
        for _ in range(new):
            seen = batch.encoded(i)
            shape.check(out[row], definition(shape, q[row], k[seen], v[seen], None))
            row += 1
    return None


@quick
@given(st.integers(1, 4), batches())
def test_uncompressed_latent_attention_goes_by_what_is_given(heads, batch):
    """MLA without a prefix: keys and values of every head, and a cache of another shape."""
    shape = Shape(heads, heads, 5, 3, 0.3, 0.0, False, torch.float32)
    latents = torch.randn(batch.slots, 1, 9)
    k, v = torch.randn(batch.slots, heads, 5), torch.randn(batch.slots, heads, 3)
    slots = [slot for i in range(len(batch.lengths)) for slot in batch.own(i)]
    q, out = torch.randn(len(slots), heads, 5), torch.empty(len(slots), heads, 3)
    extend(shape, q, k[slots], v[slots], out, latents, latents[..., :7], batch, batch.lengths)
    check_extended(shape, q, out, k, v, batch, batch.lengths, causal)


def test_what_does_not_fit_is_refused():
    shape = Shape(2, 2, 5, 3, 0.3, 0.0, False, torch.float32)
    batch = Batch(torch.arange(4).view(1, 4).int(), torch.tensor([0]), [4], [0], 4)
    latents, q, out = torch.randn(4, 1, 9), torch.randn(2, 2, 5), torch.empty(2, 2, 3)
    with pytest.raises(ValueError, match=r"k_extend has shape \[2, 2, 5\] after a prefix of 2 tokens"):
        extend(shape, q, torch.randn(2, 2, 5), torch.randn(2, 2, 3), out, latents, latents, batch, [2])
    with pytest.raises(ValueError, match=r"tree_mask has 8 entries.*4 in all"):
        extend(shape, q, None, None, out, latents, latents, batch, [2], tree_mask=torch.ones(8))
