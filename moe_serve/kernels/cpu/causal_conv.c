/* A causal convolution over the tokens of each sequence, column by column (kernels/causal_conv.py). A piece is some
   columns of a sequence, whose tokens come one after the other, so bits depend on the sequence alone. */
#include "pool.h"
#include "sequences.h"

enum { CONV_PIECE = 64, CONV_TAPS = 16 };

typedef struct { /* as operations.py fills it */
    i64 channels, taps, first, before, after, silu; /* columns of a row: of the input, and of what multiplies; or -1 */
    const float *weight, *bias;                     /* [taps, channels], [channels] */
} ConvFacts;

typedef struct {
    ConvFacts a;
    Sequences seqs;
    const float *rows;
    i64 step;
    float *states, *out;
} Conv;

/* Columns at..at + 16 of a sequence, of which `count` exist. The rows before a token are in `window`, oldest first. */
INLINE void convolve_columns(const Conv *job, Sequence s, i64 at, const i64 count)
{
    ConvFacts a = job->a;
    i64 before = a.taps - 1, size = before * a.channels;
    vf window[CONV_TAPS][SPAN];
    for (i64 tap = 0; tap < before; tap++)
        UNROLL for (int j = 0; j < SPAN; j++)
            window[tap][j] = s.from < 0 ? (vf){} : get(job->states + s.from * size + tap * a.channels + at, j, count);
    for (i64 t = s.first; t < s.end; t++) {
        const float *row = job->rows + t * job->step;
        UNROLL for (int j = 0; j < SPAN; j++) {
            vf x = get(row + a.first + at, j, count), sum = get(a.bias + at, j, count);
            if (a.before >= 0) x = x * get(row + a.before + at, j, count);
            window[before][j] = x;
            for (i64 tap = 0; tap < a.taps; tap++)
                sum = multiply_add(get(a.weight + tap * a.channels + at, j, count), window[tap][j], sum);
            for (i64 tap = 0; tap < before; tap++) window[tap][j] = window[tap + 1][j];
            if (a.silu) sum = sum / (1.0f + exp_vf(-sum));
            if (a.after >= 0) sum = sum * get(row + a.after + at, j, count);
            put(job->out + t * a.channels + at, j, sum, count);
        }
        i64 slots[2] = {t + 1 == s.end ? s.to : -1, t + 1 == s.copied ? s.copy : -1};
        if (t + 1 == s.copied) next_copy(&s);
        for (int k = 0; k < 2; k++)
            if (slots[k] >= 0)
                for (i64 tap = 0; tap < before; tap++)
                    UNROLL for (int j = 0; j < SPAN; j++)
                        put(job->states + slots[k] * size + tap * a.channels + at, j, window[tap][j], count);
    }
}

static void conv_piece(const void *about, i64 piece)
{
    const Conv *job = about;
    i64 channels = job->a.channels, parts = (channels + CONV_PIECE - 1) / CONV_PIECE;
    Sequence s = sequence_of(&job->seqs, piece / parts);
    i64 at = piece % parts * CONV_PIECE, end = least(at + CONV_PIECE, channels);
    for (; at + 16 <= end; at += 16) convolve_columns(job, s, at, 16);
    if (at < end) convolve_columns(job, s, at, end - at);
}

/* rows [tokens of all sequences, step] -> out [tokens, channels]. states: [slots, taps - 1, channels], read and written
   as the sequences say. */
i64 causal_conv(const ConvFacts *facts, const Sequences *seqs, const float *rows, i64 step, float *states, float *out)
{
    Conv job = {*facts, *seqs, rows, step, states, out};
    pool_run(conv_piece, &job, seqs->num_seqs * ((facts->channels + CONV_PIECE - 1) / CONV_PIECE));
    return 0;
}
