/* The sequences of a step, whose states lie in slots (kernels/sequence_states.py). */
#pragma once
#include <math.h>
#include "vec.h"

typedef struct { /* as SequenceStates fills it */
    i64 num_seqs;
    const i32 *starts; /* [num_seqs + 1] */
    const i64 *slots;  /* [num_seqs, 4]: from, to, tokens before a copy is kept, slot of the copy */
} Sequences;

/* A sequence's rows, and its slots; copied: the row in front of which its state is copied, -1: it is not */
typedef struct { i64 first, end, from, to, copied, copy; } Sequence;

INLINE Sequence sequence_of(const Sequences *seqs, i64 seq)
{
    const i64 *slots = seqs->slots + 4 * seq;
    i64 first = seqs->starts[seq];
    return (Sequence){first, seqs->starts[seq + 1], slots[0], slots[1], slots[2] > 0 ? first + slots[2] : -1, slots[3]};
}

/* Returns how many rows from `first` on, at most `most`, are up to the end and in front of a copy of the state. */
INLINE i64 rows_at_once(const Sequence *s, i64 first, i64 most)
{
    return least(most, (s->copied > first && s->copied < s->end ? s->copied : s->end) - first);
}

INLINE float softplus(float x) { return x > 20 ? x : (float)log(1.0 + (double)exp_vf(splat(x))[0]); }
