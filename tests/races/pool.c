/* Two threads run jobs at once while ranks lend and take cores, for test_races.py. Returns 0 where all sums are right. */
#include <stdio.h>

#include "pool.h"

enum { JOBS = 3000, MOST_PIECES = 9, CALLERS = 2 };
static _Atomic uint32_t words[2];
static _Atomic i64 wrong, running = CALLERS;

typedef struct {
    i64 *sums, turn;
} Job;

static void add(const void *job, i64 piece)
{
    const Job *one = job;
    sched_yield(); /* others claim pieces meanwhile */
    one->sums[piece] += one->turn + piece; /* not atomic: a piece has one thread, and the caller waits for it */
}

static void *call(void *unused)
{
    i64 sums[MOST_PIECES] = {0}, expected = 0, found = 0;
    (void)unused;
    for (i64 turn = 0; turn < JOBS; turn++) {
        Job job = {sums, turn};
        i64 pieces = turn % (MOST_PIECES + 1);
        pool_run(add, &job, pieces);
        for (i64 piece = 0; piece < pieces; piece++) expected += turn + piece;
    }
    for (i64 piece = 0; piece < MOST_PIECES; piece++) found += sums[piece];
    if (found != expected) atomic_fetch_add(&wrong, 1);
    atomic_fetch_sub(&running, 1);
    return 0;
}

int main(void)
{
    pthread_t callers[CALLERS];
    atomic_store(&pool.threads, 4);
    for (i64 r = 0; r < 2; r++) cores.core_of[r] = &words[r];
    cores.num_cores = 2;
    for (i64 i = 0; i < CALLERS; i++) pthread_create(&callers[i], 0, call, 0);
    for (uint32_t turn = 0; atomic_load(&running); turn++) {
        atomic_store(&words[turn % 2], turn % 3 | (turn % 5 ? WAITS : 0));
        atomic_store(&cores.ranks, turn % 7 ? 2 : 0);
        sched_yield();
    }
    for (i64 i = 0; i < CALLERS; i++) pthread_join(callers[i], 0);
    if (wrong) puts("a sum is wrong");
    return wrong != 0;
}
