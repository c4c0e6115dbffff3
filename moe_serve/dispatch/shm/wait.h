/* Waits for flags, as channel.py describes them: their first milliseconds. Where ranks share cores a waiting rank's own word
   says that its core is free (shared_cores.py). Where there are other hosts, waiting takes in what they send. */

#pragma once
#include <sched.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

typedef int64_t i64;
enum {
    YIELD_NS = 2000000, /* then Python waits: it checks whether the peer lives */
    LOST_NS = 1000000, /* the core was somebody else's for so long; a front end keeps it for less */
    AGAIN_NS = 20000000, /* if it is lost again within this time, it is shared with threads that sched_yield does not reach, */
    SLEEPS_NS = 100000000, /* and waits sleep between two looks for so long */
    SLEEP_NS = 20000,
};
#define WAITS 0x80000000u /* as in shared_cores.py */
extern int sched_getcpu(void); /* only declared for _GNU_SOURCE */

typedef struct { /* as channel.py fills it */
    i64 rank, num_ranks;
    i64 looks; /* before the core is given away between two of them */
    uint32_t *const *core_of; /* [R] the word of each rank; NULL: each thread has a core */
    i64 (*poll)(i64 link); /* NULL: all ranks are on this host */
    i64 link;
    i64 *waited_ns; /* [R] for each rank, without the first looks */
    i64 lost_ns, sleeps_until_ns; /* when the core was lost last; until when waits sleep between two looks */
} Waits;

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
static void move_apart(const Waits *w)
{
    unsigned long allowed[16] = {0}, free_ones[16];
    uint32_t bits = 8 * sizeof *allowed, here = core_here(), is_second = 0, any = 0;
    for (i64 r = 0; r < w->rank; r++)
        is_second |= (__atomic_load_n(w->core_of[r], __ATOMIC_RELAXED) & ~WAITS) == here;
    if (!is_second)
        return;
    long size = syscall(SYS_sched_getaffinity, 0, sizeof allowed, allowed);
    memcpy(free_ones, allowed, sizeof allowed);
    for (i64 r = 0; r < w->num_ranks; r++) {
        uint32_t core = r == w->rank ? here : __atomic_load_n(w->core_of[r], __ATOMIC_RELAXED) & ~WAITS;
        if (core && core <= 16 * bits)
            free_ones[(core - 1) / bits] &= ~(1ul << (core - 1) % bits);
    }
    for (int i = 0; i < 16; i++)
        any |= free_ones[i] != 0;
    if (size > 0 && any && !syscall(SYS_sched_setaffinity, 0, size, free_ones))
        syscall(SYS_sched_setaffinity, 0, size, allowed);
}

/* Returns whether the flag of a rank is raised; gives up after YIELD_NS. */
static int wait_for(Waits *w, i64 peer, const i64 *flag, i64 wanted, int or_more)
{
    uint32_t *own = w->core_of ? w->core_of[w->rank] : NULL;
    const struct timespec pause = {0, SLEEP_NS};
    i64 began, now, before;
    int raised = flag_is(flag, wanted, or_more);
    for (i64 look = 0; !raised && look < w->looks; look++) {
        if (w->poll)
            w->poll(w->link);
        else
            __builtin_ia32_pause();
        raised = flag_is(flag, wanted, or_more);
    }
    if (raised)
        return 1;
    began = now = now_ns();
    if (own)
        move_apart(w);
    do {
        before = now;
        if (own)
            __atomic_store_n(own, core_here() | WAITS, __ATOMIC_RELEASE);
        if (w->poll)
            w->poll(w->link);
        raised = flag_is(flag, wanted, or_more);
        if (!raised && now < w->sleeps_until_ns)
            nanosleep(&pause, NULL);
        else if (!raised)
            sched_yield();
        now = now_ns();
        if (!own && now - before > LOST_NS) {
            if (now - w->lost_ns < AGAIN_NS)
                w->sleeps_until_ns = now + SLEEPS_NS;
            w->lost_ns = now;
        }
    } while (!raised && now - began < YIELD_NS);
    if (own)
        __atomic_store_n(own, core_here(), __ATOMIC_RELEASE);
    w->waited_ns[peer] += now - began;
    return raised;
}

/* Returns whether the flags of all `others` are raised; the flags of two ranks are `stride` bytes apart. */
i64 wait_flags(Waits *w, const uint8_t *flags, i64 stride, i64 others, i64 wanted, i64 or_more)
{
    for (i64 rank = 0; rank < w->num_ranks; rank++)
        if ((others >> rank & 1) && !wait_for(w, rank, (const i64 *)(flags + rank * stride), wanted, or_more))
            return 0;
    return 1;
}

/* For a rank whose flag was raised: workers see it before they begin the next piece. */
static void take_back_core(uint32_t *word)
{
    if (__atomic_load_n(word, __ATOMIC_RELAXED) & WAITS)
        __atomic_fetch_and(word, ~WAITS, __ATOMIC_RELEASE);
}
