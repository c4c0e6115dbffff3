/* What is done to a row of logits before its token is drawn; kernels/sampling.py is its twin. Every operation is
   one float operation, rounded by itself: include this where contraction is off. */
#pragma once
#include "cut.h"

typedef struct { /* as EDIT of kernels/sampling.py */
    i64 token;
    float bias, repetition, frequency, presence;
} Edit;

typedef struct { /* of one row; mask: NULL = all tokens may be drawn, else a bit for each */
    const Edit *edits;
    i64 num_edits;
    const i64 *banned;
    i64 num_banned;
    const uint32_t *mask;
} LogitChanges;

static void apply_mask(float *logits, i64 vocab, const uint32_t *mask)
{
    const float none = -__builtin_inff();
    for (i64 word = 0; word * 32 < vocab; word++) {
        float *part = logits + word * 32;
        int size = (int)least(32, vocab - word * 32);
        if (mask[word] == 0) {
            for (int i = 0; i < size; i++) part[i] = none;
        } else if (mask[word] != 0xFFFFFFFF) {
            for (int i = 0; i < size; i++) part[i] = mask[word] >> i & 1 ? part[i] : none;
        }
    }
}

static void change_logits(float *logits, i64 vocab, const LogitChanges *changes)
{
    for (i64 i = 0; i < changes->num_edits; i++) {
        const Edit *edit = &changes->edits[i];
        float logit = logits[edit->token] + edit->bias;
        logit = logit > 0 ? logit / edit->repetition : logit * edit->repetition;
        logits[edit->token] = logit - edit->frequency - edit->presence;
    }
    for (i64 i = 0; i < changes->num_banned; i++) logits[changes->banned[i]] = -__builtin_inff();
    if (changes->mask) apply_mask(logits, vocab, changes->mask);
}

INLINE int has_changes(const LogitChanges *changes)
{
    return changes->num_edits || changes->num_banned || changes->mask;
}
