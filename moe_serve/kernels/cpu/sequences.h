/* The sequences of a step, whose states lie in slots (kernels/sequence_states.py). */
#pragma once
#include <math.h>
#include "vec.h"

typedef struct { /* as SequenceStates fills it */
    i64 num_seqs;
    const i32 *starts; /* [num_seqs + 1] */
    const i64 *slots;  /* [num_seqs, width]: from, to, tokens before a copy is kept, slots of copies */
    i64 width;
} Sequences;

/* A sequence's rows, and its slots. copied: the row in front of which its state is copied next, to slot `copy`; -1: it is
   not; num_more: copies behind that, each a row later, to the slots `more` */
typedef struct { i64 first, end, from, to, copied, copy, num_more; const i64 *more; } Sequence;

INLINE Sequence sequence_of(const Sequences *seqs, i64 seq)
{
    const i64 *slots = seqs->slots + seqs->width * seq;
    i64 first = seqs->starts[seq], after = slots[2];
    Sequence s = {first, seqs->starts[seq + 1], slots[0], slots[1], -1, slots[3], after < 0 ? -after - 1 : 0, slots + 4};
    if (after) s.copied = first + (after > 0 ? after : 1);
    return s;
}

/* A copy was made. */
INLINE void next_copy(Sequence *s)
{
    if (s->num_more) {
        s->copied++;
        s->copy = *s->more++;
        s->num_more--;
    } else s->copied = -1;
}

/* Returns how many rows from `first` on, at most `most`, are up to the end and in front of a copy of the state. */
INLINE i64 rows_at_once(const Sequence *s, i64 first, i64 most)
{
    return least(most, (s->copied > first && s->copied < s->end ? s->copied : s->end) - first);
}

INLINE float softplus(float x) { return x > 20 ? x : (float)log(1.0 + (double)exp_vf(splat(x))[0]); }
