/* The gated delta rule behind a short causal convolution (kernels/delta_rule.py). The tokens of a sequence come one
   after the other, and a column of a head's state depends on no other column, so bits depend on the sequence alone:
   not on chunks, other sequences or threads. A head's state lies in tiles of 32 columns, [tile, key_width, 32], each of
   which stays in the first-level cache while the tokens of a chunk go by. */
#include "pool.h"
#include "sequences.h"

enum { DELTA_TILE = 32, DELTA_TOKENS = 16, DELTA_PARTS = 6, DELTA_REGISTERS = DELTA_TILE / VL };

typedef struct { /* as DeltaWeights fills it */
    i64 key_heads, value_heads, key_width, value_width, taps;
    const i64 *columns; /* [value_heads, 6]: where queries, keys, values, gates, steps and strengths are in a row */
    const float *conv;  /* [taps, channels], of all queries, keys and values */
    const float *decay, *step_bias, *norm;
    i64 eps; /* the bits of a double */
    i64 by_channel; /* each key channel decays by itself: steps and gates have rows of their own, gates are not silu's */
    i64 bound;      /* by channel: the bits of a double, the least logarithm of a decay; 0: none */
} DeltaFacts;

typedef struct {
    DeltaFacts a;
    Sequences seqs;
    const float *rows;
    i64 step;
    const float *steps;
    i64 steps_step;
    const float *gates;
    i64 gates_step;
    float *conv, *recurrent, *out;
} Delta;

/* Copies a key head's part of a state from one slot to another; from -1: it becomes zero. */
static void copy_state(const Delta *job, i64 head, i64 from, i64 to)
{
    DeltaFacts a = job->a;
    i64 group = a.value_heads / a.key_heads, tiles = (a.value_width + DELTA_TILE - 1) / DELTA_TILE;
    i64 keys = a.key_heads * a.key_width, channels = 2 * keys + a.value_heads * a.value_width;
    i64 starts[3] = {head * a.key_width, keys + head * a.key_width, 2 * keys + head * group * a.value_width};
    i64 widths[3] = {a.key_width, a.key_width, group * a.value_width};
    for (i64 tap = 0; tap < a.taps - 1; tap++)
        for (int part = 0; part < 3; part++) {
            float *target = job->conv + (to * (a.taps - 1) + tap) * channels + starts[part];
            if (from < 0) memset(target, 0, widths[part] * 4);
            else memcpy(target, job->conv + (from * (a.taps - 1) + tap) * channels + starts[part], widths[part] * 4);
        }
    i64 size = group * tiles * a.key_width * DELTA_TILE;
    float *target = job->recurrent + (to * a.key_heads + head) * size;
    if (from < 0) memset(target, 0, size * 4);
    else memcpy(target, job->recurrent + (from * a.key_heads + head) * size, size * 4);
}

/* out[t] = silu(the sum over taps of conv[tap] * the row `taps - 1 - tap` tokens before t), for n channels of `count`
   tokens; the rows before the first token are in `before`, [taps - 1] rows `channels` apart, which then hold the last
   ones of these tokens. */
static void convolve(const float *rows, i64 step, i64 count, const float *conv, i64 taps, i64 channels, float *before,
                     i64 n, float *out, i64 out_step)
{
    for (i64 t = 0; t < count; t++)
        BY_REGISTER(n, vf sum = {};
                    for (i64 tap = 0; tap < taps; tap++) {
                        i64 ago = t + tap - (taps - 1);
                        const float *x = ago < 0 ? before + (t + tap) * channels : rows + ago * step;
                        sum = multiply_add(get(conv + tap * channels + i, j, count), get(x + i, j, count), sum);
                    }
                    put(out + t * out_step + i, j, sum / (1.0f + exp_vf(-sum)), count);)
    for (i64 tap = 0; tap < taps - 1; tap++) {
        i64 ago = count + tap - (taps - 1);
        memmove(before + tap * channels, ago < 0 ? before + (count + tap) * channels : rows + ago * step, n * 4);
    }
}

/* x becomes x / sqrt(its squares' sum + 1e-6) * scale */
INLINE void to_length(float *x, i64 n, float scale)
{
    vf sum[SPAN] = {};
    BY_REGISTER(n, vf v = get(x + i, j, count); sum[j] = multiply_add(v, v, sum[j]);)
    float by = 1 / sqrtf(sum16(sum) + 1e-6f) * scale;
    BY_REGISTER(n, put(x + i, j, get(x + i, j, count) * by, count);)
}

/* One token of a tile: the state decays, what it says of the key is moved towards the value, and the query is asked.
   decay: of the head, or of each channel, which is in `asks` already; asks: the key, by which the state is asked */
INLINE void update_tile(const int by_channel, float *state, i64 width, const float *q, const float *k,
                        const float *asks, const float *v, const float *decay, float strength, float *o)
{
    vf even[DELTA_REGISTERS] = {}, odd[DELTA_REGISTERS] = {}, change[DELTA_REGISTERS], asked[DELTA_REGISTERS] = {};
    const float *s = state;
    i64 i = 0;
    for (; i + 2 <= width; i += 2, s += 2 * DELTA_TILE) {
        vf first = splat(asks[i]), second = splat(asks[i + 1]);
        UNROLL for (int j = 0; j < DELTA_REGISTERS; j++) {
            even[j] = multiply_add(first, *(const vf *)(s + VL * j), even[j]);
            odd[j] = multiply_add(second, *(const vf *)(s + DELTA_TILE + VL * j), odd[j]);
        }
    }
    if (i < width)
        UNROLL for (int j = 0; j < DELTA_REGISTERS; j++)
            even[j] = multiply_add(splat(asks[i]), *(const vf *)(s + VL * j), even[j]);
    vf by = splat(by_channel ? 1 : decay[0]);
    UNROLL for (int j = 0; j < DELTA_REGISTERS; j++)
        change[j] = (*(const vf *)(v + VL * j) - by * (even[j] + odd[j])) * strength;
    for (i = 0; i < width; i++) {
        float *row = state + i * DELTA_TILE;
        vf key = splat(k[i]), query = splat(q[i]);
        if (by_channel) by = splat(decay[i]);
        UNROLL for (int j = 0; j < DELTA_REGISTERS; j++) {
            vf next = multiply_add(key, change[j], by * *(const vf *)(row + VL * j));
            *(vf *)(row + VL * j) = next;
            asked[j] = multiply_add(query, next, asked[j]);
        }
    }
    memcpy(o, asked, sizeof asked);
}

/* The decays of a token's channels, and its key times them. */
static void channel_decays(const Delta *job, i64 head, i64 row, const float *k, float *decay, float *asks)
{
    DeltaFacts a = job->a;
    const float *steps = job->steps + row * job->steps_step + head * a.key_width;
    const float *bias = a.step_bias + head * a.key_width, bound = as_float(a.bound);
    for (i64 i = 0; i < a.key_width; i++) decay[i] = a.bound ? steps[i] + bias[i] : softplus(steps[i] + bias[i]);
    BY_REGISTER(a.key_width, vf by = splat(a.decay[head]) * get(decay + i, j, count);
                if (a.bound) by = bound / (1.0f + exp_vf(by));
                by = exp_vf(by);
                put(decay + i, j, by, count);
                put(asks + i, j, by * get(k + i, j, count), count);)
}

/* `count` tokens, at most DELTA_TOKENS, of the value heads of a key head. */
static void delta_tokens(const Delta *job, i64 head, i64 slot, i64 first, i64 count)
{
    DeltaFacts a = job->a;
    i64 group = a.value_heads / a.key_heads, tiles = (a.value_width + DELTA_TILE - 1) / DELTA_TILE;
    i64 padded = tiles * DELTA_TILE, keys = a.key_heads * a.key_width;
    i64 channels = 2 * keys + a.value_heads * a.value_width;
    const float *rows = job->rows + first * job->step;
    float *before = job->conv + slot * (a.taps - 1) * channels, eps = as_float(a.eps);
    float q[count * a.key_width], k[count * a.key_width], v[count * padded], o[count * padded];
    i64 decays = a.by_channel ? a.key_width : 1;
    float decay[count * decays], asks[count * decays], strength[DELTA_TOKENS];
    const i64 *columns = a.columns + head * group * DELTA_PARTS;
    float *parts[2] = {q, k};
    for (int part = 0; part < 2; part++) {
        i64 channel = part * keys + head * a.key_width;
        convolve(rows + columns[part], job->step, count, a.conv + channel, a.taps, channels, before + channel,
                 a.key_width, parts[part], a.key_width);
        for (i64 t = 0; t < count; t++)
            to_length(parts[part] + t * a.key_width, a.key_width, part ? 1 : 1 / sqrtf((float)a.key_width));
    }
    for (i64 h = head * group; h < (head + 1) * group; h++, columns += DELTA_PARTS) {
        i64 channel = 2 * keys + h * a.value_width;
        memset(v, 0, sizeof v);
        convolve(rows + columns[2], job->step, count, a.conv + channel, a.taps, channels, before + channel,
                 a.value_width, v, padded);
        for (i64 t = 0; t < count; t++) {
            if (a.by_channel) {
                i64 at = t * a.key_width;
                channel_decays(job, h, first + t, k + at, decay + at, asks + at);
            } else {
                float x = rows[t * job->step + columns[4]] + a.step_bias[h];
                decay[t] = exp_vf(splat(a.decay[h] * softplus(x)))[0];
            }
            strength[t] = (1.0f / (1.0f + exp_vf(splat(-rows[t * job->step + columns[5]]))))[0];
        }
        for (i64 tile = 0; tile < tiles; tile++) {
            i64 at = tile * DELTA_TILE;
            float *state = job->recurrent + ((slot * a.value_heads + h) * tiles + tile) * a.key_width * DELTA_TILE;
            for (i64 t = 0; t < count; t++) {
                const float *asked = q + t * a.key_width, *key = k + t * a.key_width, *value = v + t * padded + at;
                float *to = o + t * padded + at, *by = decay + t * decays;
                if (a.by_channel)
                    update_tile(1, state, a.key_width, asked, key, asks + t * decays, value, by, strength[t], to);
                else update_tile(0, state, a.key_width, asked, key, key, value, by, strength[t], to);
            }
        }
        for (i64 t = 0; t < count; t++) {
            const float *gate = rows + t * job->step + columns[3], *x = o + t * padded;
            if (a.by_channel) gate = job->gates + (first + t) * job->gates_step + h * a.value_width;
            float *out = job->out + ((first + t) * a.value_heads + h) * a.value_width;
            float by = inverse_rms(x, a.value_width, eps);
            BY_REGISTER(a.value_width, vf z = get(gate + i, j, count); vf y = get(x + i, j, count) * by;
                        vf factor = (a.by_channel ? splat(1) : z) / (1.0f + exp_vf(-z));
                        put(out + i, j, y * get(a.norm + i, j, count) * factor, count);)
        }
    }
}

static void delta_piece(const void *about, i64 piece)
{
    const Delta *job = about;
    i64 head = piece % job->a.key_heads;
    Sequence s = sequence_of(&job->seqs, piece / job->a.key_heads);
    if (s.first == s.end) return;
    if (s.from != s.to) copy_state(job, head, s.from, s.to);
    while (s.first < s.end) {
        i64 count = rows_at_once(&s, s.first, DELTA_TOKENS);
        delta_tokens(job, head, s.to, s.first, count);
        s.first += count;
        if (s.first == s.copied) {
            copy_state(job, head, s.to, s.copy);
            next_copy(&s);
        }
    }
}

/* rows [tokens of all sequences, step] -> out [tokens, value_heads * value_width]. conv: [slots, taps - 1, channels],
   recurrent: [slots, value_heads, tiles, key_width, 32]; states are read and written as the sequences say.
   By channel: steps [tokens, key_heads * key_width] and gates, like out; else 0 */
i64 delta_rule(const DeltaFacts *facts, const Sequences *seqs, const float *rows, i64 step, const float *steps,
               i64 steps_step, const float *gates, i64 gates_step, float *conv, float *recurrent, float *out)
{
    Delta job = {*facts, *seqs, rows, step, steps, steps_step, gates, gates_step, conv, recurrent, out};
    pool_run(delta_piece, &job, seqs->num_seqs * facts->key_heads);
    return 0;
}
