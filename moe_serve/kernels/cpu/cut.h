/* Which tokens of a row remain after top_k, top_p and min_p. All three keep the first tokens in order of likelihood
   (larger logit first, then lower id), so the answer is one logit and how many of its equals remain. It is found by
   histograms over the logits, each finer than the last, never by a sort. */
#pragma once
#include "gumbel.h"
#include <float.h>

enum { BINS = 2048, BIN_BITS = 11, WAITING = 256 };
#define LOWEST_KEY ((i32)0x807FFFFF) /* of -inf */

/* A row with a finite maximum. */
typedef struct {
    const float *logits;
    i64 vocab;
    float top, scale; /* scale: bins of the first histogram for a logit's distance of 1 from the maximum */
    double inverse;   /* 1 / temperature */
    float end[BLOCK + VL]; /* the logits behind the last whole register, then -inf, which every cut leaves out first */
} LogitRow;

/* Tokens with a larger key remain, and the first `ties` of the `equal` many that have this key. */
typedef struct {
    i32 key;
    i64 ties, equal;
} Cut;

/* An integer in the order of the floats; both zeros are 0. */
INLINE vi keys_of(vf logits)
{
    vi bits = (vi)(logits + 0.0f);
    return bits ^ ((bits >> 31) & 0x7FFFFFFF);
}

static float logit_of(i32 key)
{
    float logit;
    i32 bits = key ^ ((key >> 31) & 0x7FFFFFFF);
    memcpy(&logit, &bits, 4);
    return logit;
}

static LogitRow row_of(const float *logits, i64 vocab)
{
    LogitRow row = {.logits = logits, .vocab = vocab};
    i64 rest = vocab % VL;
    for (int i = 0; i < BLOCK + VL; i++) row.end[i] = i < rest ? logits[vocab - rest + i] : -__builtin_inff();
    return row;
}

/* Where VL logits from `id` on are; id is less than BLOCK behind the last one. */
INLINE const float *logits_at(const LogitRow *row, i64 id)
{
    return id + VL <= row->vocab ? row->logits + id : row->end + (id - (row->vocab - row->vocab % VL));
}

INLINE int any(vi mask)
{
#if defined(__AVX512F__)
    return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask) != 0;
#elif defined(__AVX2__)
    return _mm256_movemask_ps((__m256)mask) != 0;
#elif defined(__x86_64__)
    return _mm_movemask_ps((__m128)mask) != 0;
#else
    uint64_t words[2];
    memcpy(words, &mask, 16);
    return (words[0] | words[1]) != 0;
#endif
}

INLINE vf smaller(vf a, vf b) { return (vf)(((vi)a & (a < b)) | ((vi)b & ~(a < b))); }
INLINE vf larger(vf a, vf b) { return (vf)(((vi)a & (a > b)) | ((vi)b & ~(a > b))); }

/* The largest logit; -inf where there is none, or where any logit is NaN or +inf. */
static float finite_top(const LogitRow *row)
{
    vf top = (vf){} - __builtin_inff();
    vi sound = {};
    sound = ~sound;
    for (i64 id = 0; id < row->vocab; id += VL) {
        vf logits = *(const vf *)logits_at(row, id);
        sound &= logits <= FLT_MAX;
        top = larger(logits, top);
    }
    for (int lane = 1; lane < VL; lane++) top[0] = top[lane] > top[0] ? top[lane] : top[0];
    return any(~sound) ? -__builtin_inff() : top[0];
}

/* The bin of the first histogram: it grows with the distance from the maximum, and the last one has no end. */
INLINE vi bins_of(const LogitRow *row, vf logits)
{
    vf distance = ((vf){} + row->top - logits) * row->scale;
    return __builtin_convertvector(smaller(distance, (vf){} + (BINS - 1.0f)), vi);
}

INLINE double scaled(const LogitRow *row, float logit) { return ((double)logit - (double)row->top) * row->inverse; }

/* The weights of VL tokens. */
INLINE void weigh_tokens(const LogitRow *row, const float *logits, i64 weights[VL])
{
    for (int half = 0; half < 2; half++) {
        vd s = __builtin_convertvector(*(const vf_half *)(logits + half * LANES), vd);
        *(vq *)(weights + half * LANES) = weights_of((s - (double)row->top) * row->inverse);
    }
}

static i64 weight_of(const LogitRow *row, i32 key)
{
    float logits[VL];
    i64 weights[VL];
    for (int lane = 0; lane < VL; lane++) logits[lane] = logit_of(key);
    weigh_tokens(row, logits, weights);
    return weights[0];
}

/* A histogram of weights, of ones where tokens are counted. Additions wait in a list, since lanes are slow to take out
   of a register. The bins behind BINS take the lanes that are left out, one each. */
typedef struct {
    i64 bins[BINS + VL];
    i64 waiting, weights[WAITING];
    i32 places[WAITING];
} Histogram;

INLINE void add_waiting(Histogram *histogram, int counts)
{
    for (i64 i = 0; i < histogram->waiting; i++)
        histogram->bins[histogram->places[i]] += counts ? 1 : histogram->weights[i];
    histogram->waiting = 0;
}

/* Adds the VL tokens at `logits`, those of `mask`, to their bins. */
INLINE void add_tokens(Histogram *histogram, const LogitRow *row, const float *logits, vi mask, vi bin, int counts)
{
    vi spare;
    for (int lane = 0; lane < VL; lane++) spare[lane] = BINS + lane;
    *(vi *)(histogram->places + histogram->waiting) = (bin & mask) | (spare & ~mask);
    if (!counts) weigh_tokens(row, logits, histogram->weights + histogram->waiting);
    histogram->waiting += VL;
    if (histogram->waiting == WAITING) add_waiting(histogram, counts);
}

/* Fills the bins by distance from the maximum, with tokens of this key or a larger one; returns their weight. */
INLINE i64 fill_by_distance(Histogram *histogram, const LogitRow *row, i32 lowest, int counts)
{
    i64 total = 0;
    memset(histogram->bins, 0, sizeof histogram->bins);
    for (i64 id = 0; id < row->vocab; id += VL) {
        const float *logits = logits_at(row, id);
        vi mask = keys_of(*(const vf *)logits) >= lowest;
        if (any(mask)) add_tokens(histogram, row, logits, mask, bins_of(row, *(const vf *)logits), counts);
    }
    add_waiting(histogram, counts);
    for (int bin = 0; bin < BINS; bin++) total += histogram->bins[bin];
    return total;
}

/* Fills the bins by key, with tokens of keys from `lowest` to `highest`. */
INLINE void fill_by_key(Histogram *histogram, const LogitRow *row, i32 lowest, i32 highest, int shift, int counts)
{
    memset(histogram->bins, 0, sizeof histogram->bins);
    for (i64 id = 0; id < row->vocab; id += VL) {
        const float *logits = logits_at(row, id);
        vi keys = keys_of(*(const vf *)logits), mask = (keys >= lowest) & (keys <= highest);
        if (any(mask)) add_tokens(histogram, row, logits, mask, (vi)(((vu)keys - (uint32_t)lowest) >> shift), counts);
    }
    add_waiting(histogram, counts);
}

/* The lowest key from `low` to `high` whose logit is in this bin or a nearer one. */
static i32 lowest_in_bin(const LogitRow *row, int bin, i32 low, i32 high)
{
    while (low < high) {
        i32 middle = (i32)(((i64)low + high) >> 1);
        if (bins_of(row, (vf){} + logit_of(middle))[0] <= bin) high = middle;
        else low = middle + 1;
    }
    return low;
}

/* Returns the cut that keeps the fewest tokens whose weight is `limit` at least. histogram: by distance, of the tokens
   with the key `lowest` or a larger one, whose weight is `limit` at least */
INLINE Cut cut_at(Histogram *histogram, const LogitRow *row, i64 limit, i32 lowest, int counts)
{
    i64 above = 0, bin = 0, *bins = histogram->bins;
    i32 low, high = keys_of((vf){} + row->top)[0];
    while (above + bins[bin] < limit) above += bins[bin++];
    low = lowest_in_bin(row, bin, lowest, high);
    if (bin) high = lowest_in_bin(row, bin - 1, lowest, high) - 1;
    while (low < high) {
        uint32_t span = (uint32_t)high - (uint32_t)low;
        int bits = 32 - __builtin_clz(span), shift = bits > BIN_BITS ? bits - BIN_BITS : 0;
        fill_by_key(histogram, row, low, high, shift, counts);
        bin = span >> shift;
        while (above + bins[bin] < limit) above += bins[bin--];
        i64 first = low + (bin << shift), last = first + (1ll << shift) - 1;
        low = (i32)first;
        if (last < high) high = (i32)last;
    }
    i64 weight = counts ? 1 : weight_of(row, low);
    return (Cut){low, (limit - above + weight - 1) / weight, bins[bin] / weight};
}

/* Returns top_p's share of a sum of weights, at least 1: a token remains if the likelier ones weigh less than it. */
static i64 share_of(i64 total, double top_p)
{
    double share = top_p * (double)total;
    i64 limit = (i64)share;
    limit += (double)limit < share;
    return limit < total ? limit : total;
}

/* Returns the lowest key whose scaled logit is `least` or more. */
static i32 lowest_at_least(const LogitRow *row, double least)
{
    i32 low = LOWEST_KEY, high = keys_of((vf){} + row->top)[0];
    while (low < high) {
        i32 middle = (i32)(((i64)low + high) >> 1);
        if (scaled(row, logit_of(middle)) >= least) high = middle;
        else low = middle + 1;
    }
    return low;
}

/* Returns what top_k leaves, then top_p of that, then min_p of that. */
static Cut find_cut(const LogitRow *row, i64 top_k, double top_p, double min_p)
{
    Histogram histogram;
    histogram.waiting = 0;
    Cut cut = {LOWEST_KEY, row->vocab, row->vocab};
    if (top_k > 0 && top_k < row->vocab) {
        fill_by_distance(&histogram, row, LOWEST_KEY, 1);
        cut = cut_at(&histogram, row, top_k, LOWEST_KEY, 1);
    }
    if (top_p < 1.0) {
        i64 total = fill_by_distance(&histogram, row, cut.key, 0);
        if (cut.ties < cut.equal) total -= (cut.equal - cut.ties) * weight_of(row, cut.key);
        cut = cut_at(&histogram, row, share_of(total, top_p), cut.key, 0);
    }
    i32 least = min_p > 0 ? lowest_at_least(row, log_of(min_p)) : LOWEST_KEY;
    return least > cut.key ? (Cut){least, row->vocab, row->vocab} : cut;
}
