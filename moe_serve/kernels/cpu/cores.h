/* Which cores a worker may use where ranks have more threads together than there are cores. Each rank's main thread has
   the first right to the core that it is on. While that rank waits for a peer, workers of other ranks compute there; they
   leave after the piece at hand. Nobody sleeps for that: a thread that cannot go on yields, which takes about a
   microsecond where waking a thread on an idle core of a virtual machine takes twenty and costs the waker ten. The words
   are hints: whatever they say, work gets done and bits are the same. */
#pragma once
#include <stdatomic.h>
#include "vec.h"

enum { MOST_SHARING = 64 };
#define WAITS 0x80000000u /* in a word, as in dispatch/shm/shared_cores.py */

static struct {
    _Atomic i64 ranks; /* 0: this process shares no cores */
    i64 rank, num_cores;
    _Atomic uint32_t *core_of[MOST_SHARING]; /* of each rank's main thread, + 1; with WAITS while it waits */
} cores;

INLINE int cores_are_shared(void) { return atomic_load_explicit(&cores.ranks, memory_order_acquire) > 0; }

#if defined(__linux__)
#include <unistd.h>
#include <sys/syscall.h>
extern int sched_getcpu(void); /* only declared for _GNU_SOURCE */

INLINE uint32_t core_here(void) { return (uint32_t)sched_getcpu() + 1; }

/* A worker on the core of its own main thread would only be in its way: it moves to the others. */
static void cores_leave_caller(void)
{
    unsigned long mask[16] = {0};
    uint32_t here;
    if (!cores_are_shared() || atomic_load(cores.core_of[cores.rank]) != (here = core_here())) return;
    long bytes = syscall(SYS_sched_getaffinity, getpid(), sizeof mask, mask), bits = 8 * sizeof *mask, left = 0;
    if (bytes <= 0 || here > 8 * sizeof mask) return;
    mask[(here - 1) / bits] &= ~(1ul << (here - 1) % bits);
    for (int i = 0; i < 16; i++) left += mask[i] != 0;
    if (left) syscall(SYS_sched_setaffinity, 0, bytes, mask);
}
#else
INLINE uint32_t core_here(void) { return 0; }
static void cores_leave_caller(void) {}
#endif

/* Whether no rank's main thread computes on the core of the calling worker. */
INLINE int core_here_is_free(void)
{
    i64 ranks = atomic_load_explicit(&cores.ranks, memory_order_acquire);
    uint32_t here = ranks ? core_here() : 0;
    for (i64 r = 0; r < ranks; r++)
        if (atomic_load_explicit(cores.core_of[r], memory_order_acquire) == here) return 0;
    return 1;
}

/* Whether a worker that is woken may find a free core. */
INLINE int cores_are_free(void)
{
    i64 ranks = atomic_load_explicit(&cores.ranks, memory_order_acquire);
    if (ranks < cores.num_cores || !ranks) return 1;
    for (i64 r = 0; r < ranks; r++)
        if (atomic_load_explicit(cores.core_of[r], memory_order_relaxed) & WAITS) return 1;
    return 0;
}
