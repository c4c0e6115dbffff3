/* Which part of a step the main thread is in; see kernels/part_clock.py, which has the same words. */
#include <time.h>
#include "vec.h"

enum { CLOCK_PART, CLOCK_SINCE, CLOCK_TURNS_AT, CLOCK_NUM_TURNS, CLOCK_MOST_TURNS, CLOCK_SUMS };

/* Begins a part, where it is another one. */
i64 turn_part(i64 clock, i64 part)
{
    i64 *words = (i64 *)clock, before = words[CLOCK_PART], now_ns, number = words[CLOCK_NUM_TURNS];
    struct timespec now;
    if (before == part) return 0;
    clock_gettime(CLOCK_MONOTONIC, &now);
    now_ns = now.tv_sec * 1000000000LL + now.tv_nsec;
    words[CLOCK_SUMS + before] += now_ns - words[CLOCK_SINCE];
    words[CLOCK_SINCE] = now_ns, words[CLOCK_PART] = part;
    if (number < words[CLOCK_MOST_TURNS]) {
        i64 *turns = (i64 *)words[CLOCK_TURNS_AT];
        turns[2 * number] = now_ns, turns[2 * number + 1] = part;
        words[CLOCK_NUM_TURNS] = number + 1;
    }
    return 0;
}
