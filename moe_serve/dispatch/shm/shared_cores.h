/* Waits of ranks that share cores: the core is given away, and the own word says so (shared_cores.py). */

#pragma once
#include <sched.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

typedef int64_t i64;
enum { YIELD_NS = 2000000 }; /* then Python waits: it checks whether the peer lives */
#define WAITS 0x80000000u /* as in shared_cores.py */
extern int sched_getcpu(void); /* only declared for _GNU_SOURCE */

typedef struct {
    uint32_t *const *core_of; /* [R] the word of each rank */
    i64 num_ranks, rank;
} SharedCores;

static int flag_is(const i64 *flag, i64 wanted, int or_more)
{
    i64 seen = __atomic_load_n(flag, __ATOMIC_ACQUIRE);
    return or_more ? seen >= wanted : seen == wanted;
}

static i64 now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000ll + now.tv_nsec;
}

static uint32_t core_here(void) { return (uint32_t)sched_getcpu() + 1; }

/* Of two ranks on one core the second moves to a core without any. The system would leave them there: to it threads that
   yield are as busy as others. Afterwards this thread may run anywhere again. */
static void move_apart(const SharedCores *s)
{
    unsigned long allowed[16] = {0}, free_ones[16];
    uint32_t bits = 8 * sizeof *allowed, here = core_here(), is_second = 0, any = 0;
    for (i64 r = 0; r < s->rank; r++)
        is_second |= (__atomic_load_n(s->core_of[r], __ATOMIC_RELAXED) & ~WAITS) == here;
    if (!is_second)
        return;
    long size = syscall(SYS_sched_getaffinity, 0, sizeof allowed, allowed);
    memcpy(free_ones, allowed, sizeof allowed);
    for (i64 r = 0; r < s->num_ranks; r++) {
        uint32_t core = r == s->rank ? here : __atomic_load_n(s->core_of[r], __ATOMIC_RELAXED) & ~WAITS;
        if (core && core <= 16 * bits)
            free_ones[(core - 1) / bits] &= ~(1ul << (core - 1) % bits);
    }
    for (int i = 0; i < 16; i++)
        any |= free_ones[i] != 0;
    if (size > 0 && any && !syscall(SYS_sched_setaffinity, 0, size, free_ones))
        syscall(SYS_sched_setaffinity, 0, size, allowed);
}

/* Gives the core away until the flag is raised, for YIELD_NS at most. Returns whether it is. */
static int yield_until(const SharedCores *s, const i64 *flag, i64 wanted, int or_more, i64 *waited_ns)
{
    uint32_t *own = s->core_of[s->rank];
    i64 began = now_ns(), now = began;
    int raised;
    move_apart(s);
    do {
        __atomic_store_n(own, core_here() | WAITS, __ATOMIC_RELEASE);
        raised = flag_is(flag, wanted, or_more);
        if (!raised)
            sched_yield();
        now = now_ns();
    } while (!raised && now - began < YIELD_NS);
    __atomic_store_n(own, core_here(), __ATOMIC_RELEASE);
    *waited_ns += now - began;
    return raised;
}

/* For a rank whose flag was raised: workers see it before they begin the next piece. */
static void take_back_core(uint32_t *word)
{
    if (__atomic_load_n(word, __ATOMIC_RELAXED) & WAITS)
        __atomic_fetch_and(word, ~WAITS, __ATOMIC_RELEASE);
}
