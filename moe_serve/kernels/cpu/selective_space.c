/* The recurrence of Mamba's first state-space layers (kernels/selective_space.py). A piece is a tile of 32 channels of a
   sequence, whose tokens come one after the other, so bits depend on the sequence alone. */
#include "pool.h"
#include "sequences.h"

enum { CHANNEL_TILE = 32, CHANNEL_REGISTERS = CHANNEL_TILE / VL };

typedef struct { /* as operations.py fills it */
    i64 inner, state_width;
    const float *decay;            /* [tiles, state_width, 32] */
    const float *step_bias, *skip; /* [inner] */
} SelectiveFacts;

typedef struct { /* v, steps, gates: a number of each channel; shared: keys, then queries, [state_width], of all channels */
    const float *v;
    i64 v_step;
    const float *steps;
    i64 steps_step;
    const float *shared;
    i64 shared_step;
    const float *gates;
    i64 gates_step;
} SelectiveRows;

typedef struct {
    SelectiveFacts a;
    Sequences seqs;
    SelectiveRows rows;
    float *states, *out;
} Selective;

/* One token of `n` channels of a tile: states decay, take the key times the value, and the query is asked. */
static void selective_token(const Selective *job, i64 tile, float *state, i64 token)
{
    SelectiveFacts a = job->a;
    SelectiveRows r = job->rows;
    i64 at = tile * CHANNEL_TILE, n = least(CHANNEL_TILE, a.inner - at);
    const float *decay = a.decay + at * a.state_width, *values = r.v + token * r.v_step + at;
    const float *steps = r.steps + token * r.steps_step + at, *gates = r.gates + token * r.gates_step + at;
    const float *keys = r.shared + token * r.shared_step, *queries = keys + a.state_width;
    float padded[CHANNEL_TILE] = {}, o[CHANNEL_TILE];
    for (i64 i = 0; i < n; i++) padded[i] = softplus(steps[i] + a.step_bias[at + i]);
    vf by[CHANNEL_REGISTERS], value[CHANNEL_REGISTERS], asked[CHANNEL_REGISTERS] = {};
    UNROLL for (int j = 0; j < CHANNEL_REGISTERS; j++) {
        by[j] = *(const vf *)(padded + VL * j);
        value[j] = by[j] * get(values, j, n);
    }
    for (i64 i = 0; i < a.state_width; i++) {
        vf key = splat(keys[i]), query = splat(queries[i]);
        UNROLL for (int j = 0; j < CHANNEL_REGISTERS; j++) {
            float *row = state + i * CHANNEL_TILE + VL * j;
            vf kept = exp_vf(*(const vf *)(decay + i * CHANNEL_TILE + VL * j) * by[j]) * *(const vf *)row;
            vf next = multiply_add(key, value[j], kept);
            *(vf *)row = next;
            asked[j] = multiply_add(query, next, asked[j]);
        }
    }
    memcpy(o, asked, sizeof o);
    float *out = job->out + token * a.inner + at;
    BY_REGISTER(n, vf gate = get(gates + i, j, count), by_skip = get(a.skip + at + i, j, count);
                vf given = multiply_add(by_skip, get(values + i, j, count), get(o + i, j, count));
                put(out + i, j, given * (gate / (1.0f + exp_vf(-gate))), count);)
}

static void selective_piece(const void *about, i64 piece)
{
    const Selective *job = about;
    i64 tiles = (job->a.inner + CHANNEL_TILE - 1) / CHANNEL_TILE, tile = piece % tiles;
    i64 size = job->a.state_width * CHANNEL_TILE;
    Sequence s = sequence_of(&job->seqs, piece / tiles);
    if (s.first == s.end) return;
    float *state = job->states + (s.to * tiles + tile) * size;
    if (s.from < 0) memset(state, 0, size * 4);
    else if (s.from != s.to) memcpy(state, job->states + (s.from * tiles + tile) * size, size * 4);
    while (s.first < s.end) {
        selective_token(job, tile, state, s.first++);
        if (s.first == s.copied) {
            memcpy(job->states + (s.copy * tiles + tile) * size, state, size * 4);
            next_copy(&s);
        }
    }
}

/* v, steps, gates [tokens of all sequences, inner], shared [tokens, 2 * state_width] -> out [tokens, inner].
   states: [slots, tiles, state_width, 32], read and written as the sequences say. */
i64 selective_space(const SelectiveFacts *facts, const Sequences *seqs, const float *v, i64 v_step, const float *steps,
                    i64 steps_step, const float *shared, i64 shared_step, const float *gates, i64 gates_step,
                    float *states, float *out)
{
    SelectiveRows rows = {v, v_step, steps, steps_step, shared, shared_step, gates, gates_step};
    Selective job = {*facts, *seqs, rows, states, out};
    pool_run(selective_piece, &job, seqs->num_seqs * ((facts->inner + CHANNEL_TILE - 1) / CHANNEL_TILE));
    return 0;
}
