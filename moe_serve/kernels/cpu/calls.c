/* A list of calls of kernels, run as one: a step of a hundred kernels is then a single call from Python. */
#include "vec.h"

enum { CALL_ARGUMENTS = 12 };

/* Every kernel takes integers of 64 bits, so one type serves them all: a kernel does not look at arguments behind
   those that it declares. */
typedef i64 (*Kernel)(i64, i64, i64, i64, i64, i64, i64, i64, i64, i64, i64, i64);

typedef struct { /* as tape.py fills it */
    Kernel kernel;
    i64 changing; /* bit j: argument j is a place in the inputs of the run */
    i64 part; /* of the step, as the clock counts them */
    i64 a[CALL_ARGUMENTS];
} Call;

/* Returns how many calls were made: the first one that fails is the last. clock: see part_clock.c */
i64 run_calls(const Call *calls, i64 num_calls, const i64 *inputs, i64 clock)
{
    for (i64 i = 0; i < num_calls; i++) {
        i64 a[CALL_ARGUMENTS];
        for (int j = 0; j < CALL_ARGUMENTS; j++)
            a[j] = calls[i].changing >> j & 1 ? inputs[calls[i].a[j]] : calls[i].a[j];
        turn_part(clock, calls[i].part);
        if (calls[i].kernel(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9], a[10], a[11]) < 0) return i;
    }
    return num_calls;
}
