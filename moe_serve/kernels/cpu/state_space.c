/* The recurrence of Mamba-2's state-space layers (kernels/state_space.py). A piece is a head of a sequence, whose tokens
   come one after the other, so bits depend on the sequence alone. States lie in tiles of 32 columns, as in delta.c. */
#include "pool.h"
#include "sequences.h"

enum { STATE_TILE = 32, STATE_TOKENS = 16, STATE_REGISTERS = STATE_TILE / VL };

typedef struct { /* as operations.py fills it */
    i64 groups, heads, state_width, head_width;
    const float *decay, *step_bias, *skip; /* [heads] */
} StateSpaceFacts;

typedef struct {
    StateSpaceFacts a;
    Sequences seqs;
    const float *mixed;
    i64 mixed_step;
    const float *steps;
    i64 steps_step;
    float *states, *out;
} StateSpace;

/* One token of a tile: the state decays, takes the key times the value, and the query is asked. */
INLINE void advance_tile(float *state, i64 width, const float *q, const float *k, const float *v, float decay, float *o)
{
    vf asked[STATE_REGISTERS] = {}, value[STATE_REGISTERS], by = splat(decay);
    memcpy(value, v, sizeof value);
    for (i64 i = 0; i < width; i++) {
        float *row = state + i * STATE_TILE;
        vf key = splat(k[i]), query = splat(q[i]);
        UNROLL for (int j = 0; j < STATE_REGISTERS; j++) {
            vf next = multiply_add(key, value[j], by * *(const vf *)(row + VL * j));
            *(vf *)(row + VL * j) = next;
            asked[j] = multiply_add(query, next, asked[j]);
        }
    }
    memcpy(o, asked, sizeof asked);
}

/* `count` tokens of a head, at most STATE_TOKENS, from row `first` on. */
static void state_tokens(const StateSpace *job, i64 head, float *state, i64 first, i64 count)
{
    StateSpaceFacts a = job->a;
    i64 width = a.head_width, tiles = (width + STATE_TILE - 1) / STATE_TILE, padded = tiles * STATE_TILE;
    i64 inner = a.heads * width, step = job->mixed_step;
    const float *values = job->mixed + first * step + head * width;
    const float *keys = job->mixed + first * step + inner + head / (a.heads / a.groups) * a.state_width;
    const float *queries = keys + a.groups * a.state_width;
    float v[count * padded], o[STATE_TILE], decay[STATE_TOKENS];
    memset(v, 0, sizeof v);
    for (i64 t = 0; t < count; t++) {
        float by = softplus(job->steps[(first + t) * job->steps_step + head] + a.step_bias[head]);
        decay[t] = exp_vf(splat(a.decay[head] * by))[0];
        BY_REGISTER(width, put(v + t * padded + i, j, get(values + t * step + i, j, count) * by, count);)
    }
    for (i64 tile = 0; tile < tiles; tile++, state += a.state_width * STATE_TILE) {
        i64 at = tile * STATE_TILE, n = least(STATE_TILE, width - at);
        for (i64 t = 0; t < count; t++) {
            float *out = job->out + (first + t) * inner + head * width + at;
            const float *skipped = values + t * step + at;
            advance_tile(state, a.state_width, queries + t * step, keys + t * step, v + t * padded + at, decay[t], o);
            BY_REGISTER(n, vf given = multiply_add(splat(a.skip[head]), get(skipped + i, j, count), get(o + i, j, count));
                        put(out + i, j, given, count);)
        }
    }
}

static void state_space_piece(const void *about, i64 piece)
{
    const StateSpace *job = about;
    StateSpaceFacts a = job->a;
    i64 head = piece % a.heads, size = (a.head_width + STATE_TILE - 1) / STATE_TILE * a.state_width * STATE_TILE;
    Sequence s = sequence_of(&job->seqs, piece / a.heads);
    if (s.first == s.end) return;
    float *state = job->states + (s.to * a.heads + head) * size;
    if (s.from < 0) memset(state, 0, size * 4);
    else if (s.from != s.to) memcpy(state, job->states + (s.from * a.heads + head) * size, size * 4);
    while (s.first < s.end) {
        i64 count = rows_at_once(&s, s.first, STATE_TOKENS);
        state_tokens(job, head, state, s.first, count);
        s.first += count;
        if (s.first == s.copied) {
            memcpy(job->states + (s.copy * a.heads + head) * size, state, size * 4);
            next_copy(&s);
        }
    }
}

/* mixed [tokens of all sequences, mixed_step], steps [tokens, steps_step] -> out [tokens, heads * head_width].
   states: [slots, heads, tiles, state_width, 32], read and written as the sequences say. */
i64 state_space(const StateSpaceFacts *facts, const Sequences *seqs, const float *mixed, i64 mixed_step,
                const float *steps, i64 steps_step, float *states, float *out)
{
    StateSpace job = {*facts, *seqs, mixed, mixed_step, steps, steps_step, states, out};
    pool_run(state_space_piece, &job, seqs->num_seqs * facts->heads);
    return 0;
}
